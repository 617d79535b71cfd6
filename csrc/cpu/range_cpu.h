// The range and health of a strided piece of host memory: chooses the kernels for this CPU, reduces the strides to
// planes, and shares long walks among torch's threads.
#pragma once

#include <string>
#include <vector>

#include "cpu/range_kernels.h"

namespace nanwatch {

// A tensor as the walk sees it. Sizes and strides in elements, strides not negative.
struct View {
  const void* data;
  Format format;
  int64_t numel;
  int64_t dims;
  const int64_t* sizes;
  const int64_t* strides;
};

// Writes kRangeColumns doubles.
void range_cpu(const View& view, double* row);
RangeRow range_cpu(const View& view);

// Writes kHealthColumns doubles.
void health_cpu(const View& view, double* row);

// The instruction sets this machine can run, widest last, and the one in force. The first use reads NANWATCH_CPU;
// `cpu_capability_warning` is then not empty if that named something this machine does not have.
std::vector<std::string> cpu_capabilities();
std::string cpu_capability();
std::string cpu_capability_warning();
// The kernels in force.
const KernelTable& current_kernels();
bool set_cpu_capability(const std::string& name);  // false: not available here, nothing changed

}  // namespace nanwatch
