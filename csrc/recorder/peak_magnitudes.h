// The largest magnitude of each weight, buffer and output in a batch, for forecasts, and of each input, for spikes. Or
// of each gradient since they were last taken. Makes no Python object for any of them.
#pragma once

#include <Python.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "recorder/frame.h"
#include "recorder/record_python.h"

namespace nanwatch {

class PeakMagnitudes {
 public:
  struct Key {
    int32_t node;
    Labels::Id label;
    int8_t dtype;
    bool operator==(const Key& other) const {
      return node == other.node && label == other.label && dtype == other.dtype;
    }
  };

  // Room for a module more. Made before the first forward: a few bytes that come between its activations keep the
  // allocator from joining them, and the peak of a ResNet-50's training was 15 % higher.
  void reserve_node() { reserve(++nodes_ * 8); }

  // Takes a frame of the batch under way. A frame of another batch drops what was taken before.
  void add(const FrameData& frame, Labels& labels, bool with_inputs) {
    if (frame.recomputed || frame.phase != Phase::forward) return;
    if (frame.batch != batch_) begin(frame.batch);
    for (const RecordData& record : frame.records) {
      if (record.python != nullptr) {
        add_python(frame.node, record.python, nullptr, labels, with_inputs);
      } else if (with_inputs || record.role != Role::input) {
        add_record(frame.node, record.label, record);
      }
    }
  }

  // Takes a gradient under the label of its user, and keeps those of earlier batches until they are taken.
  void add_gradient(int64_t batch, int32_t node, Labels::Id label, const RecordData& record, Labels& labels) {
    batch_ = std::max(batch_, batch);
    if (record.python != nullptr) {
      add_python(node, record.python, &label, labels, false);
    } else {
      add_record(node, label, record);
    }
  }

  int64_t batch() const { return batch_; }
  // By place, 0 where nothing was seen or all was zero. The place of a key, once given, stays.
  const std::vector<double>& values() const { return values_; }
  // The keys of the places that came since it was last asked.
  std::vector<Key> take_new() {
    return {keys_.begin() + std::ptrdiff_t(std::exchange(taken_, keys_.size())), keys_.end()};
  }
  void clear() { begin(-1); }

 private:
  // A model that names its outputs anew in every batch must not fill the memory: beyond this many, none is added.
  static constexpr size_t kMost = 1 << 16;
  static constexpr uint32_t kFree = UINT32_MAX;

  void reserve(size_t places) {
    if (places <= keys_.capacity()) return;
    places = std::max(places, 2 * keys_.capacity());
    keys_.reserve(places);
    values_.reserve(places);
    size_t size = 16;
    while (size < 2 * places) size *= 2;
    table_.assign(size, kFree);
    for (size_t place = 0; place < keys_.size(); ++place) *find(keys_[place]) = uint32_t(place);
  }

  void begin(int64_t batch) {
    batch_ = batch;
    next_ = 0;
    std::fill(values_.begin(), values_.end(), 0.0);
  }

  void add_record(int32_t node, Labels::Id label, const RecordData& record) {
    if (record.dtype >= 0 && record.range.isfinite && record.range.abs_max >= 0 &&
        !at::isIntegralType(static_cast<at::ScalarType>(record.dtype), true))
      raise({node, label, record.dtype}, record.range.abs_max);
  }

  void raise(const Key& key, double value) {
    // Rows come in the same order batch after batch, so the next place is nearly always the right one.
    if (next_ == keys_.size() || !(keys_[next_] == key)) {
      reserve(keys_.size() + 1);
      uint32_t* const place = find(key);
      if (*place == kFree) {
        if (keys_.size() == kMost) return;
        *place = uint32_t(keys_.size());
        keys_.push_back(key);
        values_.push_back(0.0);
      }
      next_ = *place;
    }
    values_[next_] = std::max(values_[next_], value);
    ++next_;
  }

  // Returns the slot of a key in the table, or the one it would take.
  uint32_t* find(const Key& key) {
    const uint64_t both = (uint64_t(uint32_t(key.node)) << 32) | uint32_t(key.label);
    size_t at = size_t((both ^ (uint64_t(uint8_t(key.dtype)) << 24)) * 0x9e3779b97f4a7c15ull >> 20);
    for (;; ++at) {
      uint32_t& place = table_[at & (table_.size() - 1)];
      if (place == kFree || keys_[place] == key) return &place;
    }
  }

  // Rows from Python: complex numbers, shards, other layouts. `own` is the label where the record has another user's.
  void add_python(int32_t node, PyObject* record, const Labels::Id* own, Labels& labels, bool with_inputs) {
    if (!is_record(record)) return;
    const char* const label = PyUnicode_AsUTF8(PyTuple_GET_ITEM(record, record_item::label));
    const char* const role = PyUnicode_AsUTF8(PyTuple_GET_ITEM(record, record_item::role));
    PyObject* const largest = PyTuple_GET_ITEM(record, record_item::abs_max);
    if (label == nullptr || role == nullptr) return PyErr_Clear();
    if ((!with_inputs && std::string_view(role) == "input") ||
        PyTuple_GET_ITEM(record, record_item::isfinite) != Py_True || is_meant(record) || !PyFloat_Check(largest) ||
        !(PyFloat_AS_DOUBLE(largest) >= 0))
      return;
    const int8_t dtype = floating_dtype(record);
    if (dtype < 0) return;
    raise({node, own == nullptr ? labels.of_text(label) : *own, dtype}, PyFloat_AS_DOUBLE(largest));
  }

  size_t nodes_ = 0, taken_ = 0, next_ = 0;
  int64_t batch_ = -1;
  std::vector<Key> keys_;  // of the places
  std::vector<double> values_;
  std::vector<uint32_t> table_;  // places by the hashes of their keys, at most half full
};

}  // namespace nanwatch
