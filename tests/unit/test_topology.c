/* Rank arithmetic against groups computed elsewhere, and the blocks of experts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <cjson/cJSON.h>
#include <pmoe/pmoe.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static cJSON *read_golden(void) {
  FILE *file = fopen(TEST_DATA_DIR "/megatron-groups.json", "rb");
  assert_non_null(file);
  fseek(file, 0, SEEK_END);
  long size = ftell(file);
  rewind(file);
  char *text = calloc((size_t)size + 1, 1);
  assert_int_equal(fread(text, 1, (size_t)size, file), size);
  fclose(file);
  cJSON *json = cJSON_Parse(text);
  free(text);
  assert_non_null(json);
  return json;
}

static int32_t number(const cJSON *object, const char *name) {
  const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
  assert_true(cJSON_IsNumber(item));
  return (int32_t)item->valuedouble;
}

static pmoe_topology_config config_of(const cJSON *entry, int32_t *world) {
  const cJSON *c = cJSON_GetObjectItemCaseSensitive(entry, "config");
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  *world = number(c, "world");
  cfg.tp = number(c, "tp");
  cfg.cp = number(c, "cp");
  cfg.pp = number(c, "pp");
  cfg.ep = number(c, "ep");
  cfg.etp = number(c, "etp");
  cfg.order = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(c, "order"));
  return cfg;
}

static void assert_groups(const pmoe_rank_lists *got, const cJSON *expected, const char *where, const char *group) {
  if (got->num_groups != cJSON_GetArraySize(expected)) fail_msg("%s %s: %d groups", where, group, got->num_groups);
  int32_t i = 0;
  const cJSON *list, *rank;
  cJSON_ArrayForEach(list, expected) {
    if (cJSON_GetArraySize(list) != got->group_size) fail_msg("%s %s: groups of %d", where, group, got->group_size);
    cJSON_ArrayForEach(rank, list) if (got->ranks[i++] != (int32_t)rank->valuedouble) fail_msg(
        "%s %s: entry %d is %d, expected %d", where, group, i - 1, got->ranks[i - 1], (int32_t)rank->valuedouble);
  }
}

static void assert_places(const pmoe_rank_lists *got, const cJSON *expected, int32_t world, const char *where) {
  for (int32_t i = 0; expected && i < world; i++)
    if (i % got->group_size != (int32_t)cJSON_GetArrayItem(expected, got->ranks[i])->valuedouble)
      fail_msg("%s %s: rank %d has place %d", where, expected->string, got->ranks[i], i % got->group_size);
}

static int check_kind(const cJSON *entry, const char *kind) {
  int32_t world, ranks[64], count = 0;
  pmoe_topology_config cfg = config_of(entry, &world);
  const cJSON *places = cJSON_GetObjectItemCaseSensitive(entry, "rank_in_group"), *group;
  cJSON_ArrayForEach(group, cJSON_GetObjectItemCaseSensitive(entry, kind)) {
    if (strcmp(group->string, "embd") == 0) continue;
    pmoe_rank_lists out = {-1, -1, ranks};
    if (pmoe_topology_ranks(world, &cfg, group->string, &out) != PMOE_OK)
      fail_msg("%s %s: %s", entry->string, group->string, pmoe_last_error());
    assert_groups(&out, group, entry->string, group->string);
    assert_places(&out, cJSON_GetObjectItemCaseSensitive(places, group->string), world, entry->string);
    count++;
  }
  return count;
}

static void test_golden_groups(void **state) {
  (void)state;
  cJSON *golden = read_golden();
  const cJSON *entry;
  int cases = 0;
  cJSON_ArrayForEach(entry, cJSON_GetObjectItemCaseSensitive(golden, "valid")) {
    assert_int_equal(check_kind(entry, "dense"), 9);
    assert_int_equal(check_kind(entry, "expert"), 5);
    cases++;
  }
  assert_int_equal(cases, 23);
  cJSON_Delete(golden);
}

static void test_golden_refusals(void **state) {
  (void)state;
  cJSON *golden = read_golden();
  const cJSON *entry;
  int cases = 0;
  cJSON_ArrayForEach(entry, cJSON_GetObjectItemCaseSensitive(golden, "invalid")) {
    int32_t world, ranks[64];
    pmoe_topology_config cfg = config_of(entry, &world);
    memset(ranks, 0x5a, sizeof ranks);
    pmoe_rank_lists out = {-1, -1, ranks};
    if (pmoe_topology_ranks(world, &cfg, "ep", &out) != PMOE_ERR_ARG) fail_msg("%s was accepted", entry->string);
    assert_true(out.num_groups == -1 && out.group_size == -1 && ranks[0] == 0x5a5a5a5a);
    cases++;
  }
  assert_int_equal(cases, 5);
  cJSON_Delete(golden);
}

/* DeepSpeed's own groups. 8 ranks, ep 4: blocks of neighbours, copies 4 apart; or the other way round (data before
 * expert parallel). With a model-parallel size of 2 and sharded experts, both inside each slice. */
static void test_deepspeed_layouts(void **state) {
  (void)state;
  int32_t ranks[8];
  pmoe_rank_lists out = {0, 0, ranks};
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  cfg.ep = 4;
  assert_int_equal(pmoe_topology_ranks(8, &cfg, "ep", &out), PMOE_OK);
  assert_memory_equal(ranks, ((int32_t[]){0, 1, 2, 3, 4, 5, 6, 7}), sizeof ranks);
  assert_int_equal(out.group_size, 4);
  assert_int_equal(pmoe_topology_ranks(8, &cfg, "expt_dp", &out), PMOE_OK);
  assert_memory_equal(ranks, ((int32_t[]){0, 4, 1, 5, 2, 6, 3, 7}), sizeof ranks);
  assert_int_equal(out.group_size, 2);
  cfg.order = "tp-cp-dp-ep-pp";
  assert_int_equal(pmoe_topology_ranks(8, &cfg, "ep", &out), PMOE_OK);
  assert_memory_equal(ranks, ((int32_t[]){0, 2, 4, 6, 1, 3, 5, 7}), sizeof ranks);
  assert_int_equal(pmoe_topology_ranks(8, &cfg, "expt_dp", &out), PMOE_OK);
  assert_memory_equal(ranks, ((int32_t[]){0, 1, 2, 3, 4, 5, 6, 7}), sizeof ranks);
  cfg.order = NULL;
  cfg.ep = cfg.tp = cfg.etp = 2;
  assert_int_equal(pmoe_topology_ranks(8, &cfg, "ep", &out), PMOE_OK);
  assert_memory_equal(ranks, ((int32_t[]){0, 2, 1, 3, 4, 6, 5, 7}), sizeof ranks);
  assert_int_equal(pmoe_topology_ranks(8, &cfg, "expt_dp", &out), PMOE_OK);
  assert_memory_equal(ranks, ((int32_t[]){0, 4, 1, 5, 2, 6, 3, 7}), sizeof ranks);
}

static void test_defaults_and_missing_tokens(void **state) {
  (void)state;
  int32_t ranks[6];
  pmoe_rank_lists out = {0, 0, ranks};
  assert_int_equal(pmoe_topology_ranks(6, NULL, "dp", &out), PMOE_OK);
  assert_true(out.num_groups == 1 && out.group_size == 6 && ranks[5] == 5);
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  cfg.order = "dp"; /* the others have size 1 */
  assert_int_equal(pmoe_topology_ranks(6, &cfg, "expt_dp", &out), PMOE_OK);
  assert_int_equal(out.group_size, 6);
  cfg.order = "pp-tp-cp-ep-dp"; /* pp first is as good as last: both grids agree on it */
  cfg.pp = 2;
  cfg.tp = 3;
  assert_int_equal(pmoe_topology_ranks(6, &cfg, "pp", &out), PMOE_OK);
  assert_memory_equal(ranks, ((int32_t[]){0, 1, 2, 3, 4, 5}), sizeof ranks);
  assert_int_equal(pmoe_topology_ranks(6, &cfg, "tp", &out), PMOE_OK);
  assert_memory_equal(ranks, ((int32_t[]){0, 2, 4, 1, 3, 5}), sizeof ranks);
}

static void refuse(int32_t world, const pmoe_topology_config *cfg, const char *group, const char *word) {
  int32_t ranks[8] = {-7};
  pmoe_rank_lists out = {-1, -1, ranks};
  pmoe_status status = pmoe_topology_ranks(world, cfg, group, &out);
  if (status != PMOE_ERR_ARG || !strstr(pmoe_last_error(), word))
    fail_msg("%s: \"%s\", \"%s\" was expected", pmoe_status_name(status), pmoe_last_error(), word);
  assert_true(out.num_groups == -1 && out.group_size == -1 && ranks[0] == -7);
}

static void test_ranks_arguments(void **state) {
  (void)state;
  int32_t ranks[8];
  pmoe_rank_lists out = {0, 0, ranks}, no_room = {0, 0, NULL};
  assert_int_equal(pmoe_topology_ranks(8, NULL, NULL, &out), PMOE_ERR_ARG);
  assert_int_equal(pmoe_topology_ranks(8, NULL, "ep", NULL), PMOE_ERR_ARG);
  assert_int_equal(pmoe_topology_ranks(8, NULL, "ep", &no_room), PMOE_ERR_ARG);
  refuse(0, NULL, "ep", "world is 0");
  refuse(-8, NULL, "ep", "world is -8");
  refuse(8, NULL, "", "group is \"\"");
  refuse(8, NULL, "embd", "group is \"embd\"");
  const pmoe_topology_config good = PMOE_CONFIG_INIT(pmoe_topology_config);
  pmoe_topology_config cfg = good;
#define refuse_with(field, value, word) (cfg = good, cfg.field = (value), refuse(8, &cfg, "ep", word))
  refuse_with(tp, -1, "cfg->tp is -1");
  refuse_with(cp, -1, "cfg->cp is -1");
  refuse_with(pp, -1, "cfg->pp is -1");
  refuse_with(ep, -1, "cfg->ep is -1");
  refuse_with(etp, -1, "cfg->etp is -1");
  refuse_with(sp, 2, "cfg->sp is 2");
  refuse_with(sp, -1, "cfg->sp is -1");
  refuse_with(tp, 3, "multiple of tp*cp*pp (3 * 1 * 1)");
  refuse_with(ep, 16, "multiple of etp*ep*pp");
  refuse_with(etp, INT32_MAX, "world is 8");
  refuse_with(order, "", "\"\" is none of");
  refuse_with(order, "tp-cp-ep-dp-pp-", "is none of");
  refuse_with(order, "tp--pp", "is none of");
  refuse_with(order, "tp-cp-ep-dpp-pp", "\"dpp\" is none of");
  refuse_with(order, "tp-cp-ep-dp-tp", "names tp twice");
  refuse_with(order, "tp-cp-ep-pp", "lacks dp, whose size is 8");
  refuse_with(size, 3, "cfg->size is 3");
  cfg = good;
  cfg.tp = cfg.cp = cfg.pp = INT32_MAX; /* no overflow */
  refuse(8, &cfg, "tp", "world is 8");
#undef refuse_with
}

static void test_expert_blocks(void **state) {
  (void)state;
  static const struct {
    int32_t experts, ep, first[4], count[4];
  } cases[] = {{5, 2, {0, 3}, {3, 2}},       {2, 4, {0, 1, 2, 2}, {1, 1, 0, 0}}, {8, 4, {0, 2, 4, 6}, {2, 2, 2, 2}},
               {0, 3, {0, 0, 0}, {0, 0, 0}}, {7, 4, {0, 2, 4, 6}, {2, 2, 2, 1}}, {9, 1, {0}, {9}}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
    for (int32_t r = 0; r < cases[i].ep; r++) {
      int32_t first = -1, count = -1;
      assert_int_equal(pmoe_expert_block(cases[i].experts, cases[i].ep, r, &first, &count), PMOE_OK);
      assert_int_equal(first, cases[i].first[r]);
      assert_int_equal(count, cases[i].count[r]);
    }
  int32_t first = -1, count = -1;
  assert_int_equal(pmoe_expert_block(INT32_MAX, INT32_MAX, INT32_MAX - 1, &first, &count), PMOE_OK);
  assert_true(first == INT32_MAX - 1 && count == 1);
  first = count = -1;
  assert_int_equal(pmoe_expert_block(-1, 2, 0, &first, &count), PMOE_ERR_ARG);
  assert_int_equal(pmoe_expert_block(4, 0, 0, &first, &count), PMOE_ERR_ARG);
  assert_int_equal(pmoe_expert_block(4, 2, 2, &first, &count), PMOE_ERR_ARG);
  assert_int_equal(pmoe_expert_block(4, 2, -1, &first, &count), PMOE_ERR_ARG);
  assert_int_equal(pmoe_expert_block(4, 2, 0, NULL, &count), PMOE_ERR_ARG);
  assert_int_equal(pmoe_expert_block(4, 2, 0, &first, NULL), PMOE_ERR_ARG);
  assert_true(first == -1 && count == -1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_golden_groups),     cmocka_unit_test(test_golden_refusals),
      cmocka_unit_test(test_deepspeed_layouts), cmocka_unit_test(test_defaults_and_missing_tokens),
      cmocka_unit_test(test_ranks_arguments),   cmocka_unit_test(test_expert_blocks),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
