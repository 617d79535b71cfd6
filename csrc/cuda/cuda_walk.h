// Which bytes a block of CUDA threads reads: tensors as a kernel's parameters hold them, cut into chunks of equal
// bytes, and the way from an element's number to its place. Host and device, no CUDA header.
#pragma once

#include "numerics/coalesce_dims.h"
#include "cuda/cuda_lanes.h"

namespace nanwatch {

// n / divisor for n below 2^31 by one multiplication (Granlund and Montgomery 1994). A GPU has no division instruction:
// this takes three instructions, where a division calls a routine.
struct Divider {
  uint32_t magic, shift;

  static Divider of(uint32_t divisor) {
    uint32_t shift = 0;
    while ((uint64_t(1) << shift) < divisor) ++shift;
    return {uint32_t((((uint64_t(1) << shift) - divisor) << 32) / divisor + 1), shift};
  }

  NANWATCH_HD uint32_t divide(uint32_t n) const {
#ifdef __CUDA_ARCH__
    const uint32_t high = __umulhi(n, magic);
#else
    const uint32_t high = uint32_t(uint64_t(n) * magic >> 32);
#endif
    return (high + n) >> shift;
  }
};

// How a strided tensor is read.
enum class Reading : uint8_t {
  rows,      // runs of neighbours: heads, vectors and tails of each
  vectors,   // runs that are short, but whole vectors on 16-byte boundaries
  elements,  // one by one
};

// The dimensions of a strided tensor, fastest in memory first. Elements are numbered in this order, its "walk".
template <int max_dims>
struct Walk {
  int64_t size[max_dims], stride[max_dims], order[max_dims];  // stride in bytes; order: see Dim
  int64_t repeats;  // elements of the tensor that each element of the walk stands for
  int32_t dims;
  Reading reading;
  // For the fast way: a row in units of one vector or one element. Rows and units are fewer than 2^31.
  uint32_t row_units;
  Divider divider[max_dims];  // the first by `row_units`, the others by `size`

  // The plain way, for any tensor: bytes from the first element to this one, and its position in C order.
  NANWATCH_HD int64_t offset(int64_t element) const { return sum(element, stride); }
  NANWATCH_HD int64_t position(int64_t element) const { return sum(element, order); }

  // The fast way: bytes to the first element of a row, added for several at once.
  template <int count>
  NANWATCH_HD void add_rows(uint32_t (&row)[count], int64_t (&offset)[count]) const {
    NANWATCH_NO_UNROLL
    for (int d = 1; d < dims; ++d) {
      const uint32_t wide = uint32_t(size[d]);
      NANWATCH_UNROLL
      for (int k = 0; k < count; ++k) {
        const uint32_t next = divider[d].divide(row[k]);
        offset[k] += int64_t(row[k] - next * wide) * stride[d];
        row[k] = next;
      }
    }
  }

  // The same to a unit; `unit_stride` is from a unit to the next in a row.
  template <int count>
  NANWATCH_HD void add_units(uint32_t (&unit)[count], int64_t unit_stride, int64_t (&offset)[count]) const {
    NANWATCH_UNROLL
    for (int k = 0; k < count; ++k) {
      const uint32_t row = divider[0].divide(unit[k]);
      offset[k] += int64_t(unit[k] - row * row_units) * unit_stride;
      unit[k] = row;
    }
    add_rows(unit, offset);
  }

 private:
  NANWATCH_HD int64_t sum(int64_t element, const int64_t* weight) const {
    int64_t total = 0;
    NANWATCH_NO_UNROLL
    for (int d = 0; d + 1 < dims; ++d) {
      const int64_t next = element / size[d];
      total += (element - next * size[d]) * weight[d];
      element = next;
    }
    return total + element * weight[dims - 1];
  }
};

// A block's part of one tensor: elements [begin, end) of its walk, or of the run that it is in memory.
struct Share {
  int tensor;
  uint32_t chunks;  // blocks that share the tensor
  int64_t begin, end;
};

constexpr uint8_t kFlat = 255;

// Tensors that one launch reads, passed by value. Block b reads chunk b; a tensor has at least one chunk, also when it
// is empty: somebody has to write its row.
template <int max_tensors, int max_walks, int max_dims>
struct Batch {
  static constexpr int capacity = max_tensors, walk_capacity = max_walks, dim_capacity = max_dims;
  static constexpr bool observes = false;
  static_assert(max_walks < kFlat, "a walk's number is a byte");
  const char* data[max_tensors];
  int64_t numel[max_tensors];  // of the walk
  uint32_t end[max_tensors];   // chunks of this tensor and of those before it
  uint32_t row[max_tensors];
  uint8_t format[max_tensors];
  uint8_t walk[max_tensors];  // kFlat, or which of `walks`
  Walk<max_dims> walks[max_walks];
  double* rows;
  void* cells;
  uint32_t chunk_bytes;
  int32_t count;

  // The number of elements that one position of the walk stands for.
  NANWATCH_HD int64_t repeats_of(int tensor) const { return walk[tensor] == kFlat ? 1 : walks[walk[tensor]].repeats; }

  // The tensor that a chunk belongs to: the first whose end is beyond it.
  NANWATCH_HD int tensor_of(uint32_t chunk) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (chunk < end[middle]) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  // Elements before the first 16-byte boundary of a flat tensor belong to the first chunk, so that every other chunk
  // begins on one.
  NANWATCH_HD int64_t head(int tensor, int width) const {
    if (walk[tensor] != kFlat) return 0;
    const int64_t head = int64_t((16 - reinterpret_cast<uintptr_t>(data[tensor]) % 16) % 16) / width;
    return head < numel[tensor] ? head : numel[tensor];
  }

  NANWATCH_HD uint32_t chunks_of(int tensor, int width) const {
    const int64_t per_chunk = chunk_bytes / uint32_t(width), body = numel[tensor] - head(tensor, width);
    return body <= per_chunk ? 1 : uint32_t((body + per_chunk - 1) / per_chunk);
  }

  NANWATCH_HD Share share(int tensor, uint32_t block, int width) const {
    const uint32_t first = tensor == 0 ? 0 : end[tensor - 1];
    const uint32_t chunk = block - first, chunks = end[tensor] - first;
    const int64_t per_chunk = chunk_bytes / uint32_t(width), shift = head(tensor, width);
    const int64_t begin = chunk == 0 ? 0 : shift + int64_t(chunk) * per_chunk;
    const int64_t stop = shift + int64_t(chunk + 1) * per_chunk;
    return {tensor, chunks, begin, chunk + 1 == chunks ? numel[tensor] : stop};
  }
};

}  // namespace nanwatch
