// The range of one CUDA tensor as numbers on the host: one kernel, which writes its row there, and one wait.
#pragma once

#include <pybind11/pybind11.h>

#include "numerics/range.h"

namespace nanwatch {

// Fills `row` for a plain strided CUDA tensor; false for all else, which goes through the dispatcher. Raises while the
// current stream is being captured.
#ifdef NANWATCH_CUDA
bool range_sync(PyObject* object, RangeRow* row);
#else
inline bool range_sync(PyObject*, RangeRow*) {
  return false;
}
#endif

}  // namespace nanwatch
