// CUDA kernels of the fingerprint. Alone with nvcc, no torch. Never run on a GPU, and nothing here is tuned.
//
// A warp takes one block of the hash after the other. A thread reads two vectors of it, the words of which belong to
// the same two lanes, and their keys stay in registers: four words take about 24 instructions, and the sum over the
// warp 60 more.
#include "cuda/fingerprint_cuda.h"

#include <cuda_runtime.h>

#include "cuda/cuda_tensor.h"
#include "numerics/fingerprint.h"

namespace nanwatch {
namespace {

using Sum = unsigned long long;  // the type that CUDA's 64-bit atomics take

// Eight blocks for each of 132 SMs, of which four fit at a time.
constexpr int64_t kGrid = 132 * 8;
constexpr int kPairs = int(sizeof(Vector)) / 8 * kWarpThreads;  // words that a warp reads at once
static_assert(kFingerprintWords == 2 * kPairs && kFingerprintLanes == 8, "a thread's vectors belong to two lanes");

struct Pair {
  uint64_t first, second;
};

// The words at this place; zeros behind the end.
__device__ __forceinline__ Pair load_pair(const char* data, int64_t bytes, int64_t at) {
  Pair pair = {0, 0};
  if (at + int64_t(sizeof pair) <= bytes) {
    const Vector vector = load_vector(data + at);
    memcpy(&pair, &vector, sizeof pair);
  } else {
    for (int64_t i = at; i < bytes; ++i) {
      uint64_t& word = i - at < 8 ? pair.first : pair.second;
      word |= uint64_t(static_cast<unsigned char>(data[i])) << (8 * (i % 8));
    }
  }
  return pair;
}

__device__ __forceinline__ uint64_t multiply_halves(uint64_t keyed) {
  return uint64_t(uint32_t(keyed)) * uint32_t(keyed >> 32);
}

// The sum over the threads whose numbers differ in these bits alone.
__device__ __forceinline__ uint64_t sum_over(uint64_t value, int low, int high) {
#pragma unroll
  for (int other = low; other <= high; other *= 2) value += __shfl_xor_sync(kWholeWarp, Sum(value), other);
  return value;
}

__global__ void __launch_bounds__(kThreads, 2) fingerprint_kernel(const char* data, int64_t bytes, Sum* sum) {
  const int thread = int(threadIdx.x) % kWarpThreads, lane = 2 * (thread % 4);
  uint64_t key[4], lane_key[2];
#pragma unroll
  for (int k = 0; k < 4; ++k) key[k] = split_mix(uint64_t(2 * thread + k % 2 + k / 2 * kPairs));
#pragma unroll
  for (int k = 0; k < 2; ++k) lane_key[k] = split_mix(uint64_t(kFingerprintWords + lane + k));
  const int64_t blocks = (bytes + kFingerprintBlock - 1) / kFingerprintBlock;
  uint64_t total = 0;
#pragma unroll 1
  for (int64_t block = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarpThreads; block < blocks;
       block += int64_t(gridDim.x) * kWarps) {
    const int64_t at = block * kFingerprintBlock + thread * int64_t(sizeof(Pair));
    const Pair a = load_pair(data, bytes, at), b = load_pair(data, bytes, at + kFingerprintBlock / 2);
    // A lane takes its neighbour's words as they are.
    const uint64_t first = multiply_halves(a.first ^ key[0]) + multiply_halves(b.first ^ key[2]) + a.second + b.second;
    const uint64_t second = multiply_halves(a.second ^ key[1]) + multiply_halves(b.second ^ key[3]) + a.first + b.first;
    const uint64_t mine = mix64(sum_over(first, 4, 16) ^ lane_key[0]) + mix64(sum_over(second, 4, 16) ^ lane_key[1]);
    total += block_fingerprint(sum_over(mine, 1, 2), uint64_t(block));
  }
  if (thread == 0) atomicAdd(sum, Sum(total));
}

__global__ void seal_kernel(Sum* sum, uint64_t seal) {
  *sum = mix64(*sum ^ seal);
}

}  // namespace
}  // namespace nanwatch

extern "C" int nanwatch_cuda_fingerprint(const void* data, int64_t bytes, uint64_t seal, int64_t* number, int device,
                                         void* stream) {
  using namespace nanwatch;
  if (const int failed = checked(cudaSetDevice(device))) return failed;
  auto* const sum = reinterpret_cast<Sum*>(number);
  const int64_t per_block = kFingerprintBlock * kWarps, blocks = (bytes + per_block - 1) / per_block;
  if (blocks > 0) {
    const int failed = enqueue(fingerprint_kernel, blocks < kGrid ? blocks : kGrid, kThreads, stream,
                               static_cast<const char*>(data), bytes, sum);
    if (failed != 0) return failed;
  }
  return enqueue(seal_kernel, 1, 1, stream, sum, seal);
}
