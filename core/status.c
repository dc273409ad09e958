#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[512];

pmoe_status pmoei_error(pmoe_status status, const char *format, ...) {
  char text[sizeof last_error]; /* arguments may point into last_error */
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  memcpy(last_error, text, sizeof text);
  return status;
}

const char *pmoe_last_error(void) { return last_error; }

const char *pmoe_status_name(pmoe_status status) {
  switch ((int)status) {
#define CASE(name, value, text)                                                                                        \
  case value: return "PMOE_" #name;
    PMOE_STATUS_MAP(CASE)
#undef CASE
  }
  return "PMOE_UNKNOWN";
}

const char *pmoe_status_text(pmoe_status status) {
  switch ((int)status) {
#define CASE(name, value, text)                                                                                        \
  case value: return text;
    PMOE_STATUS_MAP(CASE)
#undef CASE
  }
  return "unknown status";
}

uint32_t pmoe_version(void) { return PMOE_VERSION_MAJOR * 10000 + PMOE_VERSION_MINOR * 100 + PMOE_VERSION_PATCH; }
