// The Python types through which a module's call reaches its recorder.
#pragma once

#include <pybind11/pybind11.h>

namespace nanwatch {

// Adds WatchedCall to the module.
void bind_watched_call(pybind11::module_& m);

// Adds Place to the module.
void bind_call_slot(pybind11::module_& m);

}  // namespace nanwatch
