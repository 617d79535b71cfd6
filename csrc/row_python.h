// The rows of a frame as Python sees them: (label, role, shape, dtype, abs_min, abs_max, isfinite, health, note).
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

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
inline std::string dtype_name(const RowData& row) {
  const auto type = static_cast<at::ScalarType>(row.dtype);
  return pybind11::cast<std::string>(pybind11::str(pybind11::cast(type))).erase(0, sizeof("torch.") - 1);
}

// record.is_fault of a row whose range is known. Two notes of python/nanwatch/record.py say that an infinity is meant.
inline bool is_fault(const RowData& row) {
  if (row.python == nullptr) return row.dtype >= 0 && !row.range.isfinite;
  if (!PyTuple_Check(row.python) || PyTuple_GET_SIZE(row.python) != 9) return false;
  PyObject* const note = PyTuple_GET_ITEM(row.python, 8);
  const bool is_meant = PyUnicode_Check(note) && (PyUnicode_CompareWithASCIIString(note, "mask") == 0 ||
                                                  PyUnicode_CompareWithASCIIString(note, "allowed inf") == 0);
  return PyTuple_GET_ITEM(row.python, 6) == Py_False && !is_meant;
}

// An error while looking is shown and forgotten: it must not end a training. What is no Exception (Ctrl-C) must.
inline bool survive() {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;
  PyErr_WriteUnraisable(nullptr);
  return true;
}

}  // namespace nanwatch
