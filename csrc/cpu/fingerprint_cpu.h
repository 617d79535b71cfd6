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

// Which blocks of a tensor a view has, where the tensor is read part by part. Who reads several parts has a thread for
// each, so that none of them asks for more.
struct BlockPart {
  int64_t first = 0;  // the number of the view's first block
  bool in_this_thread = false;
};

// The sum of the blocks, for sealed_fingerprint(). Sums of parts add up.
uint64_t fingerprint_cpu(const ElementView& view, BlockPart part = {});

// The row of range_cpu(view), and in its `blocks` the fingerprint, from one read.
RangeRow range_and_fingerprint_cpu(const View& view);

// Writes the row of health_cpu(view) and returns the sum of the blocks, from one read.
uint64_t health_and_fingerprint_cpu(const View& view, BlockPart part, double* row);

// One of range_cpu and range_and_fingerprint_cpu.
using RangeReader = RangeRow (*)(const View& view);

}  // namespace nanwatch
