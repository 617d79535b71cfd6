// ops_cuda.cpp, range_sync.cpp and cuda_backend.cpp over the stand-in for CUDA, serving the CPU: which tensors go to the
// kernels, which to the reference, and what the errors say. Their headers come first, so that the renaming below meets
// their text alone.
#define NANWATCH_CUDA 1
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>
#include <torch/version.h>

#include <mutex>
#include <vector>

#include "ops/fallback.h"
#include "ops/tensor_view.h"
#include "host.cpp"

#define CUDA CPU
#define native_handle() id() == 0 ? nullptr : nullptr
#define AutogradCUDA AutogradCPU
#define AutocastCUDA AutocastCPU
#define is_cuda is_cpu
#include "ops/ops_cuda.cpp"
#include "ops/range_sync.cpp"
#include "device/cuda_backend.cpp"
#undef is_cuda

extern "C" {

// Whether range_sync served the tensor, and the row; -1 if it raised, with the error's words printed.
int ops_host_range_now(PyObject* object, double* row) {
  try {
    nanwatch::RangeRow found;
    if (!nanwatch::range_sync(object, &found)) return 0;
    row[0] = found.abs_min, row[1] = found.abs_max, row[2] = found.isfinite;
    return 1;
  } catch (const c10::Error& error) {
    std::printf("%s\n", error.what_without_backtrace());
    std::fflush(stdout);
    return -1;
  }
}

const void* ops_host_backend(void) {
  return nanwatch::cuda_backend();
}

}  // extern "C"
