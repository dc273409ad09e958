#include "optimizer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "layers.h"
#include "parallel.h"

enum { NUMBERS_PER_TASK = 1 << 14 };
static const float beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f;

static int64_t dense_numel(const struct lm_model *model) {
  return model->dense_numel[LM_SUM_STAGE] + model->dense_numel[LM_SUM_DENSE_DP];
}

void gradients_zero(struct lm_model *model) {
  memset(model->dense_grad, 0, (size_t)dense_numel(model) * sizeof(float));
  for (int i = 0; i < model->num_params; i++) {
    struct lm_param *p = &model->params[i];
    if (p->sum == LM_SUM_LAYER) memset(p->grad, 0, (size_t)p->numel * sizeof(float));
  }
}

/* ---- dense gradients ---- */

struct dense_job {
  float *grad, scale;
  double *partial; /* one sum a task, added in order afterwards */
  int64_t n;
};

LM_VECTORISED static void scale_numbers(float *x, float scale, int64_t n) {
  LM_SIMD
  for (int64_t i = 0; i < n; i++) x[i] *= scale;
}

LM_VECTORISED static double square_numbers(const float *x, int64_t n) {
  double sum = 0;
  LM_SIMD_SUM(sum)
  for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
  return sum;
}

static void scale_task(void *arg, int64_t index, int thread) {
  (void)thread;
  const struct dense_job *job = arg;
  struct lm_range range = lm_block(job->n, NUMBERS_PER_TASK, index);
  scale_numbers(job->grad + range.begin, job->scale, range.end - range.begin);
}

static void square_task(void *arg, int64_t index, int thread) {
  (void)thread;
  const struct dense_job *job = arg;
  struct lm_range range = lm_block(job->n, NUMBERS_PER_TASK, index);
  job->partial[index] = square_numbers(job->grad + range.begin, range.end - range.begin);
}

/* The first and the last stage hold a copy of the token table each: one embeds with it, the other is the head. */
static void sum_table(struct lm_model *model) {
  const struct lm_param *table = NULL;
  if (!model->ranks->ends) return;
  for (int c = 0; c < model->num_chunks; c++)
    if (model->chunks[c].token_table) table = model->chunks[c].token_table;
  LM_TRY(pmoe_comm_allreduce(model->ranks->ends, table->grad, table->numel, PMOE_F32));
}

void gradients_reduce(struct lm_model *model, float scale) {
  const int64_t *numel = model->dense_numel;
  LM_TRY(pmoe_comm_allreduce(model->ranks->stage, model->dense_grad, numel[LM_SUM_STAGE], PMOE_F32));
  if (model->ranks->at.tp > 1)
    LM_TRY(pmoe_comm_allreduce(model->ranks->dense_dp, model->dense_grad + numel[LM_SUM_STAGE], numel[LM_SUM_DENSE_DP],
                               PMOE_F32));
  struct dense_job job = {.grad = model->dense_grad, .scale = scale, .n = dense_numel(model)};
  lm_parallel(lm_num_blocks(job.n, NUMBERS_PER_TASK), scale_task, &job);
  sum_table(model);
  for (int l = 0; l < model->cfg.layers; l++)
    if (model->layers[l].moe) LM_TRY(pmoe_layer_reduce_grads(model->layers[l].moe, scale, NULL));
}

static double sum_of_squares(const struct lm_param *p) {
  int64_t tasks = lm_num_blocks(p->numel, NUMBERS_PER_TASK);
  struct dense_job job = {.grad = p->grad, .n = p->numel};
  job.partial = lm_alloc((size_t)tasks, sizeof *job.partial);
  lm_parallel(tasks, square_task, &job);
  double sum = 0;
  for (int64_t i = 0; i < tasks; i++) sum += job.partial[i];
  free(job.partial);
  return sum;
}

double gradients_norm(struct lm_model *model) {
  double sum = 0;
  for (int i = 0; i < model->num_params; i++) {
    const struct lm_param *p = &model->params[i];
    if (p->sum != LM_SUM_LAYER && p->counted) sum += sum_of_squares(p);
  }
  for (int l = 0; l < model->cfg.layers; l++) {
    double layer = 0;
    if (model->layers[l].moe) LM_TRY(pmoe_layer_grad_sumsq(model->layers[l].moe, &layer, NULL));
    if (model->ranks->at.tp_rank == 0) sum += layer;
  }
  ranks_sum(model->ranks->model, &sum, 1);
  return sqrt(sum);
}

/* ---- AdamW ---- */

float learning_rate(const struct lm_config *cfg, int64_t step) {
  if (step < cfg->warmup) return cfg->lr * (float)(step + 1) / (float)cfg->warmup;
  double rest = cfg->steps > cfg->warmup ? (double)(step - cfg->warmup) / (double)(cfg->steps - cfg->warmup) : 1.0;
  if (rest > 1) rest = 1;
  return cfg->lr * (float)(0.1 + 0.45 * (1.0 + cos(3.14159265358979323846 * rest)));
}

struct adam_job {
  struct lm_param *param;
  float rate, decay, grad_scale, correction1, correction2;
};

LM_VECTORISED static void adam_numbers(const struct adam_job *job, struct lm_range range) {
  float *w = job->param->master, *m = job->param->adam_m, *v = job->param->adam_v;
  const float *grad = job->param->grad;
  LM_SIMD
  for (int64_t i = range.begin; i < range.end; i++) {
    float g = grad[i] * job->grad_scale;
    m[i] = beta1 * m[i] + (1 - beta1) * g;
    v[i] = beta2 * v[i] + (1 - beta2) * g * g;
    float update = m[i] * job->correction1 / (sqrtf(v[i] * job->correction2) + epsilon);
    w[i] -= job->rate * (update + job->decay * w[i]);
  }
}

static void adam_task(void *arg, int64_t index, int thread) {
  (void)thread;
  const struct adam_job *job = arg;
  adam_numbers(job, lm_block(job->param->numel, NUMBERS_PER_TASK, index));
}

void adamw_step(struct lm_model *model, float rate, float grad_scale, int64_t step) {
  struct adam_job job = {.rate = rate, .grad_scale = grad_scale};
  job.correction1 = (float)(1 / (1 - pow((double)beta1, (double)step)));
  job.correction2 = (float)(1 / (1 - pow((double)beta2, (double)step)));
  for (int i = 0; i < model->num_params; i++) {
    job.param = &model->params[i];
    job.decay = job.param->decay ? model->cfg.weight_decay : 0;
    lm_parallel(lm_num_blocks(job.param->numel, NUMBERS_PER_TASK), adam_task, &job);
  }
  model_round_params(model);
}
