// A frame as the hot path leaves it: records of plain numbers. Names become strings and records become Python objects
// only on request.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>
#include <array>
#include <limits>

#include "recorder/labels.h"
#include "device/pending_row.h"
#include "numerics/columns.h"
#include "numerics/range.h"

namespace nanwatch {

// Number of frames of each of the latest batches, including those that the ring has dropped. More than one batch is
// under way where several threads call the model.
class BatchCounts {
 public:
  static constexpr int64_t kForgotten = -1;

  void add(int64_t batch) {
    if (batches_[current_].number == batch || turn_to(batch)) ++batches_[current_].frames;
  }

  // kForgotten where 16 later ones have come since.
  int64_t of(int64_t batch) const {
    for (const Batch& one : batches_)
      if (one.number == batch) return one.frames;
    return batch > forgotten_ ? 0 : kForgotten;
  }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::min();
  struct Batch {
    int64_t number = kNone, frames = 0;
  };

  bool turn_to(int64_t batch) {
    const auto is_it = [batch](const Batch& one) { return one.number == batch; };
    auto found = std::find_if(batches_.begin(), batches_.end(), is_it);
    if (found == batches_.end()) {
      if (batch <= forgotten_) return false;
      found = std::min_element(batches_.begin(), batches_.end(),
                               [](const Batch& a, const Batch& b) { return a.number < b.number; });
      forgotten_ = std::max(forgotten_, found->number);
      *found = {batch, 0};
    }
    current_ = size_t(found - batches_.begin());
    return true;
  }

  std::array<Batch, 16> batches_;
  size_t current_ = 0;
  int64_t forgotten_ = kNone;
};

constexpr int32_t kNotPending = -1;

struct RecordData {
  Labels::Id label;
  Role role;
  NoteKind note;
  int8_t dtype;  // c10::ScalarType, -1 where there is no tensor
  uint8_t dims;
  uint32_t shape_at;  // into FrameData::shapes
  int32_t pending;    // into FrameData::pending.rows while the range is still to come, else kNotPending
  RangeRow range;
  PyObject* python;  // owned; where the Python side made the record, it replaces all else
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

// One call of one module: one line of the cache, and its records. Reused: clearing keeps the capacity, so a steady run
// allocates nothing.
struct FrameData {
  int64_t batch = 0;
  int32_t node = 0;
  bool recomputed = false;
  Phase phase = Phase::forward;
  bool has_nonfinite = false;
  bool has_objects = false;  // records that Python made
  std::vector<RecordData> records;
  std::vector<int64_t> shapes;

  FrameData() = default;
  FrameData(const FrameData&) = delete;
  FrameData& operator=(const FrameData&) = delete;
  FrameData(FrameData&& other) noexcept { swap(other); }
  ~FrameData() { clear(); }

  void reserve() {
    records.reserve(16);
    shapes.reserve(48);
  }

  void add(const RecordData& record) {
    has_objects |= record.python != nullptr;
    records.push_back(record);
  }

  void clear() {
    // The records of the frame that this one takes the place of are in no cache any more.
    if (has_objects) [[unlikely]]
      for (const RecordData& record : records) Py_XDECREF(record.python);
    records.clear();
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
    records = other.records;
    shapes = other.shapes;
    for (const RecordData& record : records) Py_XINCREF(record.python);
  }

  void swap(FrameData& other) noexcept {
    std::swap(batch, other.batch);
    std::swap(node, other.node);
    std::swap(recomputed, other.recomputed);
    std::swap(phase, other.phase);
    std::swap(has_nonfinite, other.has_nonfinite);
    std::swap(has_objects, other.has_objects);
    records.swap(other.records);
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
