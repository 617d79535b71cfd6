// The floors under a range on a GPU: read the same memory once and fold it with xor, and what CUB makes of as simple a
// reduction. C ABI, no torch; built by _range_cuda.py, not part of the library:
//   nvcc -O3 -std=c++17 -shared -Xcompiler=-fPIC -arch=sm_90 benchmarks/floor_cuda.cu -o floor_cuda.so
#include <cuda_runtime.h>

#include <cstdint>
#include <cub/device/device_reduce.cuh>

namespace {

constexpr int kThreads = 512, kInFlight = 4;

// One xor per word is the least that looks at all of them. Blocks that fill the device once, each striding through.
__global__ void __launch_bounds__(kThreads, 2) read_kernel(const uint4* data, int64_t vectors, uint32_t* sink) {
  uint32_t all = 0;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  int64_t v = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  for (; v + (kInFlight - 1) * step < vectors; v += kInFlight * step) {
    uint4 read[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) read[k] = __ldg(data + v + k * step);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) all ^= read[k].x ^ read[k].y ^ read[k].z ^ read[k].w;
  }
  for (; v < vectors; v += step) {
    const uint4 read = __ldg(data + v);
    all ^= read.x ^ read.y ^ read.z ^ read.w;
  }
  for (int other = 16; other > 0; other /= 2) all ^= __shfl_xor_sync(0xffffffffu, all, other);
  if (threadIdx.x % 32 == 0 && all != 0) atomicXor(sink, all);
}

}  // namespace

extern "C" {

// xor of the 32-bit words into *sink, which the caller makes zero. `bytes` is a multiple of 16, the pointer too.
int floor_read(const void* data, int64_t bytes, uint32_t* sink, int blocks, void* stream) {
  read_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const uint4*>(data), bytes / 16,
                                                                          sink);
  return int(cudaGetLastError());
}

// The largest of the 32-bit words, as signed integers, by cub::DeviceReduce. With null `temporary` only sets how many
// bytes that must have.
int floor_cub(const void* data, int64_t bytes, int32_t* largest, void* temporary, size_t* temporary_bytes,
              void* stream) {
  return int(cub::DeviceReduce::Max(temporary, *temporary_bytes, static_cast<const int32_t*>(data), largest, bytes / 4,
                                    static_cast<cudaStream_t>(stream)));
}

}  // extern "C"
