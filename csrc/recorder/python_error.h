// Python code that runs for the recorder: hidden from torch.compile, and its errors on their way through C++.
#pragma once

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <exception>
#include <utility>

namespace nanwatch {

// While Python code runs for the recorder. A call may be watched from inside torch.compile, and the compiler would
// follow any Python code into its own traces.
class OutsideCompiler {
 public:
  OutsideCompiler() : before_(set_compiler(Py_None)) {}
  OutsideCompiler(const OutsideCompiler&) = delete;
  OutsideCompiler& operator=(const OutsideCompiler&) = delete;
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

// True, and the error is shown and forgotten, where it is an Exception: an error of looking must not end a training.
// False, and it is still set, for what must, such as KeyboardInterrupt.
inline bool show_error() {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;
  PyErr_WriteUnraisable(nullptr);
  return true;
}

// Returns look(), which is false with a Python error set where the user's call is to end by it. A C++ exception is an
// error of ours: it is shown and forgotten, so that what the caller has opened is closed as ever.
template <typename Look>
bool survived(const Look& look) {
  try {
    return look();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return show_error();
}

// A pending Python error, put aside while callbacks run, and restored at the end: it came first.
class HeldError {
 public:
  HeldError() { PyErr_Fetch(&type_, &value_, &traceback_); }
  HeldError(const HeldError&) = delete;
  HeldError& operator=(const HeldError&) = delete;
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
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject* const cause = PyException_GetCause(value);
    const bool is_cause = cause != nullptr && cause == value_;
    Py_XDECREF(cause);
    PyErr_Restore(type, value, traceback);
    return is_cause;
  }

  PyObject *type_, *value_, *traceback_;
};

}  // namespace nanwatch
