// Largest magnitudes: of each weight, buffer and output in a batch, for forecasts, and of each input, for spikes; or of
// each gradient since the last take. Makes no Python object for any of them.
#pragma once

#include <Python.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>
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
  };

  // Reserves memory for one more module, before the first forward: a few bytes between activations keep the allocator
  // from joining them, which raised the peak of a ResNet-50's training by 15 %.
  void reserve_node() {
    nodes_.emplace_back().places.reserve(8);
    if (keys_.capacity() >= nodes_.size() * 8) return;
    keys_.reserve(nodes_.size() * 16);
    values_.reserve(nodes_.size() * 16);
  }

  // Takes a frame of the batch under way. A frame of another batch drops what was taken before.
  void add(const FrameData& frame, bool with_inputs) {
    if (frame.recomputed || frame.phase != Phase::forward) return;
    if (frame.batch != batch_) begin(frame.batch);
    for (const RecordData& record : frame.records)
      if (with_inputs || record.role != Role::input) add_record(frame.node, record);
  }

  // Takes a gradient, and keeps those of earlier batches until they are taken.
  void add_gradient(int64_t batch, int32_t node, const RecordData& record) {
    batch_ = std::max(batch_, batch);
    add_record(node, record);
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

  struct Node {
    std::vector<uint32_t> places;
    size_t next = 0;  // of these, the place that is expected: records come in the same order call after call
  };

  void begin(int64_t batch) {
    batch_ = batch;
    std::fill(values_.begin(), values_.end(), 0.0);
  }

  void add_record(int32_t node, const RecordData& record) {
    if (record.python != nullptr) return add_python({node, record.label, -1}, record.python);
    if (record.dtype >= 0 && record.range.isfinite && record.range.abs_max >= 0 &&
        !at::isIntegralType(static_cast<at::ScalarType>(record.dtype), true))
      raise({node, record.label, record.dtype}, record.range.abs_max);
  }

  // Records from Python: complex numbers, shards, other layouts.
  void add_python(Key key, PyObject* record) {
    if (!is_record(record)) return;
    PyObject* const largest = PyTuple_GET_ITEM(record, record_item::abs_max);
    if (PyTuple_GET_ITEM(record, record_item::isfinite) != Py_True || is_meant(record) || !PyFloat_Check(largest) ||
        !(PyFloat_AS_DOUBLE(largest) >= 0))
      return;
    key.dtype = floating_dtype(to_utf8(PyTuple_GET_ITEM(record, record_item::dtype)));
    if (key.dtype >= 0) raise(key, PyFloat_AS_DOUBLE(largest));
  }

  void raise(const Key& key, double value) {
    if (size_t(key.node) >= nodes_.size()) nodes_.resize(size_t(key.node) + 1);
    Node& node = nodes_[size_t(key.node)];
    const auto is_key = [&](uint32_t place) {
      return keys_[place].label == key.label && keys_[place].dtype == key.dtype;
    };
    if (node.next >= node.places.size() || !is_key(node.places[node.next])) {
      node.next = size_t(std::find_if(node.places.begin(), node.places.end(), is_key) - node.places.begin());
      if (node.next == node.places.size()) {
        if (keys_.size() == kMost) return;
        node.places.push_back(uint32_t(keys_.size()));
        keys_.push_back(key);
        values_.push_back(0.0);
      }
    }
    double& peak = values_[node.places[node.next++]];
    peak = std::max(peak, value);
    if (node.next == node.places.size()) node.next = 0;
  }

  int64_t batch_ = -1;
  size_t taken_ = 0;
  std::vector<Node> nodes_;
  std::vector<Key> keys_;  // of the places
  std::vector<double> values_;
};

}  // namespace nanwatch
