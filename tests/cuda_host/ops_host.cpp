// ops_cuda.cpp over the stand-in for CUDA, registered for the CPU: which tensors go to the kernels, which to the
// reference, and what the errors say. Its headers come first, so that the renaming below meets its own text alone.
#define NANWATCH_CUDA 1
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>
#include <torch/version.h>

#include <vector>

#include "../../csrc/fallback.h"
#include "../../csrc/tensor_view.h"
#include "host.cpp"

#define CUDA CPU
#define native_handle() id() == 0 ? nullptr : nullptr
#include "../../csrc/ops_cuda.cpp"
