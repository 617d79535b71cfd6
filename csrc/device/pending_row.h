// A row that a device was asked for, and that is not here yet: from the walk over a call's tensors to the row's arrival
// in memory of the host.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/device_backend.h"
#include "numerics/formats.h"
#include "numerics/range.h"
#include "cuda/range_cuda.h"

namespace nanwatch {

// One tensor's row. Frames and caches that need it share it: a tensor whose row is on the way is not read again.
struct LateRow {
  enum class State : uint8_t {
    unsent,   // only collected, for the frame that is being made
    pending,  // enqueued
    arrived,
    captured,  // into a graph: each of its replays has a row
    lost,      // it will never come
  };

  State state = State::unsent;
  bool examined = false;
  int device = -1, error = 0;
  void* stream = nullptr;
  const void* collector = nullptr;  // of an unsent row: the frame
  const void* graph = nullptr;      // the GraphRows it was captured for
  const NanwatchRow* slot = nullptr;
  uint64_t stamp = 0;
  RangeRow range{};
  double values[kNanwatchRowValues] = {};
  std::shared_ptr<LateRow> verifies;  // a row that should be the same; see Options

  // Whether it has come; takes it out of its slot then, which may be used anew.
  bool arrive() {
    if (state != State::pending) return state == State::arrived || state == State::lost;
    if (__atomic_load_n(&slot->stamp, __ATOMIC_ACQUIRE) != stamp) return false;
    std::copy(slot->values, slot->values + kNanwatchRowValues, values);
    examined = slot->examined != 0;
    range = {values[0], values[1], values[2] != 0};
    state = State::arrived;
    return true;
  }

  void lose(int its_error) {
    if (arrive() && state == State::arrived) return;
    state = State::lost;
    error = its_error;
  }

  // Whether a cache may give it out for the tensor in this frame. What is not finite is looked at each time.
  // In a graph that is a row of the graph, which is made anew in each replay.
  bool serves(const void* frame, const void* in_graph) const {
    if (graph != in_graph) return false;
    switch (state) {
      case State::unsent: return collector == frame;
      case State::pending:
      case State::captured: return true;
      case State::arrived: return range.isfinite;
      case State::lost: break;
    }
    return false;
  }
};

using LatePtr = std::shared_ptr<LateRow>;

struct GraphRows;

// The late rows of one frame, and until they are sent all that is needed to read their tensors.
struct LateFrame {
  // A device and the stream that was current there when the frame's first tensor of it was met.
  struct Lane {
    int device;
    void* stream;
    int error;
    uint64_t capture;  // that the stream was in then
  };
  struct Read {
    LatePtr row;
    c10::Storage storage;  // the walk may run Python code that drops the tensor
    const void* data;
    Format format;
    int64_t dims;
    size_t geometry;  // where its sizes begin, and behind them its strides
  };

  std::vector<LatePtr> rows;
  std::vector<Read> reads;
  std::vector<int64_t> geometry;
  std::vector<Lane> lanes;
  // Where the graph of the batch is, or will be once a stream turns out to be captured; null: there can be none.
  std::shared_ptr<GraphRows>* graph_of_batch = nullptr;

  const GraphRows* graph() const { return graph_of_batch == nullptr ? nullptr : graph_of_batch->get(); }
  bool empty() const { return rows.empty(); }
  const Lane& lane_of(int device, const NanwatchBackend& backend);
  // A row for the tensor, to be sent with the rest.
  LatePtr collect(const at::Tensor& x, Format format, int device);

  void clear() {
    if (rows.empty() && lanes.empty()) return;
    for (const Read& read : reads)
      if (read.row->state == LateRow::State::unsent) read.row->lose(0);
    rows.clear();
    sent();
  }

  void sent() {
    reads.clear();
    geometry.clear();
    lanes.clear();
  }

  void swap(LateFrame& other) noexcept {
    rows.swap(other.rows);
    reads.swap(other.reads);
    geometry.swap(other.geometry);
    lanes.swap(other.lanes);
  }
};

}  // namespace nanwatch
