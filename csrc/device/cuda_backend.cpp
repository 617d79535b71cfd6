// The CUDA backend of the recorder: range_cuda.h with torch's streams and a workspace for each.
#ifdef NANWATCH_CUDA

#include <c10/core/DeviceGuard.h>

#include "device/row_table.h"
#include "ops/cuda_launch.h"
#include "ops/tensor_view.h"

namespace nanwatch {
namespace {

at::Device torch_device(int number) {
  return at::Device(c10::DeviceType::CUDA, c10::DeviceIndex(number));
}

// Runs work(), which gives an error, on a device. The library's own CUDA runtime sets the thread's device: afterwards
// it is the one the user had. What torch refuses is an error like any other: it must not end the user's call.
template <class Work>
int on_device(int device, const Work& work) {
  try {
    c10::OptionalDeviceGuard guard;
    if (nanwatch_cuda_current() != device) {  // torch's guard asks the driver twice
      guard.reset_device(torch_device(device));
      if (const int error = nanwatch_cuda_select(device)) return error;
    }
    return work();
  } catch (const std::exception&) {
    return kNanwatchRefused;
  }
}

int device_of(const void* tensor) {
  const auto& x = *static_cast<const at::Tensor*>(tensor);
  return x.defined() && x.is_cuda() && has_only(x, kPlainCudaKeys) ? int(x.device().index()) : -1;
}

int stream_of(int device, void** stream, int* capturing) {
  return on_device(device, [&] {
    *stream = current_stream(torch_device(device));
    return nanwatch_cuda_stream(*stream, capturing);
  });
}

int allocate(int device, size_t bytes, void** memory, void** address) {
  return on_device(device, [&] { return nanwatch_cuda_allocate_mapped(bytes, memory, address); });
}

int observe(const NanwatchTensor* tensors, int64_t count, NanwatchRow* rows, uint64_t first, int device, void* stream) {
  return on_device(device, [&]() -> int {
    // None is made for the call: that would go through torch's dispatcher, where a mode of the user may be active.
    void* const workspace = workspace_of(device, stream);
    if (workspace == nullptr) return kNanwatchNoWorkspace;
    return nanwatch_cuda_observe(tensors, count, rows, first, workspace, device, stream);
  });
}

int wait(int device, void* stream) {
  return on_device(device, [&] { return nanwatch_cuda_await(stream); });
}

// Warns once, as `launched` does.
int cannot_run(int error) {
  if (!cannot_run_here(error)) return 0;
  launched(error, "watch");
  return 1;
}

}  // namespace

const NanwatchBackend* cuda_backend() {
  static const NanwatchBackend backend = {0,       device_of, stream_of,  allocate,
                                          observe, wait,      cannot_run, nanwatch_cuda_error};
  return &backend;
}

}  // namespace nanwatch

#endif  // NANWATCH_CUDA
