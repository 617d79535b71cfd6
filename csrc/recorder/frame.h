// A frame as the hot path leaves it: records of plain numbers. Names become strings and records become Python objects
// only on request.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "device/row_table.h"
#include "numerics/columns.h"
#include "numerics/range.h"
#include "recorder/labels.h"

namespace nanwatch {

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

struct FrameHead {
  int64_t batch = 0;
  int32_t node = 0;
  bool recomputed = false;
  Phase phase = Phase::forward;
  bool has_nonfinite = false;
  bool has_objects = false;  // records that Python made
};

// One call of one module: one line of the cache, and its records. Reused: clearing keeps the capacity, so a steady run
// allocates nothing.
struct FrameData : FrameHead {
  std::vector<RecordData> records;
  std::vector<int64_t> shapes;

  FrameData() = default;
  FrameData(const FrameData& other) : FrameHead(other), records(other.records), shapes(other.shapes) {
    for (const RecordData& record : records) Py_XINCREF(record.python);
  }
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
    if (has_objects) [[unlikely]]
      for (const RecordData& record : records) Py_XDECREF(record.python);
    records.clear();
    shapes.clear();
    has_nonfinite = has_objects = false;
    phase = Phase::forward;
  }

  void swap(FrameData& other) noexcept {
    std::swap<FrameHead>(*this, other);
    records.swap(other.records);
    shapes.swap(other.shapes);
  }
};

// A frame that is being made, or waits for a device.
struct OpenFrame : FrameData {
  PendingRows pending;
  int32_t caller = -1;                                   // the node that made the call; of a frame that waits
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

  // Of a frame whose reads were sent.
  void swap(OpenFrame& other) noexcept {
    FrameData::swap(other);
    pending.rows.swap(other.pending.rows);
    std::swap(caller, other.caller);
  }
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
    skip(frame.batch);
    frames_[next_].swap(frame);
    if (++next_ == frames_.size()) next_ = 0;
    if (held_ < frames_.size()) ++held_;
    ++pushed_;
  }
  // Counts a frame that would be overwritten before anybody could see it.
  void skip(int64_t batch) {
    if (batch != current_batch_) turn_to(batch);
    ++*current_;
  }
  int64_t pushed() const { return pushed_; }  // ever
  // Number of frames of a batch, including those that were overwritten. Nothing once 16 later batches have had some:
  // more than one batch is under way where several threads call the model.
  std::optional<int64_t> frames_of(int64_t batch) const {
    if (const auto count = counts_.find(batch); count != counts_.end()) return count->second;
    return batch > forgotten_ ? std::optional<int64_t>(0) : std::nullopt;
  }
  size_t size() const { return held_; }
  size_t capacity() const { return frames_.size(); }
  const FrameData& oldest(size_t position) const {
    return frames_[(next_ + frames_.size() - held_ + position) % frames_.size()];
  }
  FrameData& oldest(size_t position) { return const_cast<FrameData&>(std::as_const(*this).oldest(position)); }
  const FrameData& latest() const { return oldest(held_ - 1); }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::min();

  // Makes the count of a batch the current one, in place of the oldest.
  void turn_to(int64_t batch) {
    current_batch_ = batch;
    if (batch <= forgotten_ && !counts_.contains(batch)) {
      current_ = &uncounted_;
      return;
    }
    if (counts_.size() == 16 && !counts_.contains(batch)) {
      forgotten_ = std::max(forgotten_, counts_.begin()->first);
      counts_.erase(counts_.begin());
    }
    current_ = &counts_[batch];
  }

  std::vector<FrameData> frames_;
  size_t next_ = 0, held_ = 0;
  int64_t pushed_ = 0, forgotten_ = kNone, current_batch_ = kNone, uncounted_ = 0;
  int64_t* current_ = nullptr;  // the count of the current batch
  std::map<int64_t, int64_t> counts_;
};

}  // namespace nanwatch
