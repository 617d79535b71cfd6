// The backend of the recorder for CUDA.
#pragma once

#include "device/device_backend.h"

namespace nanwatch {

// Null in a build without CUDA. Asking for it makes no CUDA call.
#ifdef NANWATCH_CUDA
const NanwatchBackend* cuda_backend();
#else
inline const NanwatchBackend* cuda_backend() {
  return nullptr;
}
#endif

}  // namespace nanwatch
