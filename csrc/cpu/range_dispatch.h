// Which kernels this machine can run. Not in range_kernels.h: that is compiled for each instruction set, and of an
// inline function the linker keeps any one.
#pragma once

#include <vector>

#include "cpu/range_kernels.h"

namespace nanwatch {

// The plainest first.
inline std::vector<const KernelTable*> available_kernels() {
  std::vector<const KernelTable*> tables{&baseline_kernels()};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(&avx2_kernels());
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    tables.push_back(&avx512_kernels());
#endif
  return tables;
}

}  // namespace nanwatch
