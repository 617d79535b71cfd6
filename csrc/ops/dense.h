// A tensor's elements as one run of memory, which is all that the CUDA kernel reads.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace nanwatch {

// The tensor without what it repeats: each dimension of stride 0 cut to its first index.
inline at::Tensor without_repeats(const at::Tensor& x) {
  std::vector<int64_t> sizes = x.sizes().vec();
  for (size_t d = 0; d < sizes.size(); ++d)
    if (x.strides()[d] == 0 && sizes[d] > 1) sizes[d] = 1;
  return x.as_strided(sizes, x.strides());
}

// Returns whether the elements lie without gaps, in whatever order, each on its boundary.
inline bool is_dense(const at::Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % x.itemsize() == 0 &&
         (x.is_contiguous() || x.is_non_overlapping_and_dense());
}

// `x` itself where it is dense, else a copy of what it does not repeat. A dispatch mode of the user does not see the
// copy.
inline at::Tensor dense(const at::Tensor& x) {
  if (is_dense(x)) return x;
  const bool is_aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % x.itemsize() == 0;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  const at::Tensor distinct = without_repeats(x);
  return is_aligned && distinct.is_non_overlapping_and_dense() ? distinct
                                                               : distinct.clone(at::MemoryFormat::Contiguous);
}

}  // namespace nanwatch
