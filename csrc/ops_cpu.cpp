// The operators' CPU kernels. The schemas and their fakes are in python/nanwatch/_ops.py.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "range_cpu.h"
#include "tensor_view.h"

namespace nanwatch {
namespace {

// What a reduction can walk: strided memory in a format it knows. Complex numbers are replaced by their modulus, as
// torch computes it.
struct Readable {
  at::Tensor tensor;
  Format format;

  Readable(const at::Tensor& x, const char* op, bool sign_matters) : tensor(x) {
    if (x.is_complex()) tensor = at::abs(x.scalar_type() == at::kComplexHalf ? x.to(at::kComplexFloat) : x);
    const std::optional<Format> found = format_of(tensor.scalar_type());
    TORCH_CHECK_TYPE(found.has_value(), "nanwatch.", op, ": dtype ", c10::toString(x.scalar_type()),
                     " cannot be read; accepted are float64, float32, float16, bfloat16, the float8 formats, complex, "
                     "bool and the 8- to 64-bit integers. Convert the tensor first.");
    format = *found;
    if (tensor.is_neg() && (sign_matters || negation_changes_magnitude(tensor, format))) tensor = tensor.resolve_neg();
    TORCH_CHECK_VALUE(storage_covers(tensor), "nanwatch.", op, ": the tensor's storage holds ",
                      tensor.storage().nbytes(), " bytes, fewer than its shape ", tensor.sizes(), " and strides ",
                      tensor.strides(), " need; it was freed or resized.");
  }

  View view() const {
    return {tensor.const_data_ptr(), format, tensor.numel(), tensor.dim(), tensor.sizes().data(),
            tensor.strides().data()};
  }
};

at::Tensor abs_range(const at::Tensor& x) {
  const Readable readable(x, "abs_range", false);
  at::Tensor row = at::empty({kRangeColumns}, at::kDouble);
  range_cpu(readable.view(), row.mutable_data_ptr<double>());
  return row;
}

at::Tensor abs_ranges(at::TensorList xs) {
  at::Tensor rows = at::empty({int64_t(xs.size()), kRangeColumns}, at::kDouble);
  double* row = rows.mutable_data_ptr<double>();
  for (const at::Tensor& x : xs) {
    range_cpu(Readable(x, "abs_ranges", false).view(), row);
    row += kRangeColumns;
  }
  return rows;
}

at::Tensor health(const at::Tensor& x) {
  const Readable readable(x, "tensor_health", true);
  at::Tensor row = at::empty({kHealthColumns}, at::kDouble);
  health_cpu(readable.view(), row.mutable_data_ptr<double>());
  return row;
}

}  // namespace

TORCH_LIBRARY_IMPL(nanwatch, CPU, m) {
  m.impl("abs_range", abs_range);
  m.impl("abs_ranges", abs_ranges);
  m.impl("health", health);
}

// The conjugate and negative bits do not change a magnitude: without these the dispatcher would copy the tensor.
TORCH_LIBRARY_IMPL(nanwatch, Conjugate, m) {
  m.impl("abs_range", torch::CppFunction::makeFallthrough());
  m.impl("abs_ranges", torch::CppFunction::makeFallthrough());
  m.impl("health", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(nanwatch, Negative, m) {
  m.impl("abs_range", torch::CppFunction::makeFallthrough());
  m.impl("abs_ranges", torch::CppFunction::makeFallthrough());
  m.impl("health", torch::CppFunction::makeFallthrough());
}

}  // namespace nanwatch
