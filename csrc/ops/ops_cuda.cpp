// The operators' CUDA kernels. The schemas and their fakes are in python/nanwatch/numerics/_extension.py.
//
// No CUDA header here: this file compiles against a torch without CUDA too, so that one build serves both. The device
// and its current stream come from torch's device-neutral guard, the kernels from range_cuda.h.
#ifdef NANWATCH_CUDA

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "ops/cuda_launch.h"
#include "ops/tensor_view.h"

namespace nanwatch {
namespace {

// Enqueues a row for each tensor; 0 or the error of the launch. The caller keeps the tensors alive until then.
int enqueue(const at::Device& device, const std::vector<NanwatchTensor>& tensors, const at::Tensor& rows) {
  void* const stream = current_stream(device);
  int capturing = 0;
  if (const int error = nanwatch_cuda_select(device.index())) return error;
  if (const int error = nanwatch_cuda_stream(stream, &capturing)) return error;
  void* workspace = capturing != 0 ? nullptr : workspace_of(device.index(), stream);
  at::Tensor lent;
  if (workspace == nullptr) {
    // A graph is replayed on other streams, and beside this one: its nodes have a workspace, and a memset, of their
    // own. It lives until the stream has passed the launch: the caching allocator reuses a block in stream order.
    lent = at::empty({int64_t(nanwatch_cuda_workspace())}, at::TensorOptions(at::kByte).device(device));
    workspace = lent.mutable_data_ptr();
    if (const int error = nanwatch_cuda_clear(workspace, stream)) return error;
  }
  return nanwatch_cuda_ranges(tensors.data(), int64_t(tensors.size()), rows.mutable_data_ptr<double>(), workspace,
                              device.index(), stream);
}

at::Tensor abs_ranges(at::TensorList xs) {
  const auto all_by_reference = [&] { return call_reference<at::Tensor(at::TensorList)>("nanwatch::abs_ranges", xs); };
  const at::Device device = xs.front().device();
  for (const at::Tensor& x : xs)
    if (x.device() != device) return all_by_reference();  // which names the devices in its error
  const c10::DeviceGuard guard(device);
  std::vector<at::Tensor> kept;
  std::vector<NanwatchTensor> tensors;
  std::vector<int64_t> unread;  // keep their places as empty ones, and their rows are written below
  for (const at::Tensor& x : xs) {
    const std::optional<View> view = readable(x, "abs_ranges");
    if (!view.has_value()) {
      unread.push_back(int64_t(tensors.size()));
      tensors.push_back({nullptr, 0, int32_t(Format::u8)});
      continue;
    }
    const at::Tensor& run = kept.emplace_back(dense(x));
    tensors.push_back({run.const_data_ptr(), run.numel(), int32_t(view->format)});
  }
  const at::Tensor rows = at::empty({int64_t(xs.size()), kRangeColumns}, at::TensorOptions(at::kDouble).device(device));
  if (!launched(enqueue(device, tensors, rows), "abs_ranges")) return all_by_reference();
  for (const int64_t i : unread) rows.select(0, i).copy_(reference("nanwatch::abs_range", xs[size_t(i)]));
  return rows;
}

at::Tensor abs_range(const at::Tensor& x) {
  const std::optional<View> view = readable(x, "abs_range");
  return view.has_value() ? abs_ranges(x).select(0, 0) : reference("nanwatch::abs_range", x);
}

TORCH_LIBRARY_IMPL(nanwatch, CUDA, m) {
  m.impl("abs_range", abs_range);
  m.impl("abs_ranges", abs_ranges);
}

}  // namespace
}  // namespace nanwatch

#endif  // NANWATCH_CUDA
