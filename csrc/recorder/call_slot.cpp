// The slot of a module's call, where the wrappers of watches stand.
//
// nn.Module.__call__ asks its module for `_compiled_call_impl` before it runs hooks and forward. CallSlot takes
// that name in the class nn.Module, as a data descriptor, and answers with the wrapper it has for the module's address.
// Nothing is written into the module, so no pickle, copy or `vars(module)` shows a watch. See
// python/nanwatch/instrumentation/slot.py.
//
// Compiled code knows a module by its site, a tensor that holds the module's address. Two more descriptors in nn.Module
// give torch.compile the site, and say whether the module is watched.
#include <ATen/EmptyTensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unordered_map>

#include "recorder/watched_call.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

class CallSlots {
 public:
  // Returns a new reference to the wrapper of the module's call, or null.
  PyObject* find(PyObject* module) {
    // nn.Module.__call__ asks twice: for "is not None", and to make the call.
    if (module == latest_ && module != nullptr) return Py_NewRef(latest_call_);
    const auto found = calls_.find(module);
    if (found == calls_.end()) return nullptr;
    latest_ = module;
    latest_call_ = found->second;
    return Py_NewRef(latest_call_);
  }

  void put(PyObject* module, PyObject* call) {
    latest_ = nullptr;
    PyObject*& held = calls_[module];
    PyObject* before = held;
    held = Py_NewRef(call);
    Py_XDECREF(before);  // last: it may run any code
  }

  void take(PyObject* module) {
    latest_ = nullptr;
    const auto found = calls_.find(module);
    if (found == calls_.end()) return;
    PyObject* before = found->second;
    calls_.erase(found);
    Py_DECREF(before);
  }

  bool has_site(PyObject* module) const { return sites_.count(module) > 0; }

  // Returns a new reference to the module's site, made at its first use, or null with an exception set.
  PyObject* site(PyObject* module) {
    const auto found = sites_.find(module);
    if (found != sites_.end()) return Py_NewRef(found->second);
    const c10::InferenceMode no_inference(false);
    at::Tensor address = at::detail::empty_cpu({1}, at::TensorOptions(at::kLong));
    *address.mutable_data_ptr<int64_t>() = reinterpret_cast<int64_t>(module);
    // Calls `forget` when the module is freed.
    const auto kept = py::reinterpret_steal<py::object>(PyObject_CallOneArg(keep, module));
    if (!kept) return nullptr;
    PyObject* site = THPVariable_Wrap(std::move(address));
    if (site != nullptr) sites_[module] = Py_NewRef(site);
    return site;
  }

  // Drops everything of a module that no longer exists.
  void forget(PyObject* module) {
    take(module);
    const auto found = sites_.find(module);
    if (found == sites_.end()) return;
    PyObject* site = found->second;
    sites_.erase(found);
    Py_DECREF(site);
  }

  PyObject* keep = Py_None;          // owned; the Python function that calls `forget` for a module
  PyObject* default_call = nullptr;  // owned; makes the calls of all other modules; see ModelFinder in cli/script.py

 private:
  std::unordered_map<PyObject*, PyObject*> calls_, sites_;  // the modules are borrowed, the calls and sites owned
  PyObject *latest_ = nullptr, *latest_call_ = nullptr;     // of the latest find
};

// Never destroyed: modules are called until the interpreter ends.
CallSlots& call_slots() {
  static CallSlots* const one = new CallSlots;
  return *one;
}

PyObject* get(PyObject*, PyObject* module, PyObject*) {
  if (module == nullptr) Py_RETURN_NONE;  // nn.Module._compiled_call_impl
  if (PyObject* call = call_slots().find(module)) return call;
  static PyObject* const name = PyUnicode_InternFromString("_compiled_call_impl");
  const auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  if (!attributes) return nullptr;
  // The callable that `module.compile()` has set.
  if (PyObject* own = PyDict_GetItemWithError(attributes.ptr(), name)) return Py_NewRef(own);
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (call_slots().default_call != nullptr) return PyMethod_New(call_slots().default_call, module);
  Py_RETURN_NONE;
}

PyObject* get_site(PyObject* self, PyObject* module, PyObject*) {
  return module == nullptr ? Py_NewRef(self) : call_slots().site(module);
}

PyObject* is_watched(PyObject* self, PyObject* module, PyObject*) {
  if (module == nullptr) return Py_NewRef(self);
  std::vector<WatchedNode> nodes;
  return PyBool_FromLong(!find_watched(module, &nodes) || !nodes.empty());
}

// Returns the module at the address `id(module)`. With an error set, -1 is no module's.
PyObject* at(PyObject* number) {
  return static_cast<PyObject*>(PyLong_AsVoidPtr(number));
}

PyObject* find(PyObject*, PyObject* number) {
  PyObject* module = at(number);
  if (PyErr_Occurred() != nullptr) return nullptr;
  PyObject* call = call_slots().find(module);
  return call != nullptr ? call : Py_NewRef(Py_None);
}

PyObject* set(PyObject*, PyObject* args) {
  PyObject *number, *call;
  if (!PyArg_ParseTuple(args, "OO:set", &number, &call)) return nullptr;
  PyObject* module = at(number);
  if (PyErr_Occurred() != nullptr) return nullptr;
  call_slots().put(module, call);
  Py_RETURN_NONE;
}

PyObject* remove(PyObject*, PyObject* number) {
  PyObject* module = at(number);
  if (PyErr_Occurred() != nullptr) return nullptr;
  call_slots().take(module);
  Py_RETURN_NONE;
}

PyObject* forget(PyObject*, PyObject* number) {
  PyObject* module = at(number);
  if (PyErr_Occurred() != nullptr) return nullptr;
  call_slots().forget(module);
  Py_RETURN_NONE;
}

PyObject* has_site(PyObject*, PyObject* number) {
  PyObject* module = at(number);
  if (PyErr_Occurred() != nullptr) return nullptr;
  return PyBool_FromLong(call_slots().has_site(module));
}

PyObject* keep_sites(PyObject*, PyObject* function) {
  Py_XSETREF(call_slots().keep, Py_NewRef(function));
  Py_RETURN_NONE;
}

PyObject* default_call(PyObject*, void*) {
  PyObject* function = call_slots().default_call;
  return Py_NewRef(function != nullptr ? function : Py_None);
}

int set_default_call(PyObject*, PyObject* function, void*) {
  Py_XSETREF(call_slots().default_call, function == nullptr || function == Py_None ? nullptr : Py_NewRef(function));
  return 0;
}

PyMethodDef slot_methods[] = {
    {"find", find, METH_O, "The callable before the call of the module at an address, or None."},
    {"set", set, METH_VARARGS, "Puts a callable before the call of the module at an address."},
    {"clear", remove, METH_O, "Takes away what stands before the call of the module at an address."},
    {"forget", forget, METH_O, "Drops everything of the module that was at an address."},
    {"has_site", has_site, METH_O, "Returns whether the module at an address has a site."},
    {"keep_sites", keep_sites, METH_O, "Calls the function with each module that gets a site."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef slot_properties[] = {{"default_call", default_call, set_default_call,
                                  "Makes the calls of all modules that nothing stands before; or None.", nullptr},
                                 {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot slot_parts[] = {{Py_tp_descr_get, reinterpret_cast<void*>(get)},
                            {Py_tp_methods, reinterpret_cast<void*>(slot_methods)},
                            {Py_tp_getset, reinterpret_cast<void*>(slot_properties)},
                            {Py_tp_doc, const_cast<char*>("Descriptor for nn.Module._compiled_call_impl.")},
                            {0, nullptr}};

PyType_Spec slot_spec = {"nanwatch._C.CallSlot", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                         slot_parts};

// No `property`: torch.jit.script compiles the properties of a module's class.
PyType_Slot site_parts[] = {{Py_tp_descr_get, reinterpret_cast<void*>(get_site)}, {0, nullptr}};
PyType_Spec site_spec = {"nanwatch._C.CallSite", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT, site_parts};
PyType_Slot watched_parts[] = {{Py_tp_descr_get, reinterpret_cast<void*>(is_watched)}, {0, nullptr}};
PyType_Spec watched_spec = {"nanwatch._C.IsWatched", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT, watched_parts};

}  // namespace

PyObject* call_of(PyObject* module) {
  return call_slots().find(module);
}

void bind_call_slot(py::module_& m) {
  m.add_object("CallSite", py::reinterpret_steal<py::object>(PyType_FromSpec(&site_spec)));
  m.add_object("IsWatched", py::reinterpret_steal<py::object>(PyType_FromSpec(&watched_spec)));
  m.add_object("CallSlot", py::reinterpret_steal<py::object>(PyType_FromSpec(&slot_spec)));
}

}  // namespace nanwatch
