// How a strided piece of host memory is read: reduced to planes, and shared among torch's threads.
#pragma once

#include <algorithm>
#include <functional>
#include <mutex>
#include <tuple>
#include <vector>

#include "cpu/range_cpu.h"

namespace nanwatch {

// Calls work(begin, end) for parts of [0, count), each of at least `grain`, in PyTorch's threads. ops/ops_cpu.cpp
// defines it, so that no file of this folder includes PyTorch.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work);

// `order` is what one step along the dimension adds to an element's position in C order.
struct Dim {
  int64_t size, stride, order;
};

struct CoalescedDims {
  std::vector<Dim> dims;  // fastest in memory first, at least one
  int64_t numel = 1;      // elements to visit: the product of the sizes
  int64_t repeats = 1;    // how many elements of the tensor each of them stands for
};

// A dimension of stride 0 repeats what is there and is left out: its first index, 0, is where an element stands first
// in C order. Dimensions that continue each other are merged, so that a transposed dense tensor becomes one run; with
// `keep_positions` only where the merged dimension still has one `order`. Strides are not negative, sizes not 0.
inline CoalescedDims coalesce_dims(const View& view, bool keep_positions) {
  CoalescedDims result;
  std::vector<Dim>& dims = result.dims;
  dims.reserve(size_t(view.dims) + 1);
  int64_t order = 1;
  for (int64_t d = view.dims - 1; d >= 0; order *= view.sizes[d--]) {
    const int64_t size = view.sizes[d], stride = view.strides[d];
    if (size != 1 && stride != 0) dims.push_back({size, stride, order});
    (stride == 0 ? result.repeats : result.numel) *= size;
  }
  std::sort(dims.begin(), dims.end(),
            [](const Dim& a, const Dim& b) { return std::tie(a.stride, a.order) < std::tie(b.stride, b.order); });
  size_t count = 0;
  for (const Dim& dim : dims) {
    Dim* const last = count > 0 ? &dims[count - 1] : nullptr;
    if (last != nullptr && last->stride * last->size == dim.stride &&
        (!keep_positions || last->order * last->size == dim.order)) {
      last->size *= dim.size;
    } else {
      dims[count++] = dim;
    }
  }
  dims.resize(count);
  if (dims.empty()) dims.push_back({1, 1, 1});
  return result;
}

// A view as planes: the two fastest dimensions that coalesce_dims() leaves, and the rest. A transposed dense tensor
// becomes one run.
struct HostWalk {
  static constexpr int64_t kSmall = 1 << 15;  // elements of any format that one thread reads, see `grain`
  const char* data;
  int64_t width;
  int64_t repeats = 1;                 // elements of the tensor that each element of the walk stands for
  int64_t numel;                       // of the walk
  Dim inner{1, 1, 1}, outer{1, 0, 1};  // the plane
  std::vector<Dim> rest;               // fastest first

  explicit HostWalk(const View& view)
      : data(static_cast<const char*>(view.data)), width(int64_t(word_size(view.format))), numel(view.numel) {
    if (numel == 0 || is_contiguous(view)) {  // the common case allocates nothing
      inner.size = numel;
      return;
    }
    const CoalescedDims coalesced = coalesce_dims(view, false);
    const std::vector<Dim>& dims = coalesced.dims;
    repeats = coalesced.repeats;
    numel = coalesced.numel;
    inner = dims[0];
    if (dims.size() > 1) outer = dims[1];
    if (dims.size() > 2) rest.assign(dims.begin() + 2, dims.end());
  }

  static bool is_contiguous(const View& view) {
    int64_t expected = 1;
    for (int64_t d = view.dims - 1; d >= 0; --d) {
      if (view.sizes[d] != 1 && view.strides[d] != expected) return false;
      expected *= view.sizes[d];
    }
    return true;
  }

  bool is_run() const { return inner.stride == 1 && inner.size == numel; }

  const char* row(int64_t index) const {
    int64_t offset = index % outer.size * outer.stride;
    index /= outer.size;
    for (const Dim& dim : rest) {
      offset += index % dim.size * dim.stride;
      index /= dim.size;
    }
    return data + offset * width;
  }

  // Calls kernel(plane) for planes that cover elements [begin, end), counted in walk order.
  template <typename Kernel>
  void planes(int64_t begin, int64_t end, const Kernel& kernel) const {
    while (begin < end) {
      const int64_t index = begin / inner.size, column = begin % inner.size;
      if (column != 0 || end - begin < inner.size) {
        const int64_t n = std::min(inner.size - column, end - begin);
        kernel(Plane{row(index) + column * inner.stride * width, n, inner.stride, 1, 0});
        begin += n;
      } else {
        const int64_t n = std::min((end - begin) / inner.size, outer.size - index % outer.size);
        kernel(Plane{row(index), inner.size, inner.stride, n, outer.stride});
        begin += n * inner.size;
      }
    }
  }

  // Elements below which a second thread costs more than it saves: 384 KiB of memory traffic, counting the whole cache
  // line for an element, or a row, that has one to itself.
  int64_t grain() const {
    constexpr int64_t line = 64;
    const int64_t element = std::min(line, width * inner.stride);
    const int64_t row = outer.size > 1 ? std::min(line, width * outer.stride) / inner.size : 0;
    return (192 << 10) / std::max(element, row);
  }
};

// Runs kernel(plane, &bits) over all planes of a walk, in this thread or in torch's thread pool.
template <typename Bits, typename Kernel>
Bits reduce(const HostWalk& walk, const Kernel& kernel) {
  const auto look = [&](int64_t begin, int64_t end, Bits* bits) {
    walk.planes(begin, end, [&](const Plane& plane) { kernel(plane, bits); });
  };
  const int64_t grain = walk.grain();
  if (walk.numel < 2 * grain) {
    Bits bits;
    look(0, walk.numel, &bits);
    return bits;
  }
  // Each cache line of this stack that another thread reads takes it some 100 ns. So the lock shares a line with what
  // it guards, and a thread gets the facts of a run by value: 2 to 10 % less for 400 KiB to 1 MiB.
  struct alignas(64) {
    std::mutex mutex;
    Bits bits;
  } total;
  const auto in_threads = [&](const auto& look_at) {
    parallel_for(walk.numel, grain, [look_at, &total](int64_t begin, int64_t end) {
      Bits part;
      look_at(begin, end, &part);
      const std::lock_guard<std::mutex> lock(total.mutex);
      total.bits.merge(part);
    });
  };
  if (walk.is_run()) {
    in_threads([data = walk.data, width = walk.width, kernel](int64_t begin, int64_t end, Bits* bits) {
      kernel(Plane{data + begin * width, end - begin, 1, 1, 0}, bits);
    });
  } else {
    in_threads(look);
  }
  return total.bits;
}

}  // namespace nanwatch
