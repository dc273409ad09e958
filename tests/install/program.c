/* A host in C: what it needs is installed, and works. */
#include <pmoe/pmoe.h>
#include <stdio.h>
#include <string.h>

static int fail(const char *what) {
  fprintf(stderr, "%s: %s\n", what, pmoe_last_error());
  return 1;
}

int main(void) {
  uint32_t header = PMOE_VERSION_MAJOR * 10000 + PMOE_VERSION_MINOR * 100 + PMOE_VERSION_PATCH;
  if (pmoe_version() != header) return fail("pmoe_version");

  pmoe_ctx *ctx = NULL;
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.gemm = "abacus";
  if (pmoe_ctx_create(&cfg, &ctx) != PMOE_ERR_ARG || !strstr(pmoe_last_error(), "abacus")) return fail("bad provider");
  cfg.gemm = NULL;
  cfg.cpu_threads = 2;
  if (pmoe_ctx_create(&cfg, &ctx) != PMOE_OK) return fail("pmoe_ctx_create");
  pmoe_gemm_info info = PMOE_CONFIG_INIT(pmoe_gemm_info);
  if (pmoe_ctx_gemm_info(ctx, &info) != PMOE_OK || info.threads != 2) return fail("pmoe_ctx_gemm_info");
  printf("pmoe %u, %s on %s\n", (unsigned)pmoe_version(), info.library, info.isa);
  pmoe_ctx_destroy(ctx);
  return 0;
}
