/* The host's own communicator: processes that talk through socket pairs lend pmoe their collectives.
 *
 * Three processes share five experts and have different numbers of tokens. The same layer, alone and with all the
 * tokens, must give each of them the same outputs and gradients. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "example.h"

enum { MAX_RANKS = 8, EXPERTS = 5, HIDDEN = 6, MAX_TOKENS = 4 * MAX_RANKS };

/* ---- the host's collectives ---- */

typedef struct host_comm {
  int32_t rank, nranks;
  int socket[MAX_RANKS]; /* to each other rank */
} host_comm;

static int move(int fd, char *data, size_t bytes, int sending) {
  while (bytes > 0) {
    ssize_t n = sending ? write(fd, data, bytes) : read(fd, data, bytes);
    if (n <= 0) return -1; /* the peer is gone */
    data += n;
    bytes -= (size_t)n;
  }
  return 0;
}

static int host_alltoallv(void *user, const void *src, const size_t *send_bytes, void *dst, const size_t *recv_bytes) {
  host_comm *host = user;
  char *from = (char *)src, *to = dst;
  for (int32_t peer = 0; peer < host->nranks; peer++) {
    int first_sends = host->rank < peer,
        failed = 0; /* peers in rising order, the lower rank first: no two wait for each other */
    if (peer == host->rank) {
      if (send_bytes[peer] > 0) memcpy(to, from, send_bytes[peer]);
    } else if (first_sends) {
      failed = move(host->socket[peer], from, send_bytes[peer], 1) || move(host->socket[peer], to, recv_bytes[peer], 0);
    } else {
      failed = move(host->socket[peer], to, recv_bytes[peer], 0) || move(host->socket[peer], from, send_bytes[peer], 1);
    }
    if (failed) return 1;
    from += send_bytes[peer];
    to += recv_bytes[peer];
  }
  return 0;
}

static int host_allgather(void *user, const void *src, void *dst, size_t bytes_each) {
  host_comm *host = user;
  size_t bytes[MAX_RANKS];
  char *copies = example_alloc((size_t)host->nranks, bytes_each);
  for (int32_t r = 0; r < host->nranks; r++) {
    bytes[r] = bytes_each;
    if (bytes_each > 0) memcpy(copies + (size_t)r * bytes_each, src, bytes_each);
  }
  int failed = host_alltoallv(user, copies, bytes, dst, bytes);
  free(copies);
  return failed;
}

static int host_allreduce(void *user, float *inout, size_t n) {
  host_comm *host = user;
  float *all = example_alloc((size_t)host->nranks * n, sizeof(float));
  int failed = host_allgather(user, inout, all, n * sizeof(float));
  for (size_t i = 0; i < n && !failed; i++) {
    inout[i] = all[i];
    for (int32_t r = 1; r < host->nranks; r++) inout[i] += all[(size_t)r * n + i];
  }
  free(all);
  return failed;
}

static int host_barrier(void *user) {
  char token = 0, all[MAX_RANKS];
  return host_allgather(user, &token, all, 1);
}

/* ---- the layer ---- */

/* One rank's share of the tokens, and what came out. */
typedef struct result {
  int64_t first, tokens;
  float y[MAX_TOKENS * HIDDEN], dx[MAX_TOKENS * HIDDEN];
  float router_grad[EXPERTS * HIDDEN];
  int64_t rows, bytes_sent;
} result;

static int64_t tokens_of(int32_t rank) { return rank == 1 ? 1 : 3; }

static pmoe_layer *make_layer(pmoe_ctx *ctx, pmoe_topology *topology) {
  pmoe_gate_config gate = PMOE_CONFIG_INIT(pmoe_gate_config);
  gate.num_experts = EXPERTS;
  gate.top_k = 2;
  gate.norm = PMOE_NORM_AFTER_DROP;
  pmoe_experts_config experts = PMOE_CONFIG_INIT(pmoe_experts_config);
  experts.inner = 10;
  experts.act = PMOE_ACT_GELU;
  experts.bias = 1;
  pmoe_layer_config cfg = PMOE_CONFIG_INIT(pmoe_layer_config);
  cfg.hidden = HIDDEN;
  cfg.gate = &gate;
  cfg.experts = &experts;
  pmoe_layer *layer;
  TRY(pmoe_layer_create(ctx, topology, &cfg, &layer));
  return layer;
}

/* Forward and backward over tokens [first, first + tokens) of the data. topology NULL: this process alone. */
static void run_layer(pmoe_ctx *ctx, pmoe_topology *topology, result *out) {
  float x[MAX_TOKENS * HIDDEN], dy[MAX_TOKENS * HIDDEN];
  for (int64_t i = 0; i < out->tokens * HIDDEN; i++) {
    x[i] = example_noise(2, (uint64_t)(out->first * HIDDEN + i));
    dy[i] = example_noise(3, (uint64_t)(out->first * HIDDEN + i));
  }
  pmoe_mat tokens = example_mat(x, out->tokens, HIDDEN), dout = example_mat(dy, out->tokens, HIDDEN);
  pmoe_mat y = example_mat(out->y, out->tokens, HIDDEN), dx = example_mat(out->dx, out->tokens, HIDDEN);
  pmoe_layer *layer = make_layer(ctx, topology);
  example_params params;
  example_params_bind(&params, layer);
  TRY(pmoe_layer_init_params(layer, 7, 0.5f)); /* the same model whatever the layout */
  pmoe_stash_config stash_cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  stash_cfg.max_tokens = MAX_TOKENS;
  pmoe_stash *stash;
  TRY(pmoe_stash_create(layer, &stash_cfg, NULL, 0, &stash));
  TRY(pmoe_layer_forward(layer, stash, NULL, &tokens, &y, NULL));
  TRY(pmoe_layer_backward(layer, stash, 1.0f, &dout, &dx, PMOE_BWD_ALL, NULL));
  TRY(pmoe_layer_reduce_grads(layer, 1.0f, NULL));
  memcpy(out->router_grad, params.list[0].grad, sizeof out->router_grad);
  pmoe_metrics metrics = PMOE_CONFIG_INIT(pmoe_metrics);
  TRY(pmoe_stash_metrics(stash, &metrics));
  out->rows = metrics.recv_rows;
  out->bytes_sent = metrics.bytes_sent;
  pmoe_stash_destroy(stash);
  pmoe_layer_destroy(layer);
  example_params_free(&params);
}

static double largest_difference(const float *a, const float *b, int64_t n) {
  double worst = 0;
  for (int64_t i = 0; i < n; i++) worst = fmax(worst, fabs((double)(a[i] - b[i])));
  return worst;
}

/* The host's groups: all processes share the experts, and nobody else holds copies of them. */
static pmoe_topology *make_topology(pmoe_ctx *ctx, pmoe_comm *all, pmoe_comm *self) {
  pmoe_groups groups = PMOE_CONFIG_INIT(pmoe_groups);
  groups.ep = all;
  groups.dense_dp = all;
  groups.expert_dp = self;
  pmoe_topology *topology;
  TRY(pmoe_topology_from_groups(ctx, &groups, &topology));
  return topology;
}

static void run_shared(pmoe_ctx *ctx, host_comm *host, result *out) {
  pmoe_comm_callbacks callbacks = PMOE_CONFIG_INIT(pmoe_comm_callbacks);
  callbacks.user = host;
  callbacks.rank = host->rank;
  callbacks.nranks = host->nranks;
  callbacks.allgather = host_allgather;
  callbacks.alltoallv = host_alltoallv;
  callbacks.allreduce_f32 = host_allreduce;
  callbacks.barrier = host_barrier;
  pmoe_comm *all, *self;
  TRY(pmoe_comm_from_callbacks(ctx, &callbacks, &all));
  TRY(pmoe_comm_self(ctx, &self));
  pmoe_topology *topology = make_topology(ctx, all, self);
  run_layer(ctx, topology, out);
  pmoe_topology_destroy(topology);
  pmoe_comm_destroy(self);
  pmoe_comm_destroy(all);
}

/* What a rank reports to rank 0, through the host's own allgather. */
typedef struct report {
  int32_t pid;
  int64_t tokens, rows, bytes_sent;
  double difference;
} report;

static int print_reports(const report *reports, int32_t nranks) {
  double worst = 0;
  printf("rank  process  tokens  rows for its experts  bytes sent  largest difference from one process alone\n");
  for (int32_t r = 0; r < nranks; r++) {
    printf("%4d  %7d  %6d  %20d  %10d  %.1e\n", r, reports[r].pid, (int)reports[r].tokens, (int)reports[r].rows,
           (int)reports[r].bytes_sent, reports[r].difference);
    worst = fmax(worst, reports[r].difference);
  }
  putchar('\n');
  return example_check(worst < 1e-5, "outputs, input gradients and the router's gradient are those of one process");
}

static int run_rank(host_comm *host) {
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = 1;
  pmoe_ctx *ctx;
  TRY(pmoe_ctx_create(&cfg, &ctx));
  result mine = {.tokens = tokens_of(host->rank)}, alone = {0};
  for (int32_t r = 0; r < host->nranks; r++) {
    if (r < host->rank) mine.first += tokens_of(r);
    alone.tokens += tokens_of(r);
  }
  run_shared(ctx, host, &mine);
  run_layer(ctx, NULL, &alone);
  pmoe_ctx_destroy(ctx);

  report own = {(int32_t)getpid(), mine.tokens, mine.rows, mine.bytes_sent, 0}, all[MAX_RANKS];
  own.difference = largest_difference(mine.y, alone.y + mine.first * HIDDEN, mine.tokens * HIDDEN);
  own.difference =
      fmax(own.difference, largest_difference(mine.dx, alone.dx + mine.first * HIDDEN, mine.tokens * HIDDEN));
  own.difference = fmax(own.difference, largest_difference(mine.router_grad, alone.router_grad, EXPERTS * HIDDEN));
  if (host_allgather(host, &own, all, sizeof own) != 0) return 1;
  return host->rank == 0 ? print_reports(all, host->nranks) : 0;
}

/* Becomes nranks processes; returns in each of them with its sockets. Before any pmoe call: threads do not survive a
 * fork. */
static host_comm fork_ranks(int32_t nranks) {
  static int ends[MAX_RANKS][MAX_RANKS];
  for (int32_t a = 0; a < nranks; a++) {
    for (int32_t b = a + 1; b < nranks; b++) {
      int pair[2];
      if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) exit(1);
      ends[a][b] = pair[0];
      ends[b][a] = pair[1];
    }
  }
  host_comm host = {.nranks = nranks};
  for (int32_t r = 1; r < nranks && host.rank == 0; r++) {
    pid_t pid = fork();
    if (pid < 0) exit(1);
    if (pid == 0) host.rank = r;
  }
  for (int32_t a = 0; a < nranks; a++) {
    host.socket[a] = ends[host.rank][a];
    for (int32_t b = 0; b < nranks; b++) /* so that a process that dies is noticed */
      if (a != b && a != host.rank) close(ends[a][b]);
  }
  return host;
}

int main(int argc, char **argv) {
  int32_t nranks =
      (int32_t)example_option(argc, argv, "--ranks", 3, 1, MAX_RANKS,
                              "A layer over N processes that are joined by the program's own collectives.");
  host_comm host = fork_ranks(nranks);
  int bad = run_rank(&host);
  if (host.rank > 0) return bad;
  int status;
  while (wait(&status) > 0) bad += status != 0;
  return bad ? 1 : 0;
}
