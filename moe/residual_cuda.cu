#include "core/elements.cuh"
#include "core/vmath_act.h"
#include "moe/residual_cuda.h"

using namespace pmoei;

enum { THREADS = 256, TOKENS = THREADS / 32, SUM_COLUMNS = 32, SUM_LANES = 16 };

/* ---- forward: a warp a token ---- */

template <typename T> __device__ static float warp_dot(const T *x, const float *w, int64_t n) {
  float sum = 0;
  for (int64_t i = threadIdx.x % 32; i < n; i += 32) sum += to_float(x[i]) * w[i];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

template <typename T>
__global__ static void forward_kernel(rows_of<T> x, int64_t rows, int64_t hidden, int outputs, const float *weight,
                                      const float *bias, float *scale, float *branch_scale) {
  int64_t t = blockIdx.x * (int64_t)TOKENS + threadIdx.x / 32;
  if (t >= rows) return;
  float logit[2] = {0, 0};
  for (int o = 0; o < outputs; o++) logit[o] = warp_dot(x.row(t), weight + o * hidden, hidden) + (bias ? bias[o] : 0);
  if (threadIdx.x % 32 > 0) return;
  scale[t] = outputs == 2 ? pmoei_sigmoid(logit[0] - logit[1]) : 1.0f;
  branch_scale[t] = outputs == 0 ? 1.0f : pmoei_sigmoid(outputs == 2 ? logit[1] - logit[0] : logit[0]);
}

pmoe_status pmoei_mix_forward_cuda(const pmoei_mix_call *c, pmoe_stream stream) {
  if (c->x->rows == 0) return PMOE_OK;
  return with_type(c->x->dtype, [&](auto element) {
    using T = decltype(element);
    forward_kernel<T><<<(unsigned)((c->x->rows + TOKENS - 1) / TOKENS), THREADS, 0, (cudaStream_t)stream>>>(
        view<T>(c->x), c->x->rows, c->hidden, c->outputs, c->weight, c->bias, c->scale, c->branch_scale);
    return pmoei_cuda_launched("coefficients");
  });
}

/* ---- backward ---- */

template <typename D>
__global__ static void input_kernel(rows_of<D> dx, int64_t hidden, int outputs, const float *weight, const float *scale,
                                    const float *branch_scale, const float *dscale, const float *dbranch_scale,
                                    float *dmix) {
  int64_t t = blockIdx.x;
  float branch = branch_scale[t], slope = branch * (outputs == 2 ? scale[t] : 1.0f - branch);
  float to_branch = slope * (dbranch_scale[t] - (outputs == 2 ? dscale[t] : 0.0f));
  float d[2] = {outputs == 2 ? -to_branch : to_branch, outputs == 2 ? to_branch : 0.0f};
  if (threadIdx.x < 2) dmix[2 * t + threadIdx.x] = d[threadIdx.x];
  D *row = dx.row(t);
  for (int64_t i = threadIdx.x; i < hidden; i += THREADS) {
    float sum = to_float(row[i]);
    for (int o = 0; o < outputs; o++) sum += d[o] * weight[o * hidden + i];
    row[i] = from_float<D>(sum);
  }
}

pmoe_status pmoei_mix_backward_input_cuda(const pmoei_mix_call *c, pmoe_stream stream) {
  return with_type(c->dx->dtype, [&](auto element) {
    using D = decltype(element);
    input_kernel<D><<<(unsigned)c->x->rows, THREADS, 0, (cudaStream_t)stream>>>(view<D>(c->dx), c->hidden, c->outputs,
                                                                                c->weight, c->scale, c->branch_scale,
                                                                                c->dscale, c->dbranch_scale, c->dmix);
    return pmoei_cuda_launched("coefficients' backward");
  });
}

/* A warp's lanes are columns; every SUM_LANES-th token is one thread's, and their sums are added in order. */
template <typename T>
__global__ static void weight_kernel(rows_of<T> x, int64_t rows, int64_t hidden, const float *dmix, float *weight_grad,
                                     float *bias_grad) {
  __shared__ float part[SUM_LANES][SUM_COLUMNS];
  int64_t col = blockIdx.x * (int64_t)SUM_COLUMNS + threadIdx.x;
  int o = blockIdx.y;
  bool is_bias = col == hidden; /* the last column's input is 1 */
  float sum = 0;
  for (int64_t t = threadIdx.y; t < rows && col <= hidden; t += SUM_LANES)
    sum += dmix[2 * t + o] * (is_bias ? 1.0f : to_float(x.row(t)[col]));
  part[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || col > hidden) return;
  for (int i = 1; i < SUM_LANES; i++) sum += part[i][threadIdx.x];
  if (!is_bias) weight_grad[o * hidden + col] += sum;
  else if (bias_grad) bias_grad[o] += sum;
}

pmoe_status pmoei_mix_backward_weight_cuda(const pmoei_mix_call *c, pmoe_stream stream) {
  return with_type(c->x->dtype, [&](auto element) {
    using T = decltype(element);
    dim3 grid(blocks_for(c->hidden + 1, SUM_COLUMNS), (unsigned)c->outputs), block(SUM_COLUMNS, SUM_LANES);
    weight_kernel<T><<<grid, block, 0, (cudaStream_t)stream>>>(view<T>(c->x), c->x->rows, c->hidden, c->dmix,
                                                               c->weight_grad, c->bias_grad);
    return pmoei_cuda_launched("coefficients' weight gradient");
  });
}
