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

  // Writes the records of a frame of the module of this number.
  void add(const FrameData& frame, uint32_t module, const Labels& labels) {
    const uint64_t number = box_->begin_frame();
    for (const RecordData& from : frame.records) {
      box::Record record{};
      if (from.python != nullptr) {
        record = of_python(from.python);
      } else {
        const bool is_long = from.dims > box::kMostDims;
        record.abs_min = from.range.abs_min;
        record.abs_max = from.range.abs_max;
        std::copy_n(frame.shapes.data() + from.shape_at, is_long ? 0 : from.dims, &record.size0);
        record.label = label_of(from.label, labels);
        record.dtype = type_of(from.dtype);
        record.role = uint8_t(from.role);
        record.note = uint8_t(from.note);
        record.isfinite = from.range.isfinite;
        record.dims = is_long ? box::kNoShape : from.dims;
        record.pending = from.pending != kNotPending;
      }
      record.frame = number;
      record.batch = frame.batch;
      record.module = module;
      record.phase = uint8_t(frame.phase);
      record.recomputed = frame.recomputed;
      box_->add_record(record);
    }
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
  box::Record of_python(PyObject* from) {
    box::Record record{};
    record.label = record.dtype = box::kUnnamed;
    record.isfinite = 1;
    record.dims = box::kNoShape;
    if (!is_record(from)) return record;
    const auto number = [from](int item) {
      PyObject* const value = PyTuple_GET_ITEM(from, item);
      return PyFloat_Check(value) ? PyFloat_AS_DOUBLE(value) : 0.0;
    };
    const std::string role = to_utf8(PyTuple_GET_ITEM(from, record_item::role));
    const std::string dtype = to_utf8(PyTuple_GET_ITEM(from, record_item::dtype));
    const auto place = size_t(std::find(std::begin(kRoles), std::end(kRoles), role) - std::begin(kRoles));
    record.abs_min = number(record_item::abs_min);
    record.abs_max = number(record_item::abs_max);
    record.label = box_->name('l', to_utf8(PyTuple_GET_ITEM(from, record_item::label)));
    if (!dtype.empty()) record.dtype = box_->name('d', dtype);
    record.role = uint8_t(place < std::size(kRoles) ? place : 0);
    record.note = uint8_t(is_meant(from) ? NoteKind::allowed : NoteKind::none);
    record.isfinite = PyTuple_GET_ITEM(from, record_item::isfinite) != Py_False;
    return record;
  }

  box::BlackBox* const box_;
  std::vector<uint32_t> labels_;    // numbers in the file, by the recorder's
  std::array<uint32_t, 64> types_;  // by c10::ScalarType
};

}  // namespace nanwatch
