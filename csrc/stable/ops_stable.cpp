// The operators' CPU kernels over PyTorch's stable ABI: one binary for every PyTorch from 2.10 on. A wheel loads it
// where none of its modules fits. ops/ops_cpu.cpp is what fits one PyTorch, and is cheaper to call.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/range_cpu.h"

namespace nanwatch {

void parallel_for(int64_t count, int64_t grain, ParallelWork work, const void* context) {
  torch::stable::parallel_for(0, count, grain,
                              [work, context](int64_t begin, int64_t end) { work(context, begin, end); });
}

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
namespace stable = torch::stable::detail;

// Where the stable ABI has no number for a format, the reference serves it.
std::optional<Format> format_of(int32_t dtype) {
  static const std::vector<std::pair<int32_t, Format>> formats = {
#define NANWATCH_PAIR(enumerator, name) {aoti_torch_dtype_##name(), Format::enumerator},
      NANWATCH_STABLE_FORMATS(NANWATCH_PAIR)
#undef NANWATCH_PAIR
  };
  for (const auto& [number, format] : formats)
    if (number == dtype) return format;
  return std::nullopt;
}

// The tensor's memory as the kernels read it; nothing where the reference serves it. The view refers to the tensor.
// The dispatcher has already resolved the conjugate and negative bits: no kernel is registered behind them.
std::optional<View> view_of(const Tensor& x, const char* op) {
  int32_t dtype;
  int64_t bytes, *sizes, *strides;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(x.get(), &bytes));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(x.get(), &sizes));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(x.get(), &strides));
  const int64_t numel = x.numel(), dims = x.dim();
  int64_t last = x.storage_offset();
  for (int64_t d = 0; d < dims; ++d) last += (sizes[d] - 1) * strides[d];
  STD_TORCH_CHECK(numel == 0 || (last + 1) * int64_t(x.element_size()) <= bytes, "nanwatch.", op,
                  ": the tensor's storage holds ", bytes,
                  " bytes, fewer than its shape and strides need; it was freed or resized.");
  const std::optional<Format> format = format_of(dtype);
  if (!format.has_value()) return std::nullopt;
  return View{x.const_data_ptr(), *format, numel, dims, sizes, strides};
}

Tensor filled(std::vector<int64_t> shape, ScalarType type) {
  return torch::stable::empty(torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), shape.size()), type);
}

template <typename Number>
Number* numbers(const Tensor& x) {
  return static_cast<Number*>(x.mutable_data_ptr());
}

// Calls the operator that python/nanwatch/numerics/_extension.py defines over the reference for this.
template <typename Argument>
Tensor reference(const char* op, const Argument& argument) {
  std::array<StableIValue, 1> stack{stable::from(argument)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
  return stable::to<Tensor>(stack[0]);
}

Tensor abs_range(const Tensor& x) {
  const std::optional<View> view = view_of(x, "abs_range");
  if (!view.has_value()) return reference("nanwatch::reference_abs_range", x);
  Tensor row = filled({kRangeColumns}, ScalarType::Double);
  range_cpu(*view, numbers<double>(row));
  return row;
}

Tensor abs_ranges(const std::vector<Tensor>& xs) {
  if (!std::all_of(xs.begin(), xs.end(), [](const Tensor& x) { return x.is_cpu(); }))
    return reference("nanwatch::reference_abs_ranges", xs);
  Tensor rows = filled({int64_t(xs.size()), kRangeColumns}, ScalarType::Double);
  double* row = numbers<double>(rows);
  for (const Tensor& x : xs) {
    std::copy_n(numbers<double>(abs_range(x)), kRangeColumns, row);
    row += kRangeColumns;
  }
  return rows;
}

Tensor health(const Tensor& x) {
  const std::optional<View> view = view_of(x, "tensor_health");
  if (!view.has_value()) return reference("nanwatch::reference_health", x);
  Tensor row = filled({kHealthColumns}, ScalarType::Double);
  health_cpu(*view, numbers<double>(row));
  return row;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nanwatch, CPU, m) {
  m.impl("abs_range", TORCH_BOX(&abs_range));
  m.impl("abs_ranges", TORCH_BOX(&abs_ranges));
  m.impl("health", TORCH_BOX(&health));
}

}  // namespace nanwatch
