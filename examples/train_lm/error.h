/* How the trainer's parts say what went wrong, and how a rank gives up. */
#ifndef LM_ERROR_H
#define LM_ERROR_H
#include <pmoe/types.h>

struct lm_error {
  char text[768];
};

/* Writes the sentence and returns -1. */
int lm_error_set(struct lm_error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* How the program ends. A run that a signal stopped ends with 128 and the signal's number. */
enum { LM_EXIT_FAILED = 1, LM_EXIT_USAGE = 64 };

/* Ends the program, all its ranks included, with a sentence on stderr: LM_EXIT_FAILED, and LM_EXIT_USAGE for a command
 * line or a setting that is wrong in itself. */
_Noreturn void lm_fatal(const char *format, ...) __attribute__((format(printf, 1, 2)));
_Noreturn void lm_fatal_usage(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Ends the program with the library's sentence unless `call` succeeded, whichever thread it is on. */
#define LM_TRY(call) lm_try((call), #call)
void lm_try(pmoe_status status, const char *call);

/* Zeroed and aligned to 64 bytes; free() releases it. Ends the program when there is no memory. */
void *lm_alloc(size_t count, size_t bytes);

#endif
