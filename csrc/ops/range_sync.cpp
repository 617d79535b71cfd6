// Copying a row back would be one more operation on the stream: the kernel writes its 24 bytes into mapped host memory
// itself.
#ifdef NANWATCH_CUDA

#include "ops/range_sync.h"

#include <torch/csrc/autograd/python_variable.h>

#include "ops/cuda_launch.h"
#include "ops/plain_cuda.h"

namespace nanwatch {
namespace {

// A row in mapped host memory. One for each thread that waits at the same time; 4 KiB, for good.
struct Slot {
  volatile double* row = nullptr;
  double* address = nullptr;  // for the kernel
};

class Slots {
 public:
  static Slots& instance() {
    static auto* const all = new Slots;  // never destroyed: a thread may still wait at exit
    return *all;
  }

  // An empty slot if there is none left.
  Slot take(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!tried_) {
      tried_ = true;
      void *memory = nullptr, *address = nullptr;
      if (nanwatch_cuda_allocate_mapped(device, kCount * kBytes, &memory, &address) == 0)
        for (size_t i = 0; i < kCount; ++i)
          free_.push_back({reinterpret_cast<double*>(static_cast<char*>(memory) + i * kBytes),
                           reinterpret_cast<double*>(static_cast<char*>(address) + i * kBytes)});
    }
    if (free_.empty()) return {};
    const Slot slot = free_.back();
    free_.pop_back();
    return slot;
  }

  void give_back(const Slot& slot) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(slot);
  }

 private:
  static constexpr size_t kCount = 64, kBytes = 64;
  std::mutex mutex_;
  bool tried_ = false;
  std::vector<Slot> free_;
};

}  // namespace

bool range_sync(PyObject* object, RangeRow* row) {
  if (!is_plain_cuda(object)) return false;
  const at::Tensor& x = THPVariable_Unpack(object);
  const std::optional<Format> format = format_of(x.scalar_type());
  if (!format.has_value() || negation_changes_magnitude(x, *format) || !storage_covers(x)) return false;
  const c10::DeviceGuard guard(x.device());
  const LaunchContext place(x.device(), LaunchContext::Workspace::kept);
  TORCH_CHECK(place.capture == 0,
              "nanwatch.abs_range waits for the device, and this stream is being captured into a CUDA graph. Inside a "
              "capture use torch.ops.nanwatch.abs_range(x), which does not wait.");
  if (place.error != 0) return launched(place.error, "abs_range");
  if (place.workspace == nullptr) return false;
  const Slot slot = Slots::instance().take(place.device);
  if (slot.row == nullptr) return false;
  const NanwatchTensor view = {x.const_data_ptr(), x.sizes().data(), x.strides().data(), x.dim(), int32_t(*format)};
  int error = nanwatch_cuda_ranges(&view, 1, slot.address, place.workspace, place.device, place.stream);
  if (error != 0) {
    Slots::instance().give_back(slot);
    return launched(error, "abs_range");
  }
  {
    const c10::Storage storage = x.storage();  // another thread may give the tensor another one meanwhile
    const pybind11::gil_scoped_release release;
    error = nanwatch_cuda_wait(place.device, place.stream);
  }
  // The slot is not given back if this fails: nobody knows who still writes there.
  TORCH_CHECK(error == 0, "nanwatch.abs_range: CUDA error ", error, " (", nanwatch_cuda_error(error),
              ") while waiting for the device. An earlier operation may have caused it: run again with "
              "CUDA_LAUNCH_BLOCKING=1.");
  *row = range_of_row(slot.row);
  Slots::instance().give_back(slot);
  return true;
}

}  // namespace nanwatch

#endif  // NANWATCH_CUDA
