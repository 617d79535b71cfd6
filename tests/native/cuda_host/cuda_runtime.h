// A stand-in for CUDA's header that runs range_cuda.cu on the host, so that its index arithmetic and the order of its
// meetings can be tested where there is no GPU: every thread of a block is a fibre on the one thread of the process.
// __syncthreads waits for the block, a warp's collectives for the warp; who waits for somebody that has returned ends
// the process. Blocks run one after the other, in any order that a test asks for, which lets __shared__ be a static.
//
// What it cannot show: races, memory ordering, what nvcc makes of the code. Those need a GPU.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#define CUDART_VERSION 13000
#define __global__
#define __device__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
  unsigned x;
  explicit dim3(unsigned n) : x(n) {}
};

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
enum { cudaDevAttrMultiProcessorCount = 16 };
enum { cudaHostAllocPortable = 1, cudaHostAllocMapped = 2 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeRelaxed = 2 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0 };
using cudaStream_t = void*;

namespace cuda_host {

constexpr unsigned kMaxThreads = 1024, kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;

struct Index {
  unsigned x;
};

enum class Wait { nothing, block, warp, returned };

struct State {
  Index thread{0}, block{0};
  ucontext_t first_entry;
  // Only a fibre's start goes through ucontext, which makes a system call at every switch.
  jmp_buf scheduler, fibre[kMaxThreads];
  bool started[kMaxThreads];
  Wait wait[kMaxThreads];
  unsigned long long exchanged[kMaxThreads];
  std::unique_ptr<char[]> stacks{new char[kMaxThreads * kStackBytes]};
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
  int fail_next = 0;     // the next launch fails with this
  int last_error = 0;    // what cudaGetLastError gives
  unsigned shuffle = 0;  // not 0: blocks run in an order drawn from this seed
  int64_t launches = 0, blocks = 0;
};

inline State& state() {
  static State instance;
  return instance;
}

inline void pause(Wait wait) {
  State& s = state();
  const unsigned me = s.thread.x;
  s.wait[me] = wait;
  if (_setjmp(s.fibre[me]) == 0) _longjmp(s.scheduler, 1);
}

inline void run_fibre() {
  State& s = state();
  s.body(s.argument);
  pause(Wait::returned);
}

// Lets threads [first, last) go on if all of them wait for the same thing.
inline bool release(unsigned first, unsigned last, Wait reason) {
  State& s = state();
  for (unsigned t = first; t < last; ++t)
    if (s.wait[t] != reason) return false;
  std::fill(s.wait + first, s.wait + last, Wait::nothing);
  return true;
}

// Runs a thread until it pauses.
inline void resume(unsigned t) {
  State& s = state();
  s.thread.x = t;
  if (_setjmp(s.scheduler) != 0) return;
  if (s.started[t]) _longjmp(s.fibre[t], 1);
  s.started[t] = true;
  getcontext(&s.first_entry);
  s.first_entry.uc_stack.ss_sp = s.stacks.get() + t * kStackBytes;
  s.first_entry.uc_stack.ss_size = kStackBytes;
  s.first_entry.uc_link = nullptr;
  makecontext(&s.first_entry, run_fibre, 0);
  setcontext(&s.first_entry);
}

inline void run_block(unsigned threads) {
  State& s = state();
  std::fill(s.started, s.started + threads, false);
  std::fill(s.wait, s.wait + threads, Wait::nothing);
  while (true) {
    bool progress = false;
    for (unsigned t = 0; t < threads; ++t) {
      if (s.wait[t] != Wait::nothing) continue;
      resume(t);
      progress = true;
    }
    for (unsigned first = 0; first < threads; first += kWarp)
      progress |= release(first, std::min(first + kWarp, threads), Wait::warp);
    progress |= release(0, threads, Wait::block);
    if (progress) continue;
    if (std::all_of(s.wait, s.wait + threads, [](Wait wait) { return wait == Wait::returned; })) return;
    std::fprintf(stderr, "cuda_host: threads wait for others that have returned or wait elsewhere\n");
    std::abort();
  }
}

// What the lane whose number is this one's xor `mask` brings; mask 0: `combine` over the whole warp.
template <class Combine>
unsigned long long exchange(unsigned long long value, unsigned mask, const Combine& combine) {
  State& s = state();
  const unsigned me = s.thread.x, first = me / kWarp * kWarp;
  s.exchanged[me] = value;
  pause(Wait::warp);
  unsigned long long result = s.exchanged[first + (me % kWarp ^ mask)];
  if (mask == 0) result = std::accumulate(s.exchanged + first, s.exchanged + first + kWarp, 0ull, combine);
  pause(Wait::warp);  // nobody writes anew before all have read
  return result;
}

template <class... Parameters, size_t... I>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<Parameters>*>(arguments[I])...);
}

}  // namespace cuda_host

#define threadIdx (cuda_host::state().thread)
#define blockIdx (cuda_host::state().block)

inline void __syncthreads() {
  cuda_host::pause(cuda_host::Wait::block);
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  unsigned long long bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = cuda_host::exchange(bits, unsigned(mask), [](auto a, auto) { return a; });
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return unsigned(cuda_host::exchange(value, 0, [](auto a, auto b) { return std::max(a, b); }));
}

inline void __threadfence() {}
inline void __threadfence_system() {}

template <class T>
T __ldcg(const T* address) {
  return *address;
}

template <class T>
T atomicMax(T* address, T value) {
  const T old = *address;
  if (value > old) *address = value;
  return old;
}

template <class T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address += value;
  return old;
}

template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments, size_t,
                             cudaStream_t) {
  cuda_host::State& s = cuda_host::state();
  ++s.launches;
  if (s.fail_next != 0) return cudaError_t(s.last_error = std::exchange(s.fail_next, 0));
  if (grid.x == 0 || grid.x > 0x7fffffffu || block.x == 0 || block.x > cuda_host::kMaxThreads)
    return cudaError_t(s.last_error = cudaErrorInvalidConfiguration);
  s.blocks += grid.x;
  auto body = [&] { cuda_host::call(kernel, arguments, std::index_sequence_for<Parameters...>()); };
  s.argument = &body;
  s.body = [](void* argument) { (*static_cast<decltype(body)*>(argument))(); };
  std::vector<unsigned> order(grid.x);
  std::iota(order.begin(), order.end(), 0u);
  if (s.shuffle != 0) std::shuffle(order.begin(), order.end(), std::mt19937(s.shuffle));
  for (const unsigned b : order) {
    s.block.x = b;
    cuda_host::run_block(block.x);
  }
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  std::memset(p, value, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
// Four of them: blocks that read several steps need no large tensor then.
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
  *value = 4;
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
  return cudaError_t(std::exchange(cuda_host::state().last_error, 0));
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an error";
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(current, *mode);
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  std::memset(*memory, 0xA5, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  return cudaMalloc(memory, bytes);
}
inline cudaError_t cudaHostGetDevicePointer(void** address, void* pinned, unsigned) {
  *address = pinned;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}
