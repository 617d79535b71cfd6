// Helpers of a launch from torch: the device's current stream, a zeroed workspace, and the handling of errors.
// For ops_cuda.cpp and cuda_backend.cpp; no CUDA header.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 11
#include <dlfcn.h>
#endif

#include <map>
#include <mutex>
#include <utility>

#include "cuda/range_cuda.h"

namespace nanwatch {

// The cudaStream_t that torch works on at present on this device.
inline void* current_stream(const c10::Device& device) {
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
inline bool cannot_run_here(int error) {
  constexpr int insufficient_driver = 35, no_kernel_image = 209, unsupported_ptx = 222, unsupported_toolchain = 223;
  return error == insufficient_driver || error == no_kernel_image || error == unsupported_ptx ||
         error == unsupported_toolchain;
}

// True if the rows are on their way, false if the reference has to make them.
inline bool launched(int error, const char* op) {
  if (error == 0) return true;
  const char* const words = nanwatch_cuda_error(error);
  TORCH_CHECK(cannot_run_here(error), "nanwatch.", op, ": CUDA error ", error, " (", words,
              ") at a launch. An earlier operation may have caused it: run again with CUDA_LAUNCH_BLOCKING=1.");
  TORCH_WARN_ONCE("nanwatch's CUDA kernels cannot run here: error ", error, " (", words,
                  "). Every answer is the same, through torch's own operations, and slower. Rebuild nanwatch with "
                  "this GPU in TORCH_CUDA_ARCH_LIST and a toolkit no newer than the driver.");
  return false;
}

// The workspace of a stream: launches on it come one after the other and leave it zero, so only the first has to wait
// for a memset. Null where there is no memory, or a program makes ever new streams; then the caller takes one for the
// call. Not from torch's allocator: what is kept must not lie in the private pool of a graph that happens to be warming
// up.
inline void* workspace_of(int device, void* stream) {
  constexpr size_t kMost = 256;  // torch's pools have 32 streams of each of two priorities
  static std::mutex mutex;
  static auto* const workspaces = new std::map<std::pair<int, void*>, void*>;  // kept: at exit the device may be gone
  const std::lock_guard<std::mutex> lock(mutex);
  const auto entry = workspaces->find({device, stream});
  if (entry != workspaces->end()) return entry->second;
  void* memory = nullptr;
  if (workspaces->size() == kMost || nanwatch_cuda_allocate(nanwatch_cuda_workspace(), &memory) != 0 ||
      nanwatch_cuda_clear(memory, stream) != 0)
    return nullptr;
  return (*workspaces)[{device, stream}] = memory;
}

}  // namespace nanwatch
