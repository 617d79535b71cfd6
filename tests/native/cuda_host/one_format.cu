// The loop of each format in a kernel of its own, so that a disassembly says which is which.
#include <cuda_runtime.h>

#include "cuda/cuda_scan.h"

namespace nanwatch {
namespace {

template <Format F, class Lanes>
__device__ void read(Lanes& lanes, const char* data, int count, typename Codes<F>::Word* ends, uint32_t* counts) {
  scan_run<typename Codes<F>::Word>(lanes, data, count, int(threadIdx.x) / kWarpThreads, kWarps);
  if constexpr (sizeof(lanes) == sizeof(RangeLanes<F, kPairs>)) {
    ends[2 * threadIdx.x] = lanes.range().lo;
    ends[2 * threadIdx.x + 1] = lanes.range().hi;
  } else {
    ends[2 * threadIdx.x] = lanes.ends.range().lo;
    ends[2 * threadIdx.x + 1] = lanes.ends.range().hi;
    counts[2 * threadIdx.x] = lanes.num_zero();
    counts[2 * threadIdx.x + 1] = lanes.num_small();
  }
}

}  // namespace
}  // namespace nanwatch

#define KERNELS(name)                                                                                       \
  extern "C" __global__ void __launch_bounds__(512, 2)                                                      \
      range_##name(const char* data, int count, nanwatch::Codes<nanwatch::Format::name>::Word* ends) {      \
    nanwatch::RangeLanes<nanwatch::Format::name, nanwatch::kPairs> lanes;                                   \
    nanwatch::read<nanwatch::Format::name>(lanes, data, count, ends, nullptr);                              \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(512, 2) health_##name(                                       \
      const char* data, int count, nanwatch::Codes<nanwatch::Format::name>::Word* ends, uint32_t* counts) { \
    nanwatch::HealthLanes<nanwatch::Format::name, nanwatch::kPairs> lanes(                                  \
        nanwatch::Codes<nanwatch::Format::name>::min_normal);                                               \
    nanwatch::read<nanwatch::Format::name>(lanes, data, count, ends, counts);                               \
  }

KERNELS(f64)
KERNELS(f32)
KERNELS(f16)
KERNELS(bf16)
KERNELS(f8_e4m3fn)
KERNELS(f8_e5m2)
KERNELS(f8_e4m3fnuz)
KERNELS(f8_e5m2fnuz)
KERNELS(f8_e8m0fnu)
KERNELS(i8)
KERNELS(i16)
KERNELS(i32)
KERNELS(i64)
