/* oneDNN 2 and 3. What runs where was measured (GFLOP/s of one core at 32 to 256 rows):
 *   float32, A · B and Aᵀ · B   sgemm
 *   float32, A · Bᵀ             matmul made for this m: 10 to 50 % faster than sgemm from 16 rows on, slower below
 *   bf16, A · Bᵀ                matmul made for this m: up to 50 % faster than one whose m is given at run time
 *   bf16, A · B and Aᵀ · B      matmul with m, or k, given at run time: as fast, and one serves every row count
 * The choice depends on sizes alone, so that results repeat. A matmul for a new m costs about 0.1 ms once (0.7 ms with
 * AMX); oneDNN keeps its code in a cache of its own, shared by all threads. */
#include <oneapi/dnnl/dnnl.h>
#include <stdio.h>
#include <string.h>

#include "core/gemm_provider.h"

enum { SETS = 16, WAYS = 4, SGEMM_ROWS = 16 };

/* Two versions of the library, one set of names. */
#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t mem_desc;
typedef const_dnnl_memory_desc_t mem_desc_arg;
static mem_desc_arg pass(const mem_desc *desc) { return *desc; }
static dnnl_status_t make_desc(mem_desc *out, dnnl_dims_t dims, dnnl_data_type_t type, dnnl_dims_t strides) {
  return dnnl_memory_desc_create_with_strides(out, 2, dims, type, strides);
}
static void free_desc(mem_desc *desc) { dnnl_memory_desc_destroy(*desc); }
static dnnl_status_t append_sum(dnnl_post_ops_t ops) {
  return dnnl_post_ops_append_sum(ops, 1.0f, 0, dnnl_data_type_undef);
}
static dnnl_status_t make_matmul(dnnl_primitive_desc_t *out, dnnl_engine_t engine, const mem_desc desc[3],
                                 dnnl_primitive_attr_t attr) {
  return dnnl_matmul_primitive_desc_create(out, engine, desc[0], desc[1], NULL, desc[2], attr);
}
#else
typedef dnnl_memory_desc_t mem_desc;
typedef const dnnl_memory_desc_t *mem_desc_arg;
static mem_desc_arg pass(const mem_desc *desc) { return desc; }
static dnnl_status_t make_desc(mem_desc *out, dnnl_dims_t dims, dnnl_data_type_t type, dnnl_dims_t strides) {
  return dnnl_memory_desc_init_by_strides(out, 2, dims, type, strides);
}
static void free_desc(mem_desc *desc) { (void)desc; }
static dnnl_status_t append_sum(dnnl_post_ops_t ops) { return dnnl_post_ops_append_sum(ops, 1.0f); }
static dnnl_status_t make_matmul(dnnl_primitive_desc_t *out, dnnl_engine_t engine, const mem_desc desc[3],
                                 dnnl_primitive_attr_t attr) {
  dnnl_matmul_desc_t matmul;
  dnnl_status_t status = dnnl_matmul_desc_init(&matmul, &desc[0], &desc[1], NULL, &desc[2]);
  return status == dnnl_success ? dnnl_primitive_desc_create(out, &matmul, attr, engine, NULL) : status;
}
#endif

/* A product's layout: what a matmul is made for. m or k may be DNNL_RUNTIME_DIM_VAL. */
typedef struct layout {
  int64_t m, n, k, lda, ldb, ldc;
  int32_t trans_a, trans_b, accumulate, in, out, unused;
} layout;

typedef struct matmul {
  layout key;
  dnnl_primitive_desc_t desc;
  dnnl_primitive_t primitive; /* NULL: empty */
  uint64_t used;              /* when, for eviction */
} matmul;

typedef struct worker {
  dnnl_stream_t stream;
  dnnl_memory_t scratch; /* the largest so far, the library's memory */
  size_t scratch_bytes;
  uint64_t clock;
  matmul cache[SETS][WAYS];
} worker;

typedef struct state {
  dnnl_engine_t engine;
  worker workers[];
} state;

#define TRY(call)                                                                                                      \
  do {                                                                                                                 \
    dnnl_status_t try_status_ = (call);                                                                                \
    if (try_status_ != dnnl_success) return try_status_;                                                               \
  } while (0)

static dnnl_data_type_t type_of(int32_t dtype) { return dtype == PMOE_BF16 ? dnnl_bf16 : dnnl_f32; }

static void free_descs(mem_desc desc[3], int count) {
  for (int i = 0; i < count; i++) free_desc(&desc[i]);
}

/* Descriptors of A, B and C. */
static dnnl_status_t make_descs(const layout *l, mem_desc desc[3]) {
  dnnl_dims_t dims[3] = {{l->m, l->k}, {l->k, l->n}, {l->m, l->n}};
  dnnl_dims_t strides[3] = {{l->lda, 1}, {l->ldb, 1}, {l->ldc, 1}};
  if (l->trans_a) strides[0][0] = 1, strides[0][1] = l->lda;
  if (l->trans_b) strides[1][0] = 1, strides[1][1] = l->ldb;
  for (int i = 0; i < 3; i++) {
    dnnl_status_t status = make_desc(&desc[i], dims[i], type_of(i < 2 ? l->in : l->out), strides[i]);
    if (status != dnnl_success) {
      free_descs(desc, i);
      return status;
    }
  }
  return dnnl_success;
}

/* The caller supplies the matmul's temporaries: a library-owned buffer would belong to the thread that made the matmul,
 * and worker numbers do not always meet the same thread. */
static dnnl_status_t make_attr(bool accumulate, dnnl_primitive_attr_t *out) {
  dnnl_post_ops_t ops = NULL;
  TRY(dnnl_primitive_attr_create(out));
  dnnl_status_t status = dnnl_primitive_attr_set_scratchpad_mode(*out, dnnl_scratchpad_mode_user);
  if (status == dnnl_success && accumulate) {
    status = dnnl_post_ops_create(&ops);
    if (status == dnnl_success) status = append_sum(ops);
    if (status == dnnl_success) status = dnnl_primitive_attr_set_post_ops(*out, ops);
    if (ops) dnnl_post_ops_destroy(ops);
  }
  if (status != dnnl_success) dnnl_primitive_attr_destroy(*out);
  return status;
}

static dnnl_status_t make_primitive_desc(dnnl_engine_t engine, const layout *l, dnnl_primitive_desc_t *out) {
  mem_desc desc[3];
  dnnl_primitive_attr_t attr;
  TRY(make_descs(l, desc));
  dnnl_status_t status = make_attr(l->accumulate != 0, &attr);
  if (status == dnnl_success) {
    status = make_matmul(out, engine, desc, attr);
    dnnl_primitive_attr_destroy(attr);
  }
  free_descs(desc, 3);
  return status;
}

static void drop(matmul *entry) {
  if (!entry->primitive) return;
  dnnl_primitive_destroy(entry->primitive);
  dnnl_primitive_desc_destroy(entry->desc);
  memset(entry, 0, sizeof *entry);
}

static dnnl_status_t find_matmul(state *s, worker *w, const layout *key, matmul **out) {
  uint64_t hash = 0;
  const int64_t parts[] = {key->m,       key->n,       key->k,          key->lda, key->ldb, key->ldc,
                           key->trans_a, key->trans_b, key->accumulate, key->in,  key->out};
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) hash = (hash ^ (uint64_t)parts[i]) * 0x9e3779b97f4a7c15u;
  matmul *set = w->cache[(hash >> 40) % SETS], *oldest = set;
  for (int i = 0; i < WAYS; i++) {
    if (set[i].primitive && memcmp(&set[i].key, key, sizeof *key) == 0) {
      *out = &set[i];
      (*out)->used = ++w->clock;
      return dnnl_success;
    }
    if (set[i].used < oldest->used) oldest = &set[i];
  }
  drop(oldest);
  TRY(make_primitive_desc(s->engine, key, &oldest->desc));
  dnnl_status_t status = dnnl_primitive_create(&oldest->primitive, oldest->desc);
  if (status != dnnl_success) {
    dnnl_primitive_desc_destroy(oldest->desc);
    memset(oldest, 0, sizeof *oldest);
    return status;
  }
  oldest->key = *key;
  oldest->used = ++w->clock;
  *out = oldest;
  return dnnl_success;
}

/* The worker's scratch memory as one that fits `desc`. */
static dnnl_status_t make_scratch(state *s, worker *w, mem_desc_arg desc, dnnl_memory_t *out) {
  size_t bytes = dnnl_memory_desc_get_size(desc);
  if (bytes > w->scratch_bytes) {
    dnnl_memory_t larger;
    TRY(dnnl_memory_create(&larger, desc, s->engine, DNNL_MEMORY_ALLOCATE));
    if (w->scratch) dnnl_memory_destroy(w->scratch);
    w->scratch = larger;
    w->scratch_bytes = bytes;
  }
  void *handle = NULL;
  if (w->scratch) TRY(dnnl_memory_get_data_handle(w->scratch, &handle));
  return dnnl_memory_create(out, desc, s->engine, handle);
}

static dnnl_status_t execute(state *s, worker *w, const matmul *entry, const layout *actual, const pmoei_product *p) {
  static const int names[4] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_SCRATCHPAD};
  void *data[3] = {(void *)p->a, (void *)p->b, p->c};
  dnnl_exec_arg_t args[4];
  mem_desc desc[3];
  TRY(make_descs(actual, desc));
  int made = 0;
  dnnl_status_t status = dnnl_success;
  for (; made < 4; made++) {
    args[made].arg = names[made];
    if (made < 3) status = dnnl_memory_create(&args[made].memory, pass(&desc[made]), s->engine, data[made]);
    else
      status = make_scratch(s, w, dnnl_primitive_desc_query_md(entry->desc, dnnl_query_scratchpad_md, 0),
                            &args[made].memory);
    if (status != dnnl_success) break;
  }
  if (status == dnnl_success) status = dnnl_primitive_execute(entry->primitive, w->stream, 4, args);
  if (status == dnnl_success) status = dnnl_stream_wait(w->stream);
  while (made > 0) dnnl_memory_destroy(args[--made].memory);
  free_descs(desc, 3);
  return status;
}

static int run(pmoei_gemm *gemm, int32_t thread, const pmoei_product *p) {
  state *s = gemm->state;
  if (p->in == PMOE_F32 && (!p->trans_b || p->trans_a || p->m < SGEMM_ROWS))
    return dnnl_sgemm(p->trans_a ? 'T' : 'N', p->trans_b ? 'T' : 'N', p->m, p->n, p->k, 1.0f, p->a, p->lda, p->b,
                      p->ldb, p->accumulate ? 1.0f : 0.0f, p->c, p->ldc);
  layout actual = {p->m, p->n, p->k, p->lda, p->ldb, p->ldc, p->trans_a, p->trans_b, p->accumulate, p->in, p->out, 0},
         key = actual;
  if (p->trans_a) key.k = DNNL_RUNTIME_DIM_VAL;
  else if (!p->trans_b) key.m = DNNL_RUNTIME_DIM_VAL;
  matmul *entry;
  dnnl_status_t status = find_matmul(s, &s->workers[thread], &key, &entry);
  return status == dnnl_success ? execute(s, &s->workers[thread], entry, &actual, p) : status;
}

/* The name of what would run a product of this type; empty if nothing would. */
static void probe(state *s, pmoe_dtype dtype, char *name, size_t bytes) {
  layout l = {64, 64, 64, 64, 64, 64, 0, 1, 0, dtype, PMOE_F32, 0};
  dnnl_primitive_desc_t desc;
  const char *text = "";
  name[0] = 0;
  if (make_primitive_desc(s->engine, &l, &desc) != dnnl_success) return;
  if (dnnl_primitive_desc_query(desc, dnnl_query_impl_info_str, 0, &text) == dnnl_success)
    snprintf(name, bytes, "%s", text);
  dnnl_primitive_desc_destroy(desc);
}

/* bf16 pays with AMX; with AVX512_BF16 alone on AMD's cores (twice float32), not on Intel's (half of it). Elsewhere
 * oneDNN emulates it, if it has it at all. */
static bool bf16_pays(const char *name) {
  if (strstr(name, "amx")) return true;
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_is("intel")) return false;
#endif
  return strstr(name, "bf16") != NULL;
}

static pmoe_status create(pmoe_ctx *ctx, pmoei_gemm *gemm) {
  const dnnl_version_t *version = dnnl_version();
  snprintf(gemm->library, sizeof gemm->library, "oneDNN %d.%d.%d", version->major, version->minor, version->patch);
  gemm->state_bytes = sizeof(state) + (size_t)gemm->threads * sizeof(worker);
  PMOEI_TRY(pmoei_alloc(ctx, gemm->state_bytes, "oneDNN workers", &gemm->state));
  state *s = gemm->state;
  dnnl_status_t status = dnnl_engine_create(&s->engine, dnnl_cpu, 0);
  for (int32_t i = 0; i < gemm->threads && status == dnnl_success; i++)
    status = dnnl_stream_create(&s->workers[i].stream, s->engine, dnnl_stream_default_flags);
  if (status != dnnl_success)
    return pmoei_error(PMOE_ERR_INTERNAL, "%s: the CPU engine could not be made (status %d)", gemm->library,
                       (int)status);
  char f32[24], bf16[24];
  probe(s, PMOE_F32, f32, sizeof f32);
  probe(s, PMOE_BF16, bf16, sizeof bf16);
  gemm->takes_bf16 = bf16_pays(bf16);
  gemm->bf16 = gemm->takes_bf16 ? "native" : "widened to float32";
  snprintf(gemm->isa, sizeof gemm->isa, gemm->takes_bf16 ? "%s, %s" : "%s", f32, bf16);
  return PMOE_OK;
}

static void destroy(pmoe_ctx *ctx, pmoei_gemm *gemm) {
  state *s = gemm->state;
  for (int32_t i = 0; s && i < gemm->threads; i++) {
    worker *w = &s->workers[i];
    for (int j = 0; j < SETS * WAYS; j++) drop(&w->cache[j / WAYS][j % WAYS]);
    if (w->scratch) dnnl_memory_destroy(w->scratch);
    if (w->stream) dnnl_stream_destroy(w->stream);
  }
  if (s && s->engine) dnnl_engine_destroy(s->engine);
  pmoei_free(ctx, s, gemm->state_bytes);
}

const pmoei_gemm_provider pmoei_gemm_onednn = {"onednn", create, destroy, run};
