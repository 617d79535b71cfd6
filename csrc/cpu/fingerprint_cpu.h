// The fingerprint of a strided piece of host memory, its elements taken in C order.
#pragma once

#include "cpu/range_cpu.h"

namespace nanwatch {

// Elements of `width` bytes. Sizes and strides in elements, strides not negative.
struct ElementView {
  const void* data;
  int64_t width;
  int64_t numel;
  int64_t dims;
  const int64_t* sizes;
  const int64_t* strides;
};

// The sum of the blocks, for sealed_fingerprint().
uint64_t fingerprint_cpu(const ElementView& view);

// The row of range_cpu(view), and in its `blocks` the fingerprint, from one read.
RangeRow range_and_fingerprint_cpu(const View& view);

// One of range_cpu and range_and_fingerprint_cpu.
using RangeReader = RangeRow (*)(const View& view);

}  // namespace nanwatch
