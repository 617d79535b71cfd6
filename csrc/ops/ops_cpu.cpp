// The operators' CPU kernels. The schemas and their fakes are in python/nanwatch/numerics/_extension.py.
#include <torch/library.h>

#include <algorithm>

#include "cpu/fingerprint_cpu.h"
#include "ops/readable.h"

namespace nanwatch {
namespace {

at::Tensor abs_range(const at::Tensor& x) {
  const std::optional<View> view = readable(x, "abs_range");
  if (!view.has_value()) return reference("nanwatch::abs_range", x);
  at::Tensor row = at::empty({kRangeColumns}, at::kDouble);
  range_cpu(*view, row.mutable_data_ptr<double>());
  return row;
}

at::Tensor abs_ranges(at::TensorList xs) {
  for (const at::Tensor& x : xs)  // where devices are mixed, the reference names them in its error
    if (!x.is_cpu()) return call_reference<at::Tensor(at::TensorList)>("nanwatch::abs_ranges", xs);
  at::Tensor rows = at::empty({int64_t(xs.size()), kRangeColumns}, at::kDouble);
  double* row = rows.mutable_data_ptr<double>();
  for (const at::Tensor& x : xs) {
    if (const std::optional<View> view = readable(x, "abs_ranges")) {
      range_cpu(*view, row);
    } else {
      const at::Tensor values = reference("nanwatch::abs_range", x);
      std::copy_n(values.const_data_ptr<double>(), kRangeColumns, row);
    }
    row += kRangeColumns;
  }
  return rows;
}

at::Tensor health(const at::Tensor& x) {
  const std::optional<View> view = readable(x, "tensor_health");
  if (!view.has_value()) return reference("nanwatch::health", x);
  at::Tensor row = at::empty({kHealthColumns}, at::kDouble);
  health_cpu(*view, row.mutable_data_ptr<double>());
  return row;
}

at::Tensor as_scalar(uint64_t number) {
  return at::scalar_tensor(at::Scalar(int64_t(number)), at::kLong);
}

// The dispatcher resolves a lazy conjugate or negative bit before: a fingerprint is of the bits that the values have.
at::Tensor fingerprint(const at::Tensor& x) {
  check_storage(x, "fingerprint");
  const std::optional<int64_t> format = fingerprint_format(x.scalar_type());
  if (!format.has_value()) return reference("nanwatch::fingerprint", x);
  const uint64_t sum =
      fingerprint_cpu({x.const_data_ptr(), x.element_size(), x.numel(), x.dim(), x.sizes().data(), x.strides().data()});
  return as_scalar(sealed_fingerprint(sum, *format, x.dim(), x.sizes().data()));
}

// The results of the two operators from one read.
std::tuple<at::Tensor, at::Tensor> range_and_fingerprint(const at::Tensor& x) {
  const std::optional<View> view = readable(x, "range_and_fingerprint");
  if (!view.has_value()) return {abs_range(x), fingerprint(x)};
  at::Tensor values = at::empty({kRangeColumns}, at::kDouble);
  const RangeRow row = range_and_fingerprint_cpu(*view);
  row.write(values.mutable_data_ptr<double>());
  return {values, as_scalar(sealed_fingerprint(row.blocks, int64_t(view->format), view->dims, view->sizes))};
}

// The health of a part of a tensor, and the sum of its blocks, the first of which has the number `first` in the tensor.
std::tuple<at::Tensor, at::Tensor> part_health(const at::Tensor& x, int64_t first) {
  const BlockPart part{first, true};
  const std::optional<View> view = readable(x, "part_health");
  if (!view.has_value()) {
    const ElementView elements{x.const_data_ptr(), x.element_size(),  x.numel(), x.dim(),
                               x.sizes().data(),   x.strides().data()};
    return {reference("nanwatch::health", x), as_scalar(fingerprint_cpu(elements, part))};
  }
  at::Tensor row = at::empty({kHealthColumns}, at::kDouble);
  const uint64_t sum = health_and_fingerprint_cpu(*view, part, row.mutable_data_ptr<double>());
  return {row, as_scalar(sum)};
}

}  // namespace

TORCH_LIBRARY_IMPL(nanwatch, CPU, m) {
  m.impl("fingerprint", fingerprint);
  m.impl("range_and_fingerprint", range_and_fingerprint);
  m.impl("abs_range", abs_range);
  m.impl("abs_ranges", abs_ranges);
  m.impl("health", health);
  m.impl("part_health", part_health);
}

}  // namespace nanwatch
