/* Structs that grow: copying in and out of callers that were compiled against an older or newer header. */
#ifndef PMOEI_CONFIG_H
#define PMOEI_CONFIG_H
#include "core/status.h"

/* Copies the caller's struct at `source` (its first member is its size) into `out`, zero-filling what the caller does
 * not know. ERR_ARG if its size is impossible, ERR_VERSION if it sets fields this library does not know. */
pmoe_status pmoei_config_read(void *out, size_t out_size, const void *source, const char *name);
#define PMOEI_CONFIG_READ(out, source) pmoei_config_read((out), sizeof *(out), (source), #source)

/* The same in the other direction: fills as much of the caller's struct as it has room for, and zeroes what it has
 * beyond. */
pmoe_status pmoei_struct_write(void *out, const void *source, size_t source_size, const char *name);
#define PMOEI_STRUCT_WRITE(out, source) pmoei_struct_write((out), (source), sizeof *(source), #out)

#endif
