// The callable that makes a module's call while it is watched.
//
// nn.Module.__call__ asks for `_compiled_call_impl` before it runs its hooks and its forward (see call_slot.cpp). A
// WatchedCall put there sees the arguments, makes the call with everything PyTorch does around it, and sees the result.
// It takes 0.2 µs. Registering any forward hook makes PyTorch itself 0.85 µs slower, and PyTorch calls no hook when the
// forward raises.
#include "recorder/watched_call.h"

#include <algorithm>
#include <array>

#include "recorder/call_recorder.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

// Python up to 3.11 counts the call of such an object as a level of recursion. This scope gives the level back, so that
// the forward may recurse as deep as without a watch. Taking it again cannot fail.
class LevelGivenBack {
 public:
#if PY_VERSION_HEX < 0x030C0000
  LevelGivenBack() { Py_LeaveRecursiveCall(); }
  ~LevelGivenBack() { Py_EnterRecursiveCall(""); }
#else
  LevelGivenBack() {}
#endif
  LevelGivenBack& operator=(LevelGivenBack&&) = delete;
};

struct WatchedCall {
  WatchedCall(py::object its_recorder, const py::object& its_module, py::object its_inner, int32_t its_node)
      : owner(std::move(its_recorder)),
        recorder(owner.cast<CallRecorder*>()),
        module(py::weakref(its_module)),
        inner(its_inner.is_none() ? py::object() : std::move(its_inner)),
        node(its_node) {}

  std::array<py::object*, 2> references() { return {&owner, &inner}; }

  py::object owner;  // the Python object that owns the recorder; empty once it was collected
  CallRecorder* recorder;
  py::object module;  // a weak reference
  py::object inner;   // the next callable of the slot, or empty
  int32_t node;
};

PyObject* call(PyObject* object, PyObject* args, PyObject* kwargs) {
  // Not HANDLE_TH_ERRORS: it would hold back the warnings of the forward, and takes 10 ns.
  const LevelGivenBack level;
  const auto make_call = [&]() -> PyObject* {
    auto* const self =
        static_cast<WatchedCall*>(reinterpret_cast<py::detail::instance*>(object)->simple_value_holder[0]);
    const py::object module = py::reinterpret_borrow<py::object>(PyWeakref_GetObject(self->module.ptr()));
    if (module.is_none()) {
      PyErr_SetString(PyExc_ReferenceError, "nanwatch: the watched module of this call no longer exists");
      return nullptr;
    }
    const py::object inner = self->inner;
    if (!self->owner) return call_past_wrappers(inner.ptr(), module.ptr(), args, kwargs);
    const py::object keep = py::reinterpret_borrow<py::object>(object);  // stop() may drop it during the call
    return self->recorder->run(self->node, module.ptr(), inner.ptr(), args, kwargs);
  };
  return without_exceptions(make_call).value_or(nullptr);
}

// Gives a subclass of WatchedCall this file's call again, whatever `__call__` its body defines. A compiler that reads
// Python (Dynamo) then follows that `__call__`, while the interpreter takes the short way.
void take_call(py::type type) {
  auto* candidate = reinterpret_cast<PyTypeObject*>(type.ptr());
  candidate->tp_call = call;
  PyType_Modified(candidate);
}

}  // namespace

PyObject* call_past_wrappers(PyObject* inner, PyObject* module, PyObject* args, PyObject* kwargs) {
  if (inner != nullptr) return PyObject_Call(inner, args, kwargs);
  static PyObject* const name = PyUnicode_InternFromString("_call_impl");
  constexpr Py_ssize_t kFew = 6;
  const auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  const auto function = py::reinterpret_borrow<py::object>(_PyType_Lookup(Py_TYPE(module), name));
  const Py_ssize_t count = PyTuple_GET_SIZE(args);
  // Call the function of the class if no attribute hides it: making a bound method takes a tenth of a watched call.
  if (attributes && PyDict_Check(attributes.ptr()) && PyDict_GetItemWithError(attributes.ptr(), name) == nullptr &&
      function && PyFunction_Check(function.ptr()) && count <= kFew) [[likely]] {
    PyObject* stack[kFew + 2];  // the callee may use the item before the arguments
    stack[1] = module;
    std::copy_n(&PyTuple_GET_ITEM(args, 0), count, stack + 2);
    return PyObject_VectorcallDict(function.ptr(), stack + 1, size_t(count + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET,
                                   kwargs);
  }
  PyErr_Clear();
  const auto bound = py::reinterpret_steal<py::object>(PyObject_GetAttr(module, name));
  return bound ? PyObject_Call(bound.ptr(), args, kwargs) : nullptr;
}

bool find_watched(PyObject* module, std::vector<WatchedNode>* nodes) {
  static PyObject* const recorder_name = PyUnicode_InternFromString("recorder");
  static PyObject* const inner_name = PyUnicode_InternFromString("inner");
  for (auto wrapper = py::reinterpret_steal<py::object>(call_of(module)); wrapper;) {
    if (Py_TYPE(wrapper.ptr())->tp_call == call) {
      const auto* const watched = wrapper.cast<WatchedCall*>();
      if (watched->owner) nodes->push_back({wrapper, watched->recorder, watched->node});
      wrapper = watched->inner;
      continue;
    }
    const auto recorder = py::reinterpret_steal<py::object>(PyObject_GetAttr(wrapper.ptr(), recorder_name));
    if (recorder && !recorder.is_none()) return false;
    // What `module.compile()` has set is no wrapper and has neither.
    if (recorder) wrapper = py::reinterpret_steal<py::object>(PyObject_GetAttr(wrapper.ptr(), inner_name));
    if (PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      break;
    }
  }
  return true;
}

void bind_watched_call(py::module_& m) {
  const auto or_none = [](const py::object& object) { return object ? object : py::object(py::none()); };
  const auto set_up = [](PyHeapTypeObject* heap_type) {
    collect<WatchedCall>(&heap_type->ht_type);
    heap_type->ht_type.tp_call = call;
  };
  py::class_<WatchedCall>(m, "WatchedCall", py::custom_type_setup(set_up))
      .def(py::init<py::object, const py::object&, py::object, int32_t>(), py::arg("recorder"), py::arg("module"),
           py::arg("inner"), py::arg("node"))
      .def_property_readonly(
          "recorder", [=](const WatchedCall& self) { return or_none(self.owner); }, "The CallRecorder.")
      .def_property_readonly(
          "module", [](const WatchedCall& self) { return self.module(); }, "The module, or None once it is gone.")
      .def_property(
          "inner", [=](const WatchedCall& self) { return or_none(self.inner); },
          [](WatchedCall& self, const py::object& inner) {
            const py::object before = std::exchange(self.inner, inner.is_none() ? py::object() : inner);
          },
          "The next callable of the slot, or None.");
  m.def("take_call", &take_call, py::arg("type"), "Lets a subclass of WatchedCall be called as WatchedCall is.");
}

}  // namespace nanwatch
