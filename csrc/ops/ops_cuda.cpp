// The operators' CUDA kernels, and that of block formats. The schemas and their fakes are in
// python/nanwatch/numerics/_extension.py.
//
// No CUDA header here: this file compiles against a torch without CUDA too, so that one build serves both. The device
// and its current stream come from torch's device-neutral guard, the kernels from range_cuda.h.
#ifdef NANWATCH_CUDA

#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "ops/block_fit_ops.h"
#include "ops/cuda_launch.h"
#include "ops/plain_cuda.h"
#include "cuda/block_fit_cuda.h"
#include "cuda/fingerprint_cuda.h"
#include "numerics/fingerprint.h"
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

// A tensor that is no run of elements from a 16-byte boundary on is copied.
at::Tensor fingerprint(const at::Tensor& x) {
  const c10::DeviceGuard guard(x.device());
  check_storage(x, "fingerprint");
  const std::optional<int64_t> format = fingerprint_format(x.scalar_type());
  if (format.has_value()) {
    const bool is_plain = x.is_contiguous() && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
    const at::Tensor run = is_plain ? x : x.clone(at::MemoryFormat::Contiguous);
    at::Tensor number = at::zeros({}, at::TensorOptions(at::kLong).device(x.device()));
    const int error = nanwatch_cuda_fingerprint(
        run.const_data_ptr(), run.numel() * run.element_size(), fingerprint_seal(*format, x.dim(), x.sizes().data()),
        number.mutable_data_ptr<int64_t>(), x.device().index(), current_stream(x.device()));
    if (launched(error, "fingerprint")) return number;
  }
  return reference("nanwatch::fingerprint", x);
}

// Rows of a block fit: four blocks of threads for each of 132 SMs, and at least four reads of a thread in each.
constexpr int64_t kFitUnits = 132 * 4, kFitElements = 4096;

}  // namespace

std::optional<at::Tensor> block_fit_cuda(const at::Tensor& x, const std::vector<BlockFormat>& formats,
                                         const std::optional<at::Tensor>& amax) {
  const bool has_word =
      x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
  if (!is_plain_cuda(x) || !has_word || x.dim() != 3 || x.numel() == 0 || !x.is_contiguous() || !storage_covers(x) ||
      reinterpret_cast<uintptr_t>(x.const_data_ptr()) % uintptr_t(x.itemsize()) != 0)
    return std::nullopt;
  const c10::DeviceGuard guard(x.device());
  const NanwatchTensor view = view_of(*readable(x, "would_fit"));
  const int64_t units = std::clamp<int64_t>(x.numel() / kFitElements, 1, kFitUnits);
  at::Tensor rows = rows_on(x.device(), {int64_t(formats.size()), units, kFitItems});
  for (size_t i = 0; i < formats.size(); ++i) {
    const int error = nanwatch_cuda_block_fit(&view, &formats[i], amax ? amax->const_data_ptr<double>() : nullptr,
                                              rows.mutable_data_ptr<double>() + int64_t(i) * units * kFitItems, units,
                                              x.device().index(), current_stream(x.device()));
    if (!launched(error, "would_fit")) return std::nullopt;
  }
  return rows;
}

TORCH_LIBRARY_IMPL(nanwatch, CUDA, m) {
  m.impl("fingerprint", fingerprint);
  m.impl("abs_range", abs_range);
  m.impl("abs_ranges", abs_ranges);
  m.impl("health", health);
}

}  // namespace nanwatch

#endif  // NANWATCH_CUDA
