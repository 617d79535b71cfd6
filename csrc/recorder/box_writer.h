// Writes the calls and frames of one recorder into the black box.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "blackbox/black_box.h"
#include "recorder/frame.h"
#include "recorder/record_python.h"

namespace nanwatch {

class BoxWriter {
 public:
  explicit BoxWriter(box::BlackBox* box) : box_(box) { types_.fill(box::kUnnamed); }

  // Null where nothing is to be written, as in a forked child, whose file is another.
  box::BlackBox* box() const { return box_ != nullptr && box_ == box::BlackBox::active() ? box_ : nullptr; }

  // The module's number in the file.
  uint32_t number_of(const std::string& module, const std::string& class_name) {
    return box() == nullptr ? box::kUnnamed : box_->name('m', (module + "\n").append(class_name));
  }

  // Writes a frame of the module of this number.
  void add(const FrameData& frame, uint32_t module, const Labels& labels) {
    box::Frame* const made = box_->new_frame(frame.records.size(), frame.shapes.size());
    if (made == nullptr) return;
    made->batch = frame.batch;
    made->module = module;
    made->phase = uint8_t(frame.phase);
    made->recomputed = frame.recomputed;
    box::Row* row = box::BlackBox::rows_of(made);
    for (const RecordData& from : frame.records) {
      if (from.python != nullptr) {
        *row++ = of_python(from.python);
      } else {
        *row++ = {from.range.abs_min,  from.range.abs_max, label_of(from.label, labels),
                  type_of(from.dtype), uint8_t(from.role), uint8_t(from.note),
                  from.range.isfinite, from.dims,          from.pending != kNotPending};
      }
    }
    std::copy(frame.shapes.begin(), frame.shapes.end(), box::BlackBox::sizes_of(made, frame.records.size()));
    box_->push_frame(made);
  }

 private:
  // The number of a dtype in the file.
  uint32_t type_of(int8_t dtype) {
    uint32_t& type = types_[uint8_t(dtype) % types_.size()];
    if (type == box::kUnnamed && dtype >= 0) type = box_->name('d', dtype_name(static_cast<at::ScalarType>(dtype)));
    return type;
  }

  uint32_t label_of(Labels::Id label, const Labels& labels) {
    while (labels_.size() <= size_t(label)) labels_.push_back(box_->name('l', labels.text(Labels::Id(labels_.size()))));
    return labels_[size_t(label)];
  }

  // A record that Python has made: complex numbers, shards, non-finite values. It has no sizes.
  box::Row of_python(PyObject* from) {
    if (!is_record(from)) return {0, 0, box::kUnnamed, box::kUnnamed, 0, 0, 1, box::kNoShape, 0};
    const auto number = [from](int item) {
      PyObject* const value = PyTuple_GET_ITEM(from, item);
      return PyFloat_Check(value) ? PyFloat_AS_DOUBLE(value) : 0.0;
    };
    const std::string role = to_utf8(PyTuple_GET_ITEM(from, record_item::role));
    const std::string dtype = to_utf8(PyTuple_GET_ITEM(from, record_item::dtype));
    const auto place = size_t(std::find(std::begin(kRoles), std::end(kRoles), role) - std::begin(kRoles));
    return {number(record_item::abs_min),
            number(record_item::abs_max),
            box_->name('l', to_utf8(PyTuple_GET_ITEM(from, record_item::label))),
            dtype.empty() ? box::kUnnamed : box_->name('d', dtype),
            uint8_t(place < std::size(kRoles) ? place : 0),
            uint8_t(is_meant(from) ? NoteKind::allowed : NoteKind::none),
            PyTuple_GET_ITEM(from, record_item::isfinite) != Py_False,
            box::kNoShape,
            0};
  }

  box::BlackBox* const box_;
  std::vector<uint32_t> labels_;    // numbers in the file, by the recorder's
  std::array<uint32_t, 64> types_;  // by c10::ScalarType
};

}  // namespace nanwatch
