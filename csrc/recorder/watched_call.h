// The Python types through which a module's call reaches its recorder.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

namespace nanwatch {

class CallRecorder;

// A watched call of a module: its recorder and its node there, alive as long as `call`.
struct WatchedNode {
  pybind11::object call;
  CallRecorder* recorder;
  int32_t node;
};

// Adds the watched calls of a module, the outermost first. Returns false if one is a recorder's in Python. The module
// may be no object any more.
bool find_watched(PyObject* module, std::vector<WatchedNode>* nodes);

// Returns a new reference to the outermost wrapper of a module's call, or null.
PyObject* call_of(PyObject* module);

// Makes the call of a module as what stood before it would, or, where nothing did, as PyTorch does.
PyObject* call_past_wrappers(PyObject* inner, PyObject* module, PyObject* args, PyObject* kwargs);

// Adds WatchedCall to the module.
void bind_watched_call(pybind11::module_& m);

// Adds CallSlot, CallSite and IsWatched to the module.
void bind_call_slot(pybind11::module_& m);

}  // namespace nanwatch
