// A tensor as the operators' kernels take it.
#pragma once

#include <ATen/ATen.h>

#include "ops/fallback.h"
#include "cpu/range_cpu.h"
#include "ops/tensor_view.h"

namespace nanwatch {

inline void check_storage(const at::Tensor& x, const char* op) {
  TORCH_CHECK_VALUE(storage_covers(x), "nanwatch.", op, ": the tensor's storage holds ", x.storage().nbytes(),
                    " bytes, fewer than its shape ", x.sizes(), " and strides ", x.strides(),
                    " need; it was freed or resized.");
}

// A tensor whose words the kernels can read in place; where `native` is false the reference serves it: complex numbers,
// and dtypes that it refuses in words of its own.
struct Readable {
  at::Tensor tensor;
  Format format = Format::f64;
  bool native = false;

  // The kernels look through the conjugate and negative bits, which do not change a magnitude, unless signs are
  // counted.
  Readable(const at::Tensor& x, const char* op, bool sign_matters) : tensor(x) {
    check_storage(x, op);
    const std::optional<Format> found = format_of(x.scalar_type());
    if (!found.has_value()) return;
    format = *found;
    if (x.is_neg() && (sign_matters || negation_changes_magnitude(x, format))) tensor = x.resolve_neg();
    native = true;
  }

  View view() const {
    return {tensor.const_data_ptr(), format, tensor.numel(), tensor.dim(), tensor.sizes().data(),
            tensor.strides().data()};
  }
};

inline at::Tensor reference(const char* op, const at::Tensor& x) {
  return call_reference<at::Tensor(const at::Tensor&)>(op, x);
}

}  // namespace nanwatch
