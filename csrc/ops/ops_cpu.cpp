// The operators' CPU kernels. The schemas and their fakes are in python/nanwatch/numerics/_extension.py.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/host_walk.h"
#include "ops/tensor_view.h"

namespace nanwatch {

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work) {
  at::parallel_for(0, count, grain, work);
}

namespace {

// Returns a tensor of `shape` with a row for each of `xs`: by write(view, row), or by the operator's reference.
template <typename Write>
at::Tensor rows_of(at::TensorList xs, at::IntArrayRef shape, const char* caller, const char* op, const Write& write) {
  at::Tensor rows = at::empty(shape, at::kDouble);
  double* row = rows.mutable_data_ptr<double>();
  for (const at::Tensor& x : xs) {
    if (const std::optional<View> view = readable(x, caller))
      write(*view, row);
    else
      std::copy_n(reference(op, x).const_data_ptr<double>(), shape.back(), row);
    row += shape.back();
  }
  return rows;
}

constexpr auto write_range = [](const View& view, double* row) { range_cpu(view).write(row); };

at::Tensor abs_ranges(at::TensorList xs) {
  for (const at::Tensor& x : xs)  // where devices are mixed, the reference names them in its error
    if (!x.is_cpu()) return call_reference<at::Tensor(at::TensorList)>("nanwatch::abs_ranges", xs);
  return rows_of(xs, {int64_t(xs.size()), kRangeColumns}, "abs_ranges", "nanwatch::abs_range", write_range);
}

}  // namespace

TORCH_LIBRARY_IMPL(nanwatch, CPU, m) {
  m.impl("abs_range", [](const at::Tensor& x) {
    return rows_of(x, {kRangeColumns}, "abs_range", "nanwatch::abs_range", write_range);
  });
  m.impl("abs_ranges", abs_ranges);
  m.impl("health", [](const at::Tensor& x) {
    return rows_of(x, {kHealthColumns}, "tensor_health", "nanwatch::health", health_cpu);
  });
  m.impl("healths", [](at::TensorList xs) {
    return rows_of(xs, {int64_t(xs.size()), kHealthColumns}, "tensor_health", "nanwatch::health", health_cpu);
  });
}

}  // namespace nanwatch
