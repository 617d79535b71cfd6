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
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <unordered_map>

#include "recorder/watched_call.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

// Table of the wrappers before the calls of modules, by address, `id(module)`. It owns no module.
class CallSlots {
 public:
  // Returns the wrapper of the module's call, borrowed, or null.
  PyObject* find(PyObject* module) {
    Recent& recent = recent_of(module);
    if (recent.module == module && module != nullptr) [[likely]]
      return recent.call;
    const auto call = calls_.find(module);
    if (call == calls_.end()) return nullptr;
    recent = {module, call->second.ptr()};
    return recent.call;
  }

  // For Python, which gives a module's address.
  py::object call_at(uintptr_t address) {
    PyObject* const call = find(at(address));
    return py::reinterpret_borrow<py::object>(call != nullptr ? call : Py_None);
  }

  void put(uintptr_t address, py::object call) {
    recent_of(at(address)) = {};
    const py::object before = std::exchange(calls_[at(address)], std::move(call));  // freed last: it may run any code
  }

  void take(uintptr_t address) {
    recent_of(at(address)) = {};
    const auto before = calls_.extract(at(address));
  }

  bool has_site(uintptr_t address) const { return sites_.count(at(address)) > 0; }

  // Returns the module's site, made at its first use; empty with an exception set.
  py::object site(PyObject* module) {
    if (const auto site = sites_.find(module); site != sites_.end()) return site->second;
    const c10::InferenceMode no_inference(false);
    at::Tensor address = at::detail::empty_cpu({1}, at::TensorOptions(at::kLong));
    *address.mutable_data_ptr<int64_t>() = reinterpret_cast<int64_t>(module);
    // Calls `forget` when the module is freed.
    const auto kept = py::reinterpret_steal<py::object>(PyObject_CallOneArg(keep.ptr(), module));
    if (!kept) return {};
    auto site = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(address)));
    if (site) sites_[module] = site;
    return site;
  }

  // Drops everything of a module that no longer exists.
  void forget(uintptr_t address) {
    take(address);
    const auto site = sites_.extract(at(address));
  }

  py::object keep = py::none();          // the Python function that calls `forget` for a module
  py::object default_call = py::none();  // makes the calls of all other modules; see session/model_finder.py

 private:
  // The latest wrappers that were found: one line of the CPU's cache, where a search takes several.
  struct Recent {
    PyObject *module = nullptr, *call = nullptr;
  };
  Recent& recent_of(PyObject* module) {
    return recent_[reinterpret_cast<uintptr_t>(module) * 0x9e3779b97f4a7c15ull >> (64 - kBits)];
  }

  static PyObject* at(uintptr_t address) { return reinterpret_cast<PyObject*>(address); }
  static constexpr int kBits = 10;
  std::array<Recent, size_t(1) << kBits> recent_{};
  std::unordered_map<PyObject*, py::object> calls_, sites_;
};

// Never destroyed: modules are called until the interpreter ends.
CallSlots* const slots = new CallSlots;

PyObject* get(PyObject*, PyObject* module, PyObject*) {
  if (module == nullptr) Py_RETURN_NONE;  // nn.Module._compiled_call_impl
  if (PyObject* const call = slots->find(module)) return Py_NewRef(call);
  static PyObject* const name = PyUnicode_InternFromString("_compiled_call_impl");
  const auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  if (!attributes) return nullptr;
  // The callable that `module.compile()` has set.
  if (PyObject* compiled = PyDict_GetItemWithError(attributes.ptr(), name)) return Py_NewRef(compiled);
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (!slots->default_call.is_none()) return PyMethod_New(slots->default_call.ptr(), module);
  Py_RETURN_NONE;
}

PyObject* get_site(PyObject* self, PyObject* module, PyObject*) {
  return module == nullptr ? Py_NewRef(self) : slots->site(module).release().ptr();
}

PyObject* is_watched(PyObject* self, PyObject* module, PyObject*) {
  if (module == nullptr) return Py_NewRef(self);
  std::vector<WatchedNode> nodes;
  return PyBool_FromLong(!find_watched(module, &nodes) || !nodes.empty());
}

// Descriptors without a state. Not a `property`: torch.jit.script compiles the properties of a module's class.
struct Site {};
struct IsWatched {};
template <typename T>
void bind_descriptor(py::module_& m, const char* name, descrgetfunc function) {
  py::class_<T>(m, name, py::custom_type_setup([function](PyHeapTypeObject* heap_type) {
                  heap_type->ht_type.tp_descr_get = function;
                }))
      .def(py::init<>());
}

}  // namespace

PyObject* call_of(PyObject* module) {
  return Py_XNewRef(slots->find(module));
}

void bind_call_slot(py::module_& m) {
  const auto set_up = [](PyHeapTypeObject* heap_type) { heap_type->ht_type.tp_descr_get = get; };
  // Every instance is the one table.
  py::class_<CallSlots, std::unique_ptr<CallSlots, py::nodelete>>(m, "CallSlot", py::custom_type_setup(set_up),
                                                                  "Descriptor for nn.Module._compiled_call_impl.")
      .def(py::init([] { return slots; }))
      .def("find", &CallSlots::call_at, "The callable before the call of the module at an address, or None.")
      .def("set", &CallSlots::put, "Puts a callable before the call of the module at an address.")
      .def("clear", &CallSlots::take, "Removes the callable before the call of the module at an address.")
      .def("forget", &CallSlots::forget, "Drops everything of the module that was at an address.")
      .def("has_site", &CallSlots::has_site, "Returns whether the module at an address has a site.")
      .def(
          "keep_sites", [](CallSlots& self, const py::object& function) { self.keep = function; },
          "Calls the function with each module that gets a site.")
      .def_readwrite("default_call", &CallSlots::default_call,
                     "The function that makes the calls of all modules without a wrapper, or None.");
  bind_descriptor<Site>(m, "CallSite", get_site);
  bind_descriptor<IsWatched>(m, "IsWatched", is_watched);
}

}  // namespace nanwatch
