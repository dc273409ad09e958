/* The exchange alone: ranks are threads of this process, tokens travel to the experts' owners and back.
 *
 * Every rank has another number of tokens, one of them none. Expert e multiplies its rows by e + 1, so that what comes
 * back is known. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <pthread.h>

#include "example.h"

enum { MAX_RANKS = 8, EXPERTS = 5, TOP_K = 2, HIDDEN = 4, MAX_TOKENS = 3 * MAX_RANKS };
static const float choice_weight[TOP_K] = {0.75f, 0.25f};

/* What a rank brings and what it found. */
typedef struct rank_data {
  pmoe_hub *hub;
  int32_t rank;
  int64_t tokens, rows, expert_rows[EXPERTS], from_rank[MAX_RANKS];
  int32_t first_expert, num_experts;
  double error;
} rank_data;

static int64_t tokens_of(int32_t rank) { return rank == 1 ? 0 : 2 + rank; }

static int32_t expert_of(int32_t rank, int64_t token, int32_t k) {
  return (int32_t)((3 * rank + token + 2 * k) % EXPERTS);
}

/* A token says where it comes from. */
static float element(int32_t rank, int64_t token, int column) {
  return column == 0 ? (float)rank : (float)(10 * token + column);
}

/* Routing by hand instead of a router: every choice gets the next free slot of its expert. */
static void route(int32_t rank, pmoe_routing *routing) {
  for (int64_t t = 0; t < routing->tokens; t++) {
    for (int32_t k = 0; k < TOP_K; k++) {
      int32_t e = expert_of(rank, t, k);
      int64_t choice = t * TOP_K + k;
      routing->expert[choice] = e;
      routing->slot[choice] = routing->expert_rows[e]++;
      routing->weight[choice] = choice_weight[k];
      routing->expert_count[e]++;
    }
  }
}

/* The experts' work, in place: local expert i has info->expert_rows[i] rows, one expert after another. */
static void scale_rows(const pmoe_plan_info *info, float *rows, rank_data *me) {
  for (int32_t i = 0; i < info->num_experts; i++) {
    me->expert_rows[i] = info->expert_rows[i];
    for (int64_t r = 0; r < info->expert_rows[i]; r++, rows += HIDDEN) {
      me->from_rank[(int32_t)rows[0]]++;
      for (int j = 0; j < HIDDEN; j++) rows[j] *= (float)(info->first_expert + i + 1);
    }
  }
}

static double largest_error(const rank_data *me, const float *y) {
  double worst = 0;
  for (int64_t t = 0; t < me->tokens; t++) {
    float factor = 0;
    for (int32_t k = 0; k < TOP_K; k++) factor += choice_weight[k] * (float)(expert_of(me->rank, t, k) + 1);
    for (int j = 0; j < HIDDEN; j++)
      worst = fmax(worst, fabs((double)(y[t * HIDDEN + j] - factor * element(me->rank, t, j))));
  }
  return worst;
}

static void exchange(rank_data *me, pmoe_plan *plan) {
  int32_t expert[MAX_TOKENS * TOP_K];
  int64_t slot[MAX_TOKENS * TOP_K], expert_count[EXPERTS] = {0}, expert_rows[EXPERTS] = {0};
  float weight[MAX_TOKENS * TOP_K], x[MAX_TOKENS * HIDDEN], y[MAX_TOKENS * HIDDEN];
  for (int64_t t = 0; t < me->tokens; t++)
    for (int j = 0; j < HIDDEN; j++) x[t * HIDDEN + j] = element(me->rank, t, j);
  pmoe_routing routing = PMOE_CONFIG_INIT(pmoe_routing);
  routing.tokens = me->tokens, routing.num_experts = EXPERTS, routing.top_k = TOP_K;
  routing.expert = expert, routing.slot = slot, routing.weight = weight;
  routing.expert_count = expert_count, routing.expert_rows = expert_rows;
  route(me->rank, &routing);

  TRY(pmoe_plan_build(plan, &routing, NULL)); /* from here on it is known how many rows come */
  pmoe_plan_info info = PMOE_CONFIG_INIT(pmoe_plan_info);
  TRY(pmoe_plan_get_info(plan, &info));
  me->rows = info.recv_rows, me->first_expert = info.first_expert, me->num_experts = info.num_experts;
  float *memory = example_alloc((size_t)info.recv_rows * HIDDEN, sizeof(float));
  pmoe_mat tokens = example_mat(x, me->tokens, HIDDEN), rows = example_mat(memory, info.recv_rows, HIDDEN);
  pmoe_mat back = example_mat(y, me->tokens, HIDDEN);

  TRY(pmoe_dispatch_forward(plan, &routing, &tokens, &rows, NULL));
  TRY(pmoe_plan_finish(plan, NULL)); /* work that does not need the rows could run before this line */
  scale_rows(&info, memory, me);
  TRY(pmoe_combine_forward(plan, &routing, &rows, NULL, &back, NULL));
  TRY(pmoe_plan_finish(plan, NULL));
  me->error = largest_error(me, y);
  free(memory);
}

static void *run_rank(void *arg) {
  rank_data *me = arg;
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = 1;
  pmoe_ctx *ctx;
  pmoe_comm *comm;
  pmoe_a2a *a2a;
  pmoe_plan *plan;
  TRY(pmoe_ctx_create(&cfg, &ctx));
  TRY(pmoe_comm_from_hub(ctx, me->hub, me->rank, &comm));
  TRY(pmoe_a2a_create(ctx, comm, HIDDEN, PMOE_F32, EXPERTS, 0, NULL, &a2a));
  TRY(pmoe_plan_create(a2a, &plan));
  exchange(me, plan);
  pmoe_plan_destroy(plan);
  pmoe_a2a_destroy(a2a);
  pmoe_comm_destroy(comm);
  pmoe_ctx_destroy(ctx);
  return NULL;
}

static int report(const rank_data *ranks, int32_t nranks) {
  int64_t sent = 0, received = 0;
  double worst = 0;
  printf("rank  tokens  rows received  of them from rank...");
  for (int32_t r = 0; r < nranks; r++) printf("%*d", r == 0 ? 1 : 3, r);
  printf("  rows per expert\n");
  for (int32_t r = 0; r < nranks; r++) {
    printf("%4d  %6d  %13d  %20s", r, (int)ranks[r].tokens, (int)ranks[r].rows, "");
    for (int32_t from = 0; from < nranks; from++) printf("%*d", from == 0 ? 1 : 3, (int)ranks[r].from_rank[from]);
    for (int32_t i = 0; i < ranks[r].num_experts; i++)
      printf("  e%d:%d", ranks[r].first_expert + i, (int)ranks[r].expert_rows[i]);
    printf(ranks[r].num_experts ? "\n" : "  (no expert)\n");
    sent += ranks[r].tokens * TOP_K;
    received += ranks[r].rows;
    worst = fmax(worst, ranks[r].error);
  }
  putchar('\n');
  int bad = example_check(sent == received, "every choice became a row on the rank that owns its expert");
  return bad + example_check(worst == 0, "every token came back as the weighted sum of its experts' rows");
}

int main(int argc, char **argv) {
  int32_t nranks = (int32_t)example_option(argc, argv, "--ranks", 4, 1, MAX_RANKS,
                                           "Dispatch and combine among N ranks that are threads of this process.");
  rank_data ranks[MAX_RANKS] = {0};
  pthread_t thread[MAX_RANKS];
  pmoe_hub *hub;
  TRY(pmoe_hub_create(nranks, &hub));
  for (int32_t r = 0; r < nranks; r++) {
    ranks[r] = (rank_data){.hub = hub, .rank = r, .tokens = tokens_of(r)};
    if (pthread_create(&thread[r], NULL, run_rank, &ranks[r]) != 0) return 1;
  }
  for (int32_t r = 0; r < nranks; r++) pthread_join(thread[r], NULL);
  pmoe_hub_destroy(hub);
  return report(ranks, nranks) ? 1 : 0;
}
