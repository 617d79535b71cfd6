// The rows of a frame as Python sees them: (label, role, shape, dtype, abs_min, abs_max, isfinite, health, note).
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "frame.h"

namespace nanwatch {

inline const char* role_name(Role role) {
  switch (role) {
    case Role::weight: return "weight";
    case Role::buffer: return "buffer";
    case Role::input: return "input";
    case Role::output: return "output";
    case Role::gradient: break;
  }
  return "gradient";
}

inline pybind11::tuple shape_of(const FrameData& frame, const RowData& row) {
  pybind11::tuple shape(row.dims);
  for (size_t d = 0; d < row.dims; ++d) shape[d] = frame.shapes[row.shape_at + d];
  return shape;
}

// `float16` for torch.float16.
inline std::string dtype_name(at::ScalarType type) {
  return pybind11::cast<std::string>(pybind11::str(pybind11::cast(type))).erase(0, sizeof("torch.") - 1);
}

inline std::string dtype_name(const RowData& row) {
  return dtype_name(static_cast<at::ScalarType>(row.dtype));
}

// The c10::ScalarType of that name, real or complex; -1 for any other.
inline int8_t floating_dtype(std::string_view name) {
  using at::ScalarType;
  static const auto* const known = [] {
    auto* const found = new std::vector<std::pair<std::string, int8_t>>;
    for (const ScalarType type :
         {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Double, ScalarType::ComplexFloat,
          ScalarType::ComplexDouble, ScalarType::ComplexHalf, ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2,
          ScalarType::Float8_e4m3fnuz, ScalarType::Float8_e5m2fnuz, ScalarType::Float8_e8m0fnu})
      found->emplace_back(dtype_name(type), int8_t(type));
    return found;
  }();
  for (const auto& [text, type] : *known)
    if (text == name) return type;
  return -1;
}

inline bool is_row(PyObject* row) {
  return PyTuple_Check(row) && PyTuple_GET_SIZE(row) == 9;
}

// Two notes of python/nanwatch/record.py say that the extremes of a value are meant.
inline bool is_meant(PyObject* row) {
  PyObject* const note = PyTuple_GET_ITEM(row, 8);
  return PyUnicode_Check(note) && (PyUnicode_CompareWithASCIIString(note, "mask") == 0 ||
                                   PyUnicode_CompareWithASCIIString(note, "allowed inf") == 0);
}

// record.is_fault of a row whose range is known.
inline bool is_fault(const RowData& row) {
  if (row.python == nullptr) return row.dtype >= 0 && !row.range.isfinite;
  return is_row(row.python) && PyTuple_GET_ITEM(row.python, 6) == Py_False && !is_meant(row.python);
}

// An error while looking is shown and forgotten: it must not end a training. What is no Exception (Ctrl-C) must.
inline bool survive() {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;
  PyErr_WriteUnraisable(nullptr);
  return true;
}

}  // namespace nanwatch
