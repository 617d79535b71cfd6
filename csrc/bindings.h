// The parts of bindings.cpp that have a file of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace nanwatch {

// Adds CallRecorder to the module.
void bind_recorder(pybind11::module_& m);

}  // namespace nanwatch
