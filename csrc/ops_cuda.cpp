// The operators' CUDA kernels. The schemas and their fakes are in python/nanwatch/_ops.py.
//
// No CUDA header here: this file compiles against a torch without CUDA too, so that one build serves both. The device
// and its current stream come from torch's device-neutral guard, the kernels from range_cuda.h.
#ifdef NANWATCH_CUDA

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>
#include <torch/version.h>

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 11
#include <dlfcn.h>
#endif

#include <vector>

#include "range.h"
#include "range_cuda.h"
#include "readable.h"

namespace nanwatch {
namespace {

// The cudaStream_t that torch works on at present on this device.
void* current_stream(const c10::Device& device) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 11
  // Before c10::Stream had native_handle, torch's C shim is the way to the handle that needs no CUDA header. It is in
  // the library that is there if there is a CUDA tensor, and not on our link line, so that the module loads without it.
  using CurrentStream = int32_t (*)(int32_t, void**);
  static const auto get = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library == nullptr ? nullptr
                              : reinterpret_cast<CurrentStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  void* stream = nullptr;
  TORCH_CHECK(get != nullptr && get(device.index(), &stream) == 0, "nanwatch: torch ", TORCH_VERSION,
              " did not say which CUDA stream is current; set NANWATCH_EXT=0 to run without the compiled part.");
  return stream;
#else
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
#endif
}

// The kernels cannot run here at all: nothing was enqueued, and torch's own operations can still give the row.
bool cannot_run_here(int error) {
  constexpr int insufficient_driver = 35, no_kernel_image = 209, unsupported_ptx = 222, unsupported_toolchain = 223;
  return error == kNanwatchTooManyDims || error == insufficient_driver || error == no_kernel_image ||
         error == unsupported_ptx || error == unsupported_toolchain;
}

// True if the rows are on their way, false if the reference has to make them.
bool launched(int error, const char* op) {
  if (error == 0) return true;
  const char* const words = nanwatch_cuda_error(error);
  TORCH_CHECK(cannot_run_here(error), "nanwatch.", op, ": CUDA error ", error, " (", words,
              ") at a launch. An earlier operation may have caused it: run again with CUDA_LAUNCH_BLOCKING=1.");
  if (error != kNanwatchTooManyDims) {
    TORCH_WARN_ONCE("nanwatch's CUDA kernels cannot run here: error ", error, " (", words,
                    "). Every answer is the same, through torch's own operations, and slower. Rebuild nanwatch with "
                    "this GPU in TORCH_CUDA_ARCH_LIST and a toolkit no newer than the driver.");
  }
  return false;
}

NanwatchTensor view_of(const Readable& readable) {
  const at::Tensor& x = readable.tensor;
  return {x.const_data_ptr(), x.sizes().data(), x.strides().data(), x.dim(), int32_t(readable.format)};
}

// Both live until the stream has passed the launch: the caching allocator reuses a block in stream order.
at::Tensor rows_on(const at::Device& device, at::IntArrayRef shape) {
  return at::empty(shape, at::TensorOptions(at::kDouble).device(device));
}

at::Tensor workspace_on(const at::Device& device, size_t bytes) {
  return at::empty({int64_t(bytes)}, at::TensorOptions(at::kByte).device(device));
}

at::Tensor abs_range(const at::Tensor& x) {
  const c10::DeviceGuard guard(x.device());
  const Readable readable(x, "abs_range", false);
  if (readable.native) {
    const NanwatchTensor view = view_of(readable);
    at::Tensor row = rows_on(x.device(), {kRangeColumns});
    const at::Tensor workspace = workspace_on(x.device(), nanwatch_cuda_ranges_workspace(1));
    const int error = nanwatch_cuda_ranges(&view, 1, row.mutable_data_ptr<double>(), workspace.mutable_data_ptr(),
                                           x.device().index(), current_stream(x.device()));
    if (launched(error, "abs_range")) return row;
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
  std::vector<Readable> readable;
  std::vector<NanwatchTensor> views;
  readable.reserve(size_t(count));
  views.reserve(size_t(count));
  for (const at::Tensor& x : xs) {
    readable.emplace_back(x, "abs_ranges", false);
    // What is not native keeps its place as an empty tensor; its row is written below.
    static constexpr int64_t nothing = 0;
    views.push_back(readable.back().native ? view_of(readable.back())
                                           : NanwatchTensor{nullptr, &nothing, &nothing, 1, int32_t(Format::u8)});
  }
  at::Tensor rows = rows_on(device, {count, kRangeColumns});
  const at::Tensor workspace = workspace_on(device, nanwatch_cuda_ranges_workspace(count));
  const int error = nanwatch_cuda_ranges(views.data(), count, rows.mutable_data_ptr<double>(),
                                         workspace.mutable_data_ptr(), device.index(), current_stream(device));
  if (!launched(error, "abs_ranges")) return all_by_reference();
  for (int64_t i = 0; i < count; ++i)
    if (!readable[size_t(i)].native) rows.select(0, i).copy_(reference("nanwatch::abs_range", xs[size_t(i)]));
  return rows;
}

at::Tensor health(const at::Tensor& x) {
  const c10::DeviceGuard guard(x.device());
  const Readable readable(x, "tensor_health", true);
  if (readable.native) {
    const NanwatchTensor view = view_of(readable);
    at::Tensor row = rows_on(x.device(), {kHealthColumns});
    const at::Tensor workspace = workspace_on(x.device(), nanwatch_cuda_health_workspace());
    const int error = nanwatch_cuda_health(&view, row.mutable_data_ptr<double>(), workspace.mutable_data_ptr(),
                                           x.device().index(), current_stream(x.device()));
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
