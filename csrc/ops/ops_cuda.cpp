// The operators' CUDA kernels. The schemas and their fakes are in python/nanwatch/numerics/_extension.py.
//
// No CUDA header here: this file compiles against a torch without CUDA too, so that one build serves both. The device
// and its current stream come from torch's device-neutral guard, the kernels from range_cuda.h.
#ifdef NANWATCH_CUDA

#include <torch/library.h>

#include <vector>

#include "ops/cuda_launch.h"
#include "numerics/range.h"

namespace nanwatch {
namespace {

at::Tensor rows_on(const at::Device& device, at::IntArrayRef shape) {
  return at::empty(shape, at::TensorOptions(at::kDouble).device(device));
}

// Enqueues `count` ranges; 0 or the error of the launch.
int enqueue_ranges(const at::Device& device, const NanwatchTensor* views, int64_t count, const at::Tensor& rows) {
  const LaunchContext place(device);
  if (place.error != 0) return place.error;
  return nanwatch_cuda_ranges(views, count, rows.mutable_data_ptr<double>(), place.workspace, place.device,
                              place.stream);
}

at::Tensor abs_range(const at::Tensor& x) {
  const c10::DeviceGuard guard(x.device());
  if (const std::optional<View> found = readable(x, "abs_range")) {
    const NanwatchTensor view = view_of(*found);
    at::Tensor row = rows_on(x.device(), {kRangeColumns});
    if (launched(enqueue_ranges(x.device(), &view, 1, row), "abs_range")) return row;
  }
  return reference("nanwatch::abs_range", x);
}

at::Tensor abs_ranges(at::TensorList xs) {
  const auto all_by_reference = [&] { return call_reference<at::Tensor(at::TensorList)>("nanwatch::abs_ranges", xs); };
  const at::Device device = xs.front().device();
  const int64_t count = int64_t(xs.size());
  for (const at::Tensor& x : xs)
    if (x.device() != device) return all_by_reference();  // which names the devices in its error
  const c10::DeviceGuard guard(device);
  std::vector<NanwatchTensor> views;
  std::vector<int64_t> unread;  // keep their places as empty ones, and their rows are written below
  views.reserve(size_t(count));
  for (const at::Tensor& x : xs) {
    static constexpr int64_t nothing = 0;
    const std::optional<View> view = readable(x, "abs_ranges");
    if (!view.has_value()) unread.push_back(int64_t(views.size()));
    views.push_back(view_of(view.value_or(View{nullptr, Format::u8, 0, 1, &nothing, &nothing})));
  }
  at::Tensor rows = rows_on(device, {count, kRangeColumns});
  if (!launched(enqueue_ranges(device, views.data(), count, rows), "abs_ranges")) return all_by_reference();
  for (const int64_t i : unread) rows.select(0, i).copy_(reference("nanwatch::abs_range", xs[size_t(i)]));
  return rows;
}

at::Tensor health(const at::Tensor& x) {
  const c10::DeviceGuard guard(x.device());
  if (const std::optional<View> found = readable(x, "tensor_health")) {
    const NanwatchTensor view = view_of(*found);
    at::Tensor row = rows_on(x.device(), {kHealthColumns});
    const LaunchContext place(x.device());
    const int error = place.error != 0 ? place.error
                                       : nanwatch_cuda_health(&view, row.mutable_data_ptr<double>(), place.workspace,
                                                              place.device, place.stream);
    if (launched(error, "tensor_health")) return row;
  }
  return reference("nanwatch::health", x);
}

}  // namespace

TORCH_LIBRARY_IMPL(nanwatch, CUDA, m) {
  m.impl("abs_range", abs_range);
  m.impl("abs_ranges", abs_ranges);
  m.impl("health", health);
}

}  // namespace nanwatch

#endif  // NANWATCH_CUDA
