#include "recorder/outside_compiler.h"

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace nanwatch {
namespace {

// Sets the compiler that follows the frames of this thread. Returns the one that was set before, owned.
PyObject* set_compiler(PyObject* callback) {
  // Not a plain static: an import may let another thread in, which would wait for it with the interpreter lock held.
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> set;
  set.call_once_and_store_result(
      [] { return py::object(py::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame")); });
  return PyObject_CallOneArg(set.get_stored().ptr(), callback);
}

}  // namespace

OutsideCompiler::OutsideCompiler() {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  before_ = set_compiler(Py_None);
  PyErr_Clear();
  PyErr_Restore(type, value, traceback);
}

OutsideCompiler::~OutsideCompiler() {
  if (before_ == nullptr) return;
  if (before_ != Py_None) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Py_XDECREF(set_compiler(before_));
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
  }
  Py_DECREF(before_);
}

}  // namespace nanwatch
