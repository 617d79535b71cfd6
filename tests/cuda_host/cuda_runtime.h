// A stand-in for CUDA's header that runs range_cuda.cu on the host, so that its index arithmetic can be tested where
// there is no GPU: every thread of a block is a fibre on the one thread of the process, and __syncthreads hands on to
// the next. Blocks run one after the other, which lets __shared__ be a static.
//
// What it cannot show: races, memory ordering, warp behaviour, what nvcc makes of the code. Those need a GPU.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#define CUDART_VERSION 13000
#define __global__
#define __device__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static

struct dim3 {
  unsigned x;
  explicit dim3(unsigned n) : x(n) {}
};

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
using cudaStream_t = void*;

namespace cuda_host {

constexpr unsigned kMaxThreads = 1024;
constexpr size_t kStackBytes = 64 << 10;

struct Index {
  unsigned x;
};

struct State {
  Index thread{0}, block{0}, block_dim{0}, grid_dim{0};
  ucontext_t scheduler, fibre[kMaxThreads];
  bool finished[kMaxThreads];
  std::unique_ptr<char[]> stacks{new char[kMaxThreads * kStackBytes]};
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
  int fail_next = 0;   // the launch after next fails with this
  int last_error = 0;  // what cudaGetLastError gives
  int64_t launches = 0;
};

inline State& state() {
  static State instance;
  return instance;
}

inline void run_fibre() {
  State& s = state();
  s.body(s.argument);
  s.finished[s.thread.x] = true;
  swapcontext(&s.fibre[s.thread.x], &s.scheduler);
}

inline void run_block(unsigned threads) {
  State& s = state();
  for (unsigned t = 0; t < threads; ++t) {
    getcontext(&s.fibre[t]);
    s.fibre[t].uc_stack.ss_sp = s.stacks.get() + t * kStackBytes;
    s.fibre[t].uc_stack.ss_size = kStackBytes;
    s.fibre[t].uc_link = nullptr;
    makecontext(&s.fibre[t], run_fibre, 0);
    s.finished[t] = false;
  }
  for (unsigned running = threads; running > 0;) {
    const unsigned before = running;
    for (unsigned t = 0; t < threads; ++t) {
      if (s.finished[t]) continue;
      s.thread.x = t;
      swapcontext(&s.scheduler, &s.fibre[t]);
      running -= s.finished[t];
    }
    if (running != 0 && running != before) {
      std::fprintf(stderr, "cuda_host: %u of %u threads left while the rest wait at __syncthreads\n", before - running,
                   before);
      std::abort();
    }
  }
}

template <class... Parameters, size_t... I>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<Parameters>*>(arguments[I])...);
}

}  // namespace cuda_host

#define threadIdx (cuda_host::state().thread)
#define blockIdx (cuda_host::state().block)
#define gridDim (cuda_host::state().grid_dim)
#define blockDim (cuda_host::state().block_dim)

inline void __syncthreads() {
  cuda_host::State& s = cuda_host::state();
  swapcontext(&s.fibre[s.thread.x], &s.scheduler);
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
  s.grid_dim.x = grid.x;
  s.block_dim.x = block.x;
  auto body = [&] { cuda_host::call(kernel, arguments, std::index_sequence_for<Parameters...>()); };
  s.argument = &body;
  s.body = [](void* argument) { (*static_cast<decltype(body)*>(argument))(); };
  for (unsigned b = 0; b < grid.x; ++b) {
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
inline cudaError_t cudaGetLastError() {
  return cudaError_t(std::exchange(cuda_host::state().last_error, 0));
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an error";
}
