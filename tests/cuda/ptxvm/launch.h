// Work as graphs hold it: checked when it is described, done when it runs.
#pragma once
#include "runtime.h"

namespace ptxvm {

cudaError_t prepare_launch(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared, bool cooperative,
                           std::string *name, Work *work);
cudaError_t prepare_copy(void *to, const void *from, size_t size, cudaMemcpyKind kind, Work *work);
cudaError_t prepare_copy(const cudaMemcpy3DParms &p, Work *work);
cudaError_t prepare_fill(const cudaMemsetParams &p, Work *work);
void register_symbol(const void *host, uint64_t address, size_t size);

} // namespace ptxvm
