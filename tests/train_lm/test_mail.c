/* Messages between ranks that are threads: order, tags and sizes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include "examples/train_lm/mail.h"
#include "examples/train_lm/ranks.h"

enum { RANKS = 4, LETTERS = 200 };

/* Every rank sends to every other, two tags mixed, and reads one tag after the other: what was sent first comes first,
 * and a sender that is ahead is not held up. */
static void all_to_all(struct lm_ranks *ranks, void *arg) {
  (void)arg;
  struct lm_mail *mail = ranks->mail;
  for (int i = 0; i < LETTERS; i++)
    for (int to = 0; to < RANKS; to++) {
      int64_t letter[3] = {ranks->rank, to, i};
      mail_send(mail, ranks->rank, to, i % 2, letter, (size_t)(1 + i % 3) * sizeof letter[0]);
    }
  mail_send(mail, ranks->rank, (ranks->rank + 1) % RANKS, 7, "", 0);
  for (int tag = 1; tag >= 0; tag--)
    for (int from = RANKS - 1; from >= 0; from--)
      for (int i = tag; i < LETTERS; i += 2) {
        int64_t letter[3] = {from, ranks->rank, i}; /* what a shorter letter leaves */
        mail_receive(mail, from, ranks->rank, tag, letter, (size_t)(1 + i % 3) * sizeof letter[0]);
        if (letter[0] != from || letter[1] != ranks->rank || letter[2] != i)
          lm_fatal("rank %d, tag %d: letter %d of rank %d is %d of %d", ranks->rank, tag, i, from, (int)letter[2],
                   (int)letter[0]);
      }
  char nothing;
  mail_receive(mail, (ranks->rank + RANKS - 1) % RANKS, ranks->rank, 7, &nothing, 0);
}

static void letters_arrive_in_order(void **state) {
  (void)state;
  struct lm_config cfg;
  struct lm_error err;
  config_init(&cfg);
  assert_int_equal(config_set(&cfg, "data", "x", &err) || config_set(&cfg, "threads", "1", &err), 0);
  assert_int_equal(config_check(&cfg, RANKS, &err), 0);
  ranks_run(&cfg, RANKS, all_to_all, NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(letters_arrive_in_order)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
