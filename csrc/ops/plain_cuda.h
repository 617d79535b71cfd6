// The gate of every raw read of CUDA memory; plain_view.h has that of the host's.
#pragma once

#include "ops/tensor_view.h"

namespace nanwatch {

// The keys of kPlainKeys in plain_view.h, on CUDA.
inline const c10::DispatchKeySet kPlainCudaKeys({c10::DispatchKey::CUDA, c10::DispatchKey::ADInplaceOrView,
                                                 c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCUDA,
                                                 c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

// Returns whether it is a plain strided CUDA tensor.
inline bool is_plain_cuda(const at::Tensor& x) {
  return x.defined() && x.is_cuda() && (x.key_set().raw_repr() & ~kPlainCudaKeys.raw_repr()) == 0;
}

}  // namespace nanwatch
