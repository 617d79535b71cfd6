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

// Makes the call of a module by `inner`, the next callable of its slot, or as PyTorch does if that is null.
PyObject* call_past_wrappers(PyObject* inner, PyObject* module, PyObject* args, PyObject* kwargs);

// Adds WatchedCall to the module.
void bind_watched_call(pybind11::module_& m);

// Adds CallSlot, CallSite and IsWatched to the module.
void bind_call_slot(pybind11::module_& m);

// Returns what a Python object of the class T holds, null before its constructor is done.
template <typename T>
T* instance_of(PyObject* object) {
  auto* const instance = reinterpret_cast<pybind11::detail::instance*>(object);
  return instance->get_value_and_holder().holder_constructed() ? pybind11::cast<T*>(pybind11::handle(object)) : nullptr;
}

// Lets objects of the class T take part in garbage collection, by T::references() -> the addresses of what it owns.
template <typename T>
void collect(PyTypeObject* type) {
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* object, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(object));
    if (T* const self = instance_of<T>(object))
      for (pybind11::object* reference : self->references()) Py_VISIT(reference->ptr());
    return 0;
  };
  type->tp_clear = [](PyObject* object) {
    if (T* const self = instance_of<T>(object))
      for (pybind11::object* reference : self->references()) std::exchange(*reference, pybind11::object());
    return 0;
  };
}

}  // namespace nanwatch
