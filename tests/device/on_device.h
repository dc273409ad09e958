/* Included before every file of a test that is to run on the CUDA back end: contexts are made on a device, ranks that
 * are threads talk by NCCL, and every call is waited for, so that what was written for the CPU can look at results at
 * once. Kernels reach the test's own memory as on machines whose device and host share page tables (PTXVM_PAGEABLE=1).
 * The library's own calls are not waited for: what it orders wrongly shows. */
#ifndef TEST_ON_DEVICE_H
#define TEST_ON_DEVICE_H
#include <pmoe/pmoe.h>

pmoe_status on_device_ctx_create(const pmoe_ctx_config *cfg, pmoe_ctx **out);
pmoe_status on_device_comm_from_hub(pmoe_ctx *ctx, pmoe_hub *hub, int32_t rank, pmoe_comm **out);
/* Sums by the test's own functions, which look at what they are given. */
pmoe_status on_device_gate_set_loss_sums(pmoe_gate *gate, pmoe_loss_sum micro_batch, pmoe_loss_sum global);
/* Returns `status` when the device has come to rest. */
pmoe_status on_device_wait(pmoe_status status);

#ifndef ON_DEVICE_ITSELF
#define pmoe_ctx_create(cfg, out) on_device_ctx_create(cfg, out)
#define pmoe_comm_from_hub(ctx, hub, rank, out) on_device_comm_from_hub(ctx, hub, rank, out)
#define pmoe_gate_set_loss_sums(...) on_device_gate_set_loss_sums(__VA_ARGS__)
#define pmoe_comm_allreduce(...) on_device_wait(pmoe_comm_allreduce(__VA_ARGS__))
#define pmoe_gate_forward(...) on_device_wait(pmoe_gate_forward(__VA_ARGS__))
#define pmoe_gate_backward(...) on_device_wait(pmoe_gate_backward(__VA_ARGS__))
#define pmoe_experts_forward(...) on_device_wait(pmoe_experts_forward(__VA_ARGS__))
#define pmoe_experts_backward(...) on_device_wait(pmoe_experts_backward(__VA_ARGS__))
#define pmoe_residual_forward(...) on_device_wait(pmoe_residual_forward(__VA_ARGS__))
#define pmoe_residual_backward(...) on_device_wait(pmoe_residual_backward(__VA_ARGS__))
#define pmoe_residual_mix_backward(...) on_device_wait(pmoe_residual_mix_backward(__VA_ARGS__))
#define pmoe_plan_build(...) on_device_wait(pmoe_plan_build(__VA_ARGS__))
#define pmoe_plan_finish(...) on_device_wait(pmoe_plan_finish(__VA_ARGS__))
#define pmoe_layer_forward(...) on_device_wait(pmoe_layer_forward(__VA_ARGS__))
#define pmoe_layer_backward(...) on_device_wait(pmoe_layer_backward(__VA_ARGS__))
#define pmoe_layer_reduce_grads(...) on_device_wait(pmoe_layer_reduce_grads(__VA_ARGS__))
#define pmoe_layer_grad_sumsq(...) on_device_wait(pmoe_layer_grad_sumsq(__VA_ARGS__))
#define pmoe_layer_update_selection_bias(...) on_device_wait(pmoe_layer_update_selection_bias(__VA_ARGS__))
#define pmoe_layer_init_params(...) on_device_wait(pmoe_layer_init_params(__VA_ARGS__))
#define pmoe_layer_upcycle(...) on_device_wait(pmoe_layer_upcycle(__VA_ARGS__))
#endif

#endif
