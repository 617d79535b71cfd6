// Python code that runs for the recorder: hidden from torch.compile, and its errors on their way through C++. The
// records of a frame as Python sees them.
#pragma once

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/tensor_view.h"
#include "recorder/frame.h"

namespace nanwatch {

// Scope in which Python code runs for the recorder. A call may be watched from inside torch.compile, whose compiler
// would trace that code too.
class OutsideCompiler {
 public:
  OutsideCompiler() : before_(set_compiler(Py_None)) {}
  OutsideCompiler& operator=(OutsideCompiler&&) = delete;
  ~OutsideCompiler() {
    if (before_ != nullptr && before_ != Py_None) Py_XDECREF(set_compiler(before_));
    Py_XDECREF(before_);
  }

 private:
  // Sets the compiler that follows the frames of this thread. Returns the one that was set before, owned. A Python
  // error that is set stays.
  static PyObject* set_compiler(PyObject* callback) {
    // Not a plain static: an import may let another thread in, which would wait for it with the interpreter lock held.
    PYBIND11_CONSTINIT static pybind11::gil_safe_call_once_and_store<pybind11::object> set;
    const pybind11::error_scope error;
    set.call_once_and_store_result([] {
      return pybind11::object(pybind11::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame"));
    });
    PyObject* const before = PyObject_CallOneArg(set.get_stored().ptr(), callback);
    PyErr_Clear();
    return before;
  }

  PyObject* before_;  // owned
};

// Throws the Python error that is set, for code that holds no interpreter lock.
[[noreturn]] inline void throw_error() {
  python_error error;
  error.persist();
  throw error;
}

// Shows and clears the Python error, and returns true, if it is an Exception: an error of nanwatch must not end a
// training. Else returns false and leaves it set: KeyboardInterrupt must end the training.
inline bool show_error() {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;
  PyErr_WriteUnraisable(nullptr);
  return true;
}

// Returns action(). A C++ exception becomes the Python error that is set; then returns nothing.
template <typename Action>
auto without_exceptions(const Action& action) -> std::optional<decltype(action())> {
  try {
    return action();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return std::nullopt;
}

// Returns look(), which returns false with a Python error set to end the user's call. Errors of nanwatch, C++
// exceptions among them, are shown and cleared, so that the caller closes what it has opened.
template <typename Look>
bool survived(const Look& look) {
  const std::optional<bool> done = without_exceptions(look);
  return done.has_value() ? *done : show_error();
}

// A pending Python error, put aside while callbacks run, and restored at the end: it came first.
class HeldError {
 public:
  HeldError() { PyErr_Fetch(&type_, &value_, &traceback_); }
  HeldError& operator=(HeldError&&) = delete;
  ~HeldError() {
    if (type_ == nullptr) return;
    if (is_explained()) {
      Py_XDECREF(type_);
      Py_XDECREF(value_);
      Py_XDECREF(traceback_);
    } else {
      PyErr_Clear();
      PyErr_Restore(type_, value_, traceback_);
    }
  }

  // Returns look() with the error as sys.exc_info().
  template <typename Look>
  auto shown_in(const Look& look) {
    if (type_ == nullptr) return look();
    PyErr_NormalizeException(&type_, &value_, &traceback_);
    if (traceback_ != nullptr) PyException_SetTraceback(value_, traceback_);
    PyObject *type, *value, *traceback;
    PyErr_GetExcInfo(&type, &value, &traceback);
    PyErr_SetExcInfo(Py_XNewRef(type_), Py_XNewRef(value_), Py_XNewRef(traceback_));
    const auto result = look();
    PyErr_SetExcInfo(type, value, traceback);
    return result;
  }

 private:
  // Returns whether the exception that is now set takes the place of this one, as one that was raised "from" it does.
  bool is_explained() {
    if (!PyErr_Occurred()) return false;
    // KeyboardInterrupt and SystemExit end the program, whatever came first.
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return true;
    pybind11::error_scope later;
    PyErr_NormalizeException(&later.type, &later.value, &later.trace);
    const auto cause = pybind11::reinterpret_steal<pybind11::object>(PyException_GetCause(later.value));
    return cause && cause.ptr() == value_;
  }

  PyObject *type_, *value_, *traceback_;
};

// ---- records ----

inline const char* role_name(Role role) {
  return kRoles[int(role)];
}

inline pybind11::tuple shape_of(const FrameData& frame, const RecordData& record) {
  pybind11::tuple shape(record.dims);
  for (size_t d = 0; d < record.dims; ++d) shape[d] = frame.shapes[record.shape_at + d];
  return shape;
}

// `float16` for torch.float16.
inline std::string dtype_name(at::ScalarType type) {
  return pybind11::cast<std::string>(pybind11::str(pybind11::cast(type))).erase(0, sizeof("torch.") - 1);
}

inline std::string dtype_name(const RecordData& record) {
  return dtype_name(static_cast<at::ScalarType>(record.dtype));
}

// The c10::ScalarType of that name, where its numbers are of floating point; -1 for any other.
inline int8_t floating_dtype(const std::string& name) {
  const pybind11::object none = pybind11::none();
  const pybind11::object dtype = pybind11::getattr(pybind11::module_::import("torch"), name.c_str(), none);
  if (!THPDtype_Check(dtype.ptr())) return -1;
  const at::ScalarType type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  return at::isFloatingType(type) || at::isComplexType(type) ? int8_t(type) : int8_t(-1);
}

// The named tuples records.record.Record and records.record.Note, which Python sets once.
inline PyTypeObject* record_type = nullptr;
inline PyTypeObject* note_type = nullptr;

inline void bind_record(const pybind11::type& record, const pybind11::type& note) {
  const auto bound = [](const pybind11::type& type) {
    auto* const candidate = reinterpret_cast<PyTypeObject*>(type.ptr());
    if (!PyType_IsSubtype(candidate, &PyTuple_Type))
      throw pybind11::type_error("bind_record: expected named tuple types");
    Py_INCREF(candidate);  // for good
    return candidate;
  };
  record_type = bound(record);
  note_type = bound(note);
}

inline pybind11::object from_utf8(const std::string& text) {
  return pybind11::reinterpret_steal<pybind11::object>(
      PyUnicode_DecodeUTF8(text.data(), Py_ssize_t(text.size()), "replace"));
}

// Makes a named tuple. An item that is not set is None.
template <size_t N>
pybind11::object make_tuple_of(PyTypeObject* type, std::array<pybind11::object, N> items) {
  auto made = pybind11::reinterpret_steal<pybind11::object>(type->tp_alloc(type, Py_ssize_t(N)));
  if (!made) throw pybind11::error_already_set();
  for (size_t i = 0; i < N; ++i) {
    if (!items[i]) items[i] = pybind11::none();
    PyTuple_SET_ITEM(made.ptr(), Py_ssize_t(i), items[i].release().ptr());
  }
  return made;
}

// The items of a record by their names.
using RecordItems = std::array<pybind11::object, kRecordItems>;

inline pybind11::object make_record(RecordItems items) {
  return make_tuple_of(record_type, std::move(items));
}

inline pybind11::object make_note(NoteKind kind, const std::string& text = "") {
  std::array<pybind11::object, kNoteItems> items;
  items[note_item::kind] = pybind11::str(kNoteKinds[int(kind)]);
  items[note_item::text] = from_utf8(text);
  return make_tuple_of(note_type, std::move(items));
}

// The record with another item.
inline pybind11::object with_item(PyObject* record, size_t position, const pybind11::object& value) {
  RecordItems items;
  for (size_t i = 0; i < items.size(); ++i)
    items[i] =
        i == position ? value : pybind11::reinterpret_borrow<pybind11::object>(PyTuple_GET_ITEM(record, Py_ssize_t(i)));
  return make_record(std::move(items));
}

// The items of a value without a range.
inline RecordItems items_without_range(const std::string& label, Role role) {
  RecordItems items;
  items[record_item::label] = from_utf8(label);
  items[record_item::role] = pybind11::str(role_name(role));
  items[record_item::dtype] = pybind11::str("");
  return items;
}

inline bool is_record(PyObject* record) {
  return PyTuple_Check(record) && PyTuple_GET_SIZE(record) == kRecordItems;
}

// Returns whether the record's note says that its extremes are meant.
inline bool is_meant(PyObject* record) {
  PyObject* const note = PyTuple_GET_ITEM(record, record_item::note);
  if (!PyTuple_Check(note) || PyTuple_GET_SIZE(note) != kNoteItems) return false;
  PyObject* const kind = PyTuple_GET_ITEM(note, note_item::kind);
  if (!PyUnicode_Check(kind)) return false;
  for (const NoteKind excuse : kExcuses)
    if (PyUnicode_CompareWithASCIIString(kind, kNoteKinds[int(excuse)]) == 0) return true;
  return false;
}

// The text of a str; lone surrogates, which UTF-8 has not, as `\ud800`. "?" for anything else.
inline std::string to_utf8(PyObject* text) {
  if (text == nullptr || !PyUnicode_Check(text)) return "?";
  Py_ssize_t size;
  if (const char* const utf8 = PyUnicode_AsUTF8AndSize(text, &size)) return {utf8, size_t(size)};
  PyErr_Clear();
  const auto bytes =
      pybind11::reinterpret_steal<pybind11::object>(PyUnicode_AsEncodedString(text, "utf-8", "backslashreplace"));
  if (bytes) return {PyBytes_AS_STRING(bytes.ptr()), size_t(PyBytes_GET_SIZE(bytes.ptr()))};
  PyErr_Clear();
  return "?";
}

// record.is_fault of a record whose range is known.
inline bool is_nonfinite(const RecordData& record) {
  if (record.python == nullptr) return record.dtype >= 0 && !record.range.isfinite;
  return is_record(record.python) && PyTuple_GET_ITEM(record.python, record_item::isfinite) == Py_False &&
         !is_meant(record.python);
}

// Whether a record that is no fault is one of finite numbers of floating point.
inline bool holds_finite_fractions(const RecordData& record) {
  if (record.python == nullptr) return record.dtype >= 0 && floating_dtype(dtype_name(record)) >= 0;
  if (!is_record(record.python) || PyTuple_GET_ITEM(record.python, record_item::isfinite) != Py_True) return false;
  return floating_dtype(to_utf8(PyTuple_GET_ITEM(record.python, record_item::dtype))) >= 0;
}

// Excuses a nan that an input has and no output: data marks missing values so. The frame is finite then. An inf may
// have overflowed, and a router turns a computed nan into a choice, so these are no data.
inline void excuse_absorbed(FrameData* frame) {
  bool returns_numbers = false;
  for (const RecordData& record : frame->records) {
    if (!is_nonfinite(record)) {
      returns_numbers |= record.role == Role::output && holds_finite_fractions(record);
      continue;
    }
    if (record.role != Role::input || record.requires_grad || record.python == nullptr) return;
    PyObject* const health = PyTuple_GET_ITEM(record.python, record_item::health);
    if (!PyTuple_Check(health)) return;
    for (const int count : {column::num_posinf, column::num_neginf})
      if (PyObject_IsTrue(PyTuple_GET_ITEM(health, count)) != 0) return;
  }
  if (!returns_numbers) return;
  for (RecordData& record : frame->records)
    if (is_nonfinite(record))
      Py_SETREF(record.python,
                with_item(record.python, record_item::note, make_note(NoteKind::absorbed)).release().ptr());
  frame->has_nonfinite = false;
}

// The Python object of a tensor; empty with a Python error set.
inline pybind11::object wrap(const at::Tensor& x) {
  return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(x));
}

// Clears the Python error that came while a value was read, which must not end a training, and returns its text, as
// observe.py does. Returns nothing if it is no Exception (Ctrl-C): that stays set, and ends the call.
inline std::optional<std::string> excuse_error() {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return std::nullopt;
  const pybind11::error_already_set error;
  std::string reason = reinterpret_cast<PyTypeObject*>(error.type().ptr())->tp_name;
  reason.erase(0, reason.rfind('.') + 1);
  const auto words = pybind11::reinterpret_steal<pybind11::object>(PyObject_Str(error.value().ptr()));
  const auto start = words ? pybind11::reinterpret_steal<pybind11::object>(PyUnicode_Substring(words.ptr(), 0, 120))
                           : pybind11::object();
  if (!start) {
    PyErr_Clear();
    return reason;
  }
  const std::string text = to_utf8(start.ptr());
  const std::string line = text.substr(0, text.find('\n'));
  return line.empty() ? reason : reason + ": " + line;
}

// The record of a value that was not read, owned.
inline PyObject* unread_record(const std::string& label, Role role, const std::string& reason) {
  RecordItems items = items_without_range(label, role);
  items[record_item::note] = make_note(NoteKind::not_checked, reason);
  return make_record(std::move(items)).release().ptr();
}

}  // namespace nanwatch
