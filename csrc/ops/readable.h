// A tensor as the operators' kernels take it.
#pragma once

#include <ATen/ATen.h>

#include "ops/fallback.h"
#include "cpu/range_cpu.h"
#include "ops/tensor_view.h"

namespace nanwatch {

// The tensor's memory, where the kernels can read its words in place. Nothing where the reference serves it: complex
// numbers, and dtypes that it refuses in words of its own. Conjugate and negative views do not come here, see `define`
// in python/nanwatch/numerics/_extension.py.
inline std::optional<View> readable(const at::Tensor& x, const char* op) {
  TORCH_CHECK_VALUE(storage_covers(x), "nanwatch.", op, ": the tensor's storage holds ", x.storage().nbytes(),
                    " bytes, fewer than its shape ", x.sizes(), " and strides ", x.strides(),
                    " need; it was freed or resized.");
  const std::optional<Format> format = format_of(x.scalar_type());
  if (!format.has_value()) return std::nullopt;
  return View{x.const_data_ptr(), *format, x.numel(), x.dim(), x.sizes().data(), x.strides().data()};
}

inline at::Tensor reference(const char* op, const at::Tensor& x) {
  return call_reference<at::Tensor(const at::Tensor&)>(op, x);
}

}  // namespace nanwatch
