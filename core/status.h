/* Errors: every failing path sets this thread's sentence and returns a status. */
#ifndef PMOEI_STATUS_H
#define PMOEI_STATUS_H
#include <pmoe/types.h>

#if defined(__GNUC__)
#define PMOEI_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define PMOEI_PRINTF(fmt, args)
#endif

/* Sets this thread's last error and returns `status`, so that `return pmoei_error(...)` reads as one step. */
pmoe_status pmoei_error(pmoe_status status, const char *format, ...) PMOEI_PRINTF(2, 3);

/* Return early with what `call` returned, unless it succeeded. The odd name keeps the macro hygienic. */
#define PMOEI_TRY(call)                                                                                                \
  do {                                                                                                                 \
    pmoe_status pmoei_try_status_ = (call);                                                                            \
    if (pmoei_try_status_ != PMOE_OK) return pmoei_try_status_;                                                        \
  } while (0)

/* Return PMOE_ERR_ARG with a sentence unless `condition` holds. */
#define PMOEI_REQUIRE(condition, ...)                                                                                  \
  do {                                                                                                                 \
    if (!(condition)) return pmoei_error(PMOE_ERR_ARG, __VA_ARGS__);                                                   \
  } while (0)

#define PMOEI_REQUIRE_POINTER(pointer) PMOEI_REQUIRE((pointer) != NULL, "%s is NULL; a pointer was expected", #pointer)

#endif
