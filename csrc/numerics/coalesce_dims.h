// Strides reduced to what a reduction has to walk. Host only, no torch.
#pragma once

#include <cstdint>

namespace nanwatch {

// `order` is what one step along the dimension adds to an element's position in C order.
struct Dim {
  int64_t size, stride, order;
};

struct CoalescedDims {
  int64_t dims;     // entries written, at least one
  int64_t numel;    // elements to visit: the product of the entries' sizes
  int64_t repeats;  // how many elements of the tensor each of them stands for
};

// Writes the dimensions that remain, fastest in memory first, into `out` (room for max(dims, 1)). A dimension of stride
// 0 repeats what is there and is left out: its first index, 0, is where an element stands first in C order. Dimensions
// that continue each other are merged, so that a transposed dense tensor becomes one run; with `keep_positions` only
// where the merged dimension still has one `order`. Strides are not negative.
inline CoalescedDims coalesce_dims(int64_t dims, const int64_t* sizes, const int64_t* strides, bool keep_positions,
                                   Dim* out) {
  CoalescedDims result{0, 1, 1};
  int64_t order = 1, kept = 0;
  for (int64_t d = dims - 1; d >= 0; --d) {
    if (sizes[d] == 0) {
      out[0] = {0, 1, 1};
      return {1, 0, 1};
    }
    if (sizes[d] != 1 && strides[d] == 0) {
      result.repeats *= sizes[d];
    } else if (sizes[d] != 1) {
      int64_t at = kept++;
      for (; at > 0 && out[at - 1].stride > strides[d]; --at) out[at] = out[at - 1];
      out[at] = {sizes[d], strides[d], order};
      result.numel *= sizes[d];
    }
    order *= sizes[d];
  }
  for (int64_t k = 0; k < kept; ++k) {
    const Dim dim = out[k];
    Dim* const last = result.dims > 0 ? out + result.dims - 1 : nullptr;
    if (last != nullptr && last->stride * last->size == dim.stride &&
        (!keep_positions || last->order * last->size == dim.order)) {
      last->size *= dim.size;
    } else {
      out[result.dims++] = dim;
    }
  }
  if (result.dims == 0) out[result.dims++] = {1, 1, 1};
  return result;
}

}  // namespace nanwatch
