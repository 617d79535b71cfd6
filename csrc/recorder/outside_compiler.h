// A guard for Python code that runs while torch.compile may be following frames.
#pragma once

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

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
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    set.call_once_and_store_result([] {
      return pybind11::object(pybind11::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame"));
    });
    PyObject* const before = PyObject_CallOneArg(set.get_stored().ptr(), callback);
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    return before;
  }

  PyObject* before_;  // owned
};

}  // namespace nanwatch
