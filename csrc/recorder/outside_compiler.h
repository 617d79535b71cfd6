// A guard for Python code that runs while torch.compile may be following frames.
#pragma once

#include <Python.h>

namespace nanwatch {

// While Python code runs for the recorder. A call may be watched from inside torch.compile, and the compiler would
// follow any Python code into its own traces.
class OutsideCompiler {
 public:
  OutsideCompiler();
  OutsideCompiler(const OutsideCompiler&) = delete;
  OutsideCompiler& operator=(const OutsideCompiler&) = delete;
  ~OutsideCompiler();

 private:
  PyObject* before_;  // owned
};

}  // namespace nanwatch
