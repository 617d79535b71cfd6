// A frame as the hot path leaves it: records of plain numbers. Names become strings and records become Python objects
// only on request.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device/row_table.h"
#include "numerics/columns.h"
#include "numerics/range.h"

namespace nanwatch {

// Labels as numbers: `input[0][mask]` is made once and then costs a comparison. Bounded: past the limit (a model whose
// dictionaries have ever new keys) a label ends in `[...]`.
class Labels {
 public:
  using Id = int32_t;
  static constexpr Id kInput = 0, kOutput = 1;

  Labels() { of_text("input"), of_text("output"); }

  // The reference stays valid while labels are added.
  const std::string& text(Id id) const { return labels_[size_t(id)].text; }
  size_t size() const { return labels_.size(); }

  Id of_text(const std::string& text) {
    const auto entry = ids_.find(text);
    if (entry != ids_.end()) return entry->second;
    if (labels_.size() < kLimit) return add(text);
    const std::string shortened = text.substr(0, text.rfind('[')) + "[...]";
    const auto known_short = ids_.find(shortened);
    if (known_short != ids_.end()) return known_short->second;
    return labels_.size() < 2 * kLimit ? add(shortened) : kInput;  // as many containers as labels: no model has those
  }

  // The label of an item of a sequence.
  Id item(Id parent, int64_t index) {
    Label& container = labels_[size_t(parent)];
    if (size_t(index) < container.items.size()) return container.items[size_t(index)];
    const Id id = of_text(container.text + "[" + std::to_string(index) + "]");
    if (size_t(index) == container.items.size()) container.items.push_back(id);
    return id;
  }

  // The label of an item of a mapping. `key` is a str; `spell` gives the text between the brackets (Python's rule), or
  // nothing with an exception set. A model may make its keys anew in every call: the string objects are let go at
  // times, and only the text is kept for good.
  template <typename Spell>
  std::optional<Id> item(Id parent, PyObject* key, const Spell& spell) {
    Label& container = labels_[size_t(parent)];
    // Calls name their arguments in the order of the call before.
    if (container.next < container.keys.size() && container.keys[container.next].first.ptr() == key) [[likely]]
      return container.keys[container.next++].second;
    for (size_t i = 0; i < container.keys.size(); ++i) {
      if (container.keys[i].first.ptr() != key) continue;
      container.next = i + 1;
      return container.keys[i].second;
    }
    const std::optional<std::string> spelt = spell(key);
    if (!spelt.has_value()) return std::nullopt;
    const Id id = of_text(container.text + "[" + *spelt + "]");
    // The destructor of a key, of a subclass of str, may run Python code that calls this function again.
    std::vector<Key> forgotten;
    if (container.keys.size() >= kMostKeys) forgotten.swap(container.keys);
    // While it is held, no other string can have its address.
    container.keys.emplace_back(pybind11::reinterpret_borrow<pybind11::object>(key), id);
    return id;
  }

 private:
  static constexpr size_t kLimit = 1 << 16;  // labels
  static constexpr size_t kMostKeys = 256;   // of a container

  using Key = std::pair<pybind11::object, Id>;
  struct Label {
    std::string text;
    std::vector<Id> items;
    std::vector<Key> keys;
    size_t next = 0;  // the key that is expected
  };

  Id add(const std::string& text) {
    labels_.push_back({text, {}, {}});
    return ids_[text] = Id(labels_.size() - 1);
  }

  std::deque<Label> labels_;
  std::unordered_map<std::string, Id> ids_;
};

constexpr int32_t kNotPending = -1;

struct RecordData {
  Labels::Id label;
  Role role;
  NoteKind note = NoteKind::none;
  int8_t dtype = -1;  // c10::ScalarType, -1 where there is no tensor
  uint8_t dims = 0;
  bool requires_grad = false;     // known of values that are not plain and finite
  uint32_t shape_at = 0;          // into FrameData::shapes
  int32_t pending = kNotPending;  // into FrameData::pending.rows while the range is still to come
  RangeRow range = {};
  PyObject* python = nullptr;  // owned; where the Python side made the record, it replaces all else

  // Takes what a tensor tells without a read.
  void describe(const at::Tensor& x) {
    dtype = int8_t(x.scalar_type());
    dims = uint8_t(x.dim());
  }
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
  int32_t node = 0, class_name = 0;  // the second is a label: of the module's class at the call, which may change
  bool recomputed = false;
  Phase phase = Phase::forward;
  bool has_nonfinite = false;
  bool has_objects = false;  // records that Python made
};

// One call of one module, with its records. Reused: clearing keeps the capacity, so a steady run allocates nothing. The
// head is one line of the CPU's cache.
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
  bool reads_all = false;                                // every tensor is read, also one whose range is known
  std::vector<GradientCandidate>* candidates = nullptr;  // if gradients are asked for
  std::span<const AddedOutput> added = {};
  // The containers that the walk is inside of, not set beyond its depth. The walk itself has no room for them: its
  // larger stack frame would need longer instructions.
  static constexpr int kMaxDepth = 32;
  PyObject* inside[kMaxDepth];

  OpenFrame() = default;
  OpenFrame(OpenFrame&& other) noexcept { swap(other); }
  ~OpenFrame() { clear(); }

  void clear() {
    start_over();
    candidates = nullptr;
    added = {};
    reads_all = false;
  }

  // Drops the content, to make the frame anew.
  void start_over() {
    FrameData::clear();
    if (candidates != nullptr) candidates->clear();
    pending.clear();
  }

  // Both frames have sent their reads, so only the rows are exchanged.
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
    if (current_->batch != batch) current_ = count_of(batch);
    ++current_->frames;
  }
  int64_t pushed() const { return pushed_; }  // ever
  // Number of frames of a batch, including those that were overwritten. Nothing once 16 later batches have had some:
  // more than one batch is under way where several threads call the model.
  std::optional<int64_t> frames_of(int64_t batch) const {
    for (const Count& count : counts_)
      if (count.batch == batch) return count.frames;
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

  struct Count {
    int64_t batch = kNone, frames = 0;
  };

  // The count of a batch, in place of the oldest; of one that was forgotten, one that nobody asks for.
  Count* count_of(int64_t batch) {
    const auto of_batch = [batch](const Count& count) { return count.batch == batch; };
    const auto count = std::find_if(counts_.begin(), counts_.end(), of_batch);
    if (count != counts_.end()) return &*count;
    if (batch <= forgotten_) return &(uncounted_ = {});
    const auto by_batch = [](const Count& a, const Count& b) { return a.batch < b.batch; };
    const auto oldest = std::min_element(counts_.begin(), counts_.end(), by_batch);
    forgotten_ = std::max(forgotten_, oldest->batch);
    *oldest = {batch, 0};
    return &*oldest;
  }

  std::vector<FrameData> frames_;
  size_t next_ = 0, held_ = 0;
  int64_t pushed_ = 0, forgotten_ = kNone;
  std::array<Count, 16> counts_;
  Count uncounted_, *current_ = &uncounted_;
};

}  // namespace nanwatch
