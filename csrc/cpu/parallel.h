// Work shared among PyTorch's threads. ops/ops_cpu.cpp defines the function over at::parallel_for, so that no file of
// this folder includes PyTorch.
#pragma once

#include <cstdint>

namespace nanwatch {

using ParallelWork = void (*)(const void* context, int64_t begin, int64_t end);

// Calls work(context, begin, end) for parts of [0, count), each of at least `grain`.
void parallel_for(int64_t count, int64_t grain, ParallelWork work, const void* context);

template <typename Work>
void parallel_for(int64_t count, int64_t grain, const Work& work) {
  const ParallelWork call = [](const void* context, int64_t begin, int64_t end) {
    (*static_cast<const Work*>(context))(begin, end);
  };
  parallel_for(count, grain, call, &work);
}

}  // namespace nanwatch
