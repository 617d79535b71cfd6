// Python errors on their way through C++: which of them end the user's call, and putting one aside meanwhile.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <exception>

namespace nanwatch {

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
      return;
    }
    PyErr_Clear();
    PyErr_Restore(type_, value_, traceback_);
  }

  // While this lives, sys.exc_info() is the error.
  class Shown {
   public:
    explicit Shown(HeldError* error) : is_shown_(error->type_ != nullptr) {
      if (!is_shown_) return;
      PyErr_NormalizeException(&error->type_, &error->value_, &error->traceback_);
      if (error->traceback_ != nullptr) PyException_SetTraceback(error->value_, error->traceback_);
      PyErr_GetExcInfo(&type_, &value_, &traceback_);
      PyErr_SetExcInfo(Py_XNewRef(error->type_), Py_XNewRef(error->value_), Py_XNewRef(error->traceback_));
    }
    Shown(const Shown&) = delete;
    Shown& operator=(const Shown&) = delete;
    ~Shown() {
      if (is_shown_) PyErr_SetExcInfo(type_, value_, traceback_);
    }

   private:
    bool is_shown_;
    PyObject *type_ = nullptr, *value_ = nullptr, *traceback_ = nullptr;  // what it was before
  };

 private:
  // Returns whether the exception that is now set takes the place of this one, as one that was raised "from" it does.
  bool is_explained() const {
    if (!PyErr_Occurred()) return false;
    // KeyboardInterrupt and SystemExit end the program, whatever came first.
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return true;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject* const cause = PyException_GetCause(value);
    const bool found = cause != nullptr && cause == value_;
    Py_XDECREF(cause);
    PyErr_Restore(type, value, traceback);
    return found;
  }

  PyObject *type_, *value_, *traceback_;
};

}  // namespace nanwatch
