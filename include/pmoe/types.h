/* Words every other header uses: status codes, element types, matrices and opaque handles. */
#ifndef PMOE_TYPES_H
#define PMOE_TYPES_H
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define PMOE_API
#else
#define PMOE_API __attribute__((visibility("default")))
#endif

#define PMOE_VERSION_MAJOR 0
#define PMOE_VERSION_MINOR 1
#define PMOE_VERSION_PATCH 0

/* 0 is success, a positive value is no failure, a negative value is an error whose sentence pmoe_last_error() holds. */
#define PMOE_STATUS_MAP(X)                                                                                             \
  X(OK, 0, "success")                                                                                                  \
  X(PENDING, 1, "not finished")                                                                                        \
  X(ERR_ARG, -1, "invalid argument")                                                                                   \
  X(ERR_STATE, -2, "call out of order")                                                                                \
  X(ERR_NOMEM, -3, "allocation failed")                                                                                \
  X(ERR_UNSUPPORTED, -4, "not built in, or not supported")                                                             \
  X(ERR_VERSION, -5, "structure or library too new")                                                                   \
  X(ERR_COMM, -6, "communication failed")                                                                              \
  X(ERR_DEVICE, -7, "device call failed")                                                                              \
  X(ERR_TIMEOUT, -8, "a peer did not answer")                                                                          \
  X(ERR_MISMATCH, -9, "ranks disagree")                                                                                \
  X(ERR_IO, -10, "file could not be read or written")                                                                  \
  X(ERR_INTERNAL, -11, "internal error")

#define PMOE_STATUS_ENUM(name, value, text) PMOE_##name = (value),
typedef enum pmoe_status { PMOE_STATUS_MAP(PMOE_STATUS_ENUM) PMOE_STATUS_FORCE_INT = 0x7fffffff } pmoe_status;
#undef PMOE_STATUS_ENUM

typedef enum pmoe_dtype { PMOE_F32, PMOE_BF16, PMOE_F16 } pmoe_dtype;

/* cudaStream_t; NULL on the CPU back end, where every call is finished when it returns. */
typedef void *pmoe_stream;

/* `rows` rows of `cols` contiguous elements, `ld` elements apart (ld >= cols). The memory is the caller's. Frozen: this
 * struct never grows. With rows == 0, data may be NULL. */
typedef struct pmoe_mat {
  void *data;
  pmoe_dtype dtype;
  int64_t rows, cols, ld;
} pmoe_mat;

typedef struct pmoe_ctx pmoe_ctx;
typedef struct pmoe_comm pmoe_comm;
typedef struct pmoe_hub pmoe_hub;
typedef struct pmoe_topology pmoe_topology;
typedef struct pmoe_gate pmoe_gate;
typedef struct pmoe_a2a pmoe_a2a;
typedef struct pmoe_plan pmoe_plan;
typedef struct pmoe_experts pmoe_experts;
typedef struct pmoe_residual pmoe_residual;
typedef struct pmoe_layer pmoe_layer;
typedef struct pmoe_stash pmoe_stash;

/* Which half of a backward pass to run. INPUT gives the gradients that the previous layer waits for, WEIGHT the
 * parameter gradients, and may come any time later (zero-bubble pipeline schedules); ALL is both in one call. */
typedef enum pmoe_bwd { PMOE_BWD_ALL, PMOE_BWD_INPUT, PMOE_BWD_WEIGHT } pmoe_bwd;

/* Every configuration struct starts with `size_t size`. PMOE_CONFIG_INIT(T) sets it and zeroes the rest; a zero field
 * means its default. Fields are only ever appended. A struct from a newer header is accepted when its unknown tail is
 * zero, and refused with PMOE_ERR_VERSION otherwise. */
#ifdef __cplusplus
#define PMOE_CONFIG_INIT(T)                                                                                            \
  ([] {                                                                                                                \
    T pmoe_config_{};                                                                                                  \
    pmoe_config_.size = sizeof(T);                                                                                     \
    return pmoe_config_;                                                                                               \
  }())
extern "C" {
#else
#define PMOE_CONFIG_INIT(T)                                                                                            \
  { .size = sizeof(T) }
#endif

/* "PMOE_ERR_ARG" and "invalid argument"; for a value outside the enum "PMOE_UNKNOWN" and "unknown status". Static
 * strings. */
PMOE_API const char *pmoe_status_name(pmoe_status status);
PMOE_API const char *pmoe_status_text(pmoe_status status);

/* One sentence about this thread's most recent error: the argument, its value and what was expected. Never NULL; empty
 * before the first error. Valid until this thread's next failing call. */
PMOE_API const char *pmoe_last_error(void);

/* major * 10000 + minor * 100 + patch of the library that is running. */
PMOE_API uint32_t pmoe_version(void);

/* "float32", "bfloat16", "float16", or "unknown". */
PMOE_API const char *pmoe_dtype_name(pmoe_dtype dtype);
/* Bytes of one element; 0 for a value outside the enum. */
PMOE_API size_t pmoe_dtype_size(pmoe_dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
