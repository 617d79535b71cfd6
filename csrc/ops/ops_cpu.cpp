// The operators' CPU kernels. The schemas and their fakes are in python/nanwatch/numerics/_extension.py.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/host_walk.h"
#include "ops/tensor_view.h"

namespace nanwatch {

void parallel_for(int64_t count, int64_t grain, ParallelWork work, const void* context) {
  at::parallel_for(0, count, grain, [work, context](int64_t begin, int64_t end) { work(context, begin, end); });
}

namespace {

at::Tensor abs_range(const at::Tensor& x) {
  const std::optional<View> view = readable(x, "abs_range");
  if (!view.has_value()) return reference("nanwatch::abs_range", x);
  at::Tensor row = at::empty({kRangeColumns}, at::kDouble);
  range_cpu(*view).write(row.mutable_data_ptr<double>());
  return row;
}

at::Tensor abs_ranges(at::TensorList xs) {
  for (const at::Tensor& x : xs)  // where devices are mixed, the reference names them in its error
    if (!x.is_cpu()) return call_reference<at::Tensor(at::TensorList)>("nanwatch::abs_ranges", xs);
  at::Tensor rows = at::empty({int64_t(xs.size()), kRangeColumns}, at::kDouble);
  double* row = rows.mutable_data_ptr<double>();
  for (const at::Tensor& x : xs) {
    if (const std::optional<View> view = readable(x, "abs_ranges")) {
      range_cpu(*view).write(row);
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

}  // namespace

TORCH_LIBRARY_IMPL(nanwatch, CPU, m) {
  m.impl("abs_range", abs_range);
  m.impl("abs_ranges", abs_ranges);
  m.impl("health", health);
}

}  // namespace nanwatch
