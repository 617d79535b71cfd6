// ops_cuda.cpp and cuda_backend.cpp over the stand-in for CUDA, serving the CPU: which tensors go to
// the kernels, which to the reference, and what the errors say. Their headers come first, so that the renaming below
// meets their text alone.
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

#include "ops/tensor_view.h"
#include "host.cpp"

#define CUDA CPU
#define native_handle() id() == 0 ? nullptr : nullptr
#define AutogradCUDA AutogradCPU
#define AutocastCUDA AutocastCPU
#define is_cuda is_cpu
#include "ops/ops_cuda.cpp"
#include "device/cuda_backend.cpp"
#undef is_cuda

extern "C" {

const void* ops_host_backend(void) {
  return nanwatch::cuda_backend();
}

}  // extern "C"
