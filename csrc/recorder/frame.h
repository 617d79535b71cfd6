// A frame as the hot path leaves it: rows of plain numbers. Names become strings and rows become Python objects only on
// request.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "recorder/batch_counts.h"
#include "recorder/labels.h"
#include "device/pending_row.h"
#include "numerics/columns.h"
#include "numerics/range.h"

namespace nanwatch {

constexpr int32_t kNotPending = -1;

struct RowData {
  Labels::Id label;
  Role role;
  NoteKind note;
  int8_t dtype;  // c10::ScalarType, -1 where there is no tensor
  uint8_t dims;
  uint32_t shape_at;  // into FrameData::shapes
  int32_t pending;    // into FrameData::pending.rows while the range is still to come, else kNotPending
  RangeRow range;
  PyObject* python;  // owned; where the Python side made the row, it replaces all else
};

// A tensor of a call that may get a gradient.
struct GradientCandidate {
  at::Tensor tensor;
  Labels::Id label;
  Role role;
};

// A tensor that belongs to a call, though the call does not return it; see CallRecorder::add_output.
struct AddedOutput {
  size_t depth;  // of the call, counted from 1 for the outermost
  Labels::Id label;
  pybind11::object tensor;
};

// One call of one module: one line of the cache, and its rows. Reused: clearing keeps the capacity, so a steady run
// allocates nothing.
struct FrameData {
  int64_t batch = 0;
  int32_t node = 0;
  bool recomputed = false;
  Phase phase = Phase::forward;
  bool has_nonfinite = false;
  bool has_objects = false;  // rows that Python made
  std::vector<RowData> rows;
  std::vector<int64_t> shapes;

  FrameData() = default;
  FrameData(const FrameData&) = delete;
  FrameData& operator=(const FrameData&) = delete;
  FrameData(FrameData&& other) noexcept { swap(other); }
  ~FrameData() { clear(); }

  void reserve() {
    rows.reserve(16);
    shapes.reserve(48);
  }

  void add(const RowData& row) {
    has_objects |= row.python != nullptr;
    rows.push_back(row);
  }

  void clear() {
    // The rows of the frame that this one takes the place of are in no cache any more.
    if (has_objects) [[unlikely]]
      for (const RowData& row : rows) Py_XDECREF(row.python);
    rows.clear();
    shapes.clear();
    has_nonfinite = has_objects = false;
    phase = Phase::forward;
  }

  void copy(const FrameData& other) {
    clear();
    batch = other.batch;
    node = other.node;
    recomputed = other.recomputed;
    phase = other.phase;
    has_nonfinite = other.has_nonfinite;
    has_objects = other.has_objects;
    rows = other.rows;
    shapes = other.shapes;
    for (const RowData& row : rows) Py_XINCREF(row.python);
  }

  void swap(FrameData& other) noexcept {
    std::swap(batch, other.batch);
    std::swap(node, other.node);
    std::swap(recomputed, other.recomputed);
    std::swap(phase, other.phase);
    std::swap(has_nonfinite, other.has_nonfinite);
    std::swap(has_objects, other.has_objects);
    rows.swap(other.rows);
    shapes.swap(other.shapes);
  }
};

// A frame that is being made, or waits for a device.
struct OpenFrame : FrameData {
  PendingRows pending;
  bool reads_all = false;                                // nothing is taken on trust
  std::vector<GradientCandidate>* candidates = nullptr;  // if gradients are asked for
  const std::vector<AddedOutput>* added = nullptr;

  OpenFrame() = default;
  OpenFrame(OpenFrame&& other) noexcept { swap(other); }
  ~OpenFrame() { clear(); }

  void clear() {
    start_over();
    candidates = nullptr;
    added = nullptr;
    reads_all = false;
  }

  // Drops what there is of it.
  void start_over() {
    FrameData::clear();
    if (candidates != nullptr) candidates->clear();
    pending.clear();
  }

  void swap(OpenFrame& other) noexcept {
    FrameData::swap(other);
    pending.swap(other.pending);
  }
};

// A frame, and the node that made the call.
struct CallFrame {
  OpenFrame frame;
  int32_t caller;
};

// The latest frames, oldest overwritten.
class FrameRing {
 public:
  // Room for a usual frame before the first forward; see CallObserver::prepare.
  explicit FrameRing(size_t capacity) : frames_(capacity) {
    for (size_t i = 0; i < std::min(capacity, size_t(64)); ++i) frames_[i].reserve();
  }

  // Takes the frame's content and leaves it the overwritten frame's memory.
  void push(FrameData& frame) {
    counts_.add(frame.batch);
    frames_[next_].swap(frame);
    if (++next_ == frames_.size()) next_ = 0;
    if (held_ < frames_.size()) ++held_;
    ++pushed_;
  }
  // Counts a frame that would be overwritten before anybody could see it.
  void skip(int64_t batch) { counts_.add(batch); }
  int64_t pushed() const { return pushed_; }  // ever
  const BatchCounts& counts() const { return counts_; }
  size_t size() const { return held_; }
  size_t capacity() const { return frames_.size(); }
  const FrameData& oldest(size_t position) const {
    return frames_[(next_ + frames_.size() - held_ + position) % frames_.size()];
  }
  FrameData& oldest(size_t position) { return const_cast<FrameData&>(std::as_const(*this).oldest(position)); }
  const FrameData& latest() const { return oldest(held_ - 1); }

 private:
  std::vector<FrameData> frames_;
  size_t next_ = 0, held_ = 0;
  int64_t pushed_ = 0;
  BatchCounts counts_;
};

}  // namespace nanwatch
