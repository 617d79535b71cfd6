// The range and health of a strided piece of host memory: chooses the kernels for this CPU, reduces the strides to
// planes, and shares long walks among torch's threads. No torch here: pointers in, bits out.
#pragma once

#include <string>
#include <vector>

#include "numerics/range.h"

namespace nanwatch {

// ---- the inner loops, one table per instruction set ----

// Accumulators of every format: its magnitudes widened to 64 bits. Where the first non-finite element stands is looked
// for afterwards, only when there is one.
using RangeBits = Range<Format::u64>;
using HealthBits = Health<Format::u64>;

// `rows` rows of `columns` elements, at least one of each; strides in elements. Merged into the accumulator.
struct Plane {
  const char* data;
  int64_t columns, column_stride, rows, row_stride;
};

struct KernelTable {
  const char* name;
  void (*range[kNumFormats])(const Plane&, RangeBits*);
  void (*health[kNumFormats])(const Plane&, HealthBits*);
};

const KernelTable& baseline_kernels();
#if defined(__x86_64__)
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();
#endif

// ---- the reductions ----

// A tensor as the walk sees it. Sizes and strides in elements, strides not negative.
struct View {
  const void* data;
  Format format;
  int64_t numel;
  int64_t dims;
  const int64_t* sizes;
  const int64_t* strides;
};

RangeRow range_cpu(const View& view);

// Writes kHealthColumns doubles.
void health_cpu(const View& view, double* row);

// The instruction sets this machine can run, widest last, and the one in force. The first use reads NANWATCH_CPU;
// `cpu_capability_warning` is then not empty if that named something this machine does not have.
std::vector<std::string> cpu_capabilities();
std::string cpu_capability();
std::string cpu_capability_warning();
bool set_cpu_capability(const std::string& name);  // false: not available here, nothing changed

}  // namespace nanwatch
