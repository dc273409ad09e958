#include "core/config.h"

#include <string.h>

static pmoe_status read_size(const void *object, const char *name, size_t *size) {
  PMOEI_REQUIRE(object != NULL, "%s is NULL; a pointer was expected", name);
  memcpy(size, object, sizeof *size);
  PMOEI_REQUIRE(*size >= sizeof(size_t) && *size <= 65536,
                "%s->size is %zu; initialise the struct with PMOE_CONFIG_INIT", name, *size);
  return PMOE_OK;
}

pmoe_status pmoei_config_read(void *out, size_t out_size, const void *source, const char *name) {
  size_t size = 0;
  PMOEI_TRY(read_size(source, name, &size));
  const unsigned char *bytes = source;
  for (size_t i = out_size; i < size; i++)
    if (bytes[i] != 0)
      return pmoei_error(PMOE_ERR_VERSION,
                         "%s->size is %zu and sets a field beyond the %zu bytes that this library (version %u) knows",
                         name, size, out_size, (unsigned)pmoe_version());
  memset(out, 0, out_size);
  memcpy(out, source, size < out_size ? size : out_size);
  memcpy(out, &out_size, sizeof out_size);
  return PMOE_OK;
}

pmoe_status pmoei_struct_write(void *out, const void *source, size_t source_size, const char *name) {
  size_t size = 0;
  PMOEI_TRY(read_size(out, name, &size));
  size_t common = size < source_size ? size : source_size;
  memcpy(out, source, common);
  if (size > common) memset((char *)out + common, 0, size - common);
  memcpy(out, &size, sizeof size);
  return PMOE_OK;
}
