/* Training over MPI: every process holds a share of the experts and of the tokens, and the losses are those of one
 * process alone.
 *
 *   mpirun -np 2 ./05_mpi        (or ./05_mpi, a group of one) */
#include <math.h>
#include <mpi.h>
#include <pmoe/mpi.h>

#include "task.h"

enum { TOKENS = 128, EXPERTS = 4, STEPS = 60 };

static pmoe_layer *make_layer(pmoe_ctx *ctx, pmoe_topology *topology) {
  pmoe_gate_config gate = PMOE_CONFIG_INIT(pmoe_gate_config);
  gate.num_experts = EXPERTS;
  gate.top_k = 2;
  gate.norm = PMOE_NORM_AFTER_DROP;
  pmoe_experts_config experts = PMOE_CONFIG_INIT(pmoe_experts_config);
  experts.inner = 32;
  experts.act = PMOE_ACT_SWIGLU;
  pmoe_residual_config residual = PMOE_CONFIG_INIT(pmoe_residual_config);
  residual.mix = PMOE_MIX_SUM; /* a shared expert beside the routed ones */
  residual.inner = 16;
  residual.act = PMOE_ACT_SWIGLU;
  pmoe_layer_config cfg = PMOE_CONFIG_INIT(pmoe_layer_config);
  cfg.hidden = TASK_HIDDEN;
  cfg.gate = &gate;
  cfg.experts = &experts;
  cfg.residual = &residual;
  pmoe_layer *layer;
  TRY(pmoe_layer_create(ctx, topology, &cfg, &layer));
  return layer;
}

/* Trains on tokens [first, first + tokens) of the batch; loss[i] is this process's part of the loss of step i. */
static void train(pmoe_ctx *ctx, pmoe_topology *topology, int64_t first, int64_t tokens, double *loss) {
  pmoe_layer *layer = make_layer(ctx, topology);
  example_params params;
  example_params_bind(&params, layer);
  TRY(pmoe_layer_init_params(layer, 1, 0.3f));
  pmoe_stash_config stash_cfg = PMOE_CONFIG_INIT(pmoe_stash_config);
  stash_cfg.max_tokens = tokens;
  pmoe_stash *stash;
  TRY(pmoe_stash_create(layer, &stash_cfg, NULL, 0, &stash));
  task_batch batch = task_batch_make(first, tokens);
  pmoe_step step = PMOE_CONFIG_INIT(pmoe_step);
  step.training = 1;
  step.first_token = first;
  for (int i = 0; i < STEPS; i++) {
    step.step = (uint64_t)i;
    TRY(pmoe_layer_forward(layer, stash, &step, &batch.x, &batch.y, NULL));
    loss[i] = task_loss(&batch) / TOKENS;
    TRY(pmoe_layer_backward(layer, stash, 1.0f, &batch.dy, &batch.dx, PMOE_BWD_ALL, NULL));
    TRY(pmoe_layer_reduce_grads(layer, 1.0f / TOKENS,
                                NULL)); /* one factor for experts and dense parameters: 1 / global tokens */
    example_params_step(&params, 0.2f);
  }
  task_batch_free(&batch);
  pmoe_stash_destroy(stash);
  pmoe_layer_destroy(layer);
  example_params_free(&params);
}

/* All processes share the experts: ep is their number. The rows of `loss` end up as sums over the processes. */
static void train_together(pmoe_ctx *ctx, int rank, int nranks, double *loss) {
  pmoe_comm *world;
  TRY(pmoe_comm_from_mpi(ctx, MPI_COMM_WORLD, &world));
  pmoe_topology_config cfg = PMOE_CONFIG_INIT(pmoe_topology_config);
  cfg.ep = nranks;
  pmoe_topology *topology;
  TRY(pmoe_topology_create(ctx, world, &cfg, &topology));
  int64_t first = (int64_t)TOKENS * rank / nranks, end = (int64_t)TOKENS * (rank + 1) / nranks;
  train(ctx, topology, first, end - first, loss);
  MPI_Allreduce(MPI_IN_PLACE, loss, STEPS, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  pmoe_topology_destroy(topology);
  pmoe_comm_destroy(world);
}

static int compare(const double *together, const double *alone, int nranks) {
  double worst = 0;
  printf("step  loss of %d process%s  loss of one alone\n", nranks, nranks == 1 ? "" : "es");
  for (int i = 0; i < STEPS; i++) {
    if (i % 10 == 0 || i == STEPS - 1) printf("%4d  %-19.8f  %-.8f\n", i, together[i], alone[i]);
    worst = fmax(worst, fabs(together[i] - alone[i]) / alone[i]);
  }
  printf("\nlargest relative difference %.1e\n", worst);
  int bad = example_check(worst < 1e-3, "spreading the layer does not change what it learns");
  return bad + example_check(together[STEPS - 1] < 0.5 * together[0], "the loss fell to less than half");
}

int main(int argc, char **argv) {
  int provided, rank, nranks;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided); /* pmoe calls MPI from the thread that calls it */
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &nranks);
  pmoe_ctx_config cfg = PMOE_CONFIG_INIT(pmoe_ctx_config);
  cfg.cpu_threads = 1;
  pmoe_ctx *ctx;
  TRY(pmoe_ctx_create(&cfg, &ctx));
  double together[STEPS], alone[STEPS];
  train_together(ctx, rank, nranks, together);
  int bad = 0;
  if (rank == 0) {
    train(ctx, NULL, 0, TOKENS, alone);
    bad = compare(together, alone, nranks);
  }
  pmoe_ctx_destroy(ctx);
  MPI_Finalize();
  return bad ? 1 : 0;
}
