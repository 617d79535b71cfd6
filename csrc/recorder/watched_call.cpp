// The callable that makes a module's call while it is watched.
//
// nn.Module.__call__ asks for `_compiled_call_impl` before it runs its hooks and its forward (see call_slot.cpp). A
// WatchedCall put there sees the arguments, makes the call with everything PyTorch does around it, and sees the result:
// 0.2 µs, where registering any forward hook makes PyTorch itself 0.85 µs slower, and an exception needs no second hook
// to be noticed.
#include "recorder/watched_call.h"

#include <torch/csrc/Exceptions.h>

#include <algorithm>

#include "recorder/call_recorder.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

// Until 3.11 the interpreter counts the call of an object like this one as a level of recursion. While this lives, the
// level is given back: the forward may go as deep as it could unwatched. Taking it again cannot fail, as it was there.
class LevelGivenBack {
 public:
#if PY_VERSION_HEX < 0x030C0000
  LevelGivenBack() { Py_LeaveRecursiveCall(); }
  ~LevelGivenBack() { Py_EnterRecursiveCall(""); }
#else
  LevelGivenBack() {}
#endif
  LevelGivenBack(const LevelGivenBack&) = delete;
  LevelGivenBack& operator=(const LevelGivenBack&) = delete;
};

struct WatchedCall {
  PyObject ob_base;
  PyObject* owner;  // the Python object that owns the recorder
  CallRecorder* recorder;
  PyObject* module;  // a weak reference
  PyObject* inner;   // what stood in this place before, or null
  int32_t node;
};

PyObject* call(PyObject* object, PyObject* args, PyObject* kwargs) {
  // Not HANDLE_TH_ERRORS: it would hold back the warnings of the forward, and takes 10 ns.
  const LevelGivenBack level;
  try {
    auto* self = reinterpret_cast<WatchedCall*>(object);
    const py::object module = py::reinterpret_borrow<py::object>(PyWeakref_GetObject(self->module));
    if (module.is_none()) {
      PyErr_SetString(PyExc_ReferenceError, "nanwatch: the watched module of this call no longer exists");
      return nullptr;
    }
    const py::object inner = py::reinterpret_borrow<py::object>(self->inner);
    if (self->owner == nullptr) return call_past_wrappers(inner.ptr(), module.ptr(), args, kwargs);
    const py::object keep = py::reinterpret_borrow<py::object>(object);  // stop() may drop it during the call
    return self->recorder->run(self->node, module.ptr(), inner.ptr(), args, kwargs);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<WatchedCall*>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->owner);
  Py_VISIT(self->inner);
  return 0;
}

int clear(PyObject* object) {
  auto* self = reinterpret_cast<WatchedCall*>(object);
  Py_CLEAR(self->owner);
  Py_CLEAR(self->inner);
  return 0;
}

void dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  clear(object);
  Py_CLEAR(reinterpret_cast<WatchedCall*>(object)->module);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *recorder, *module, *inner;
  int node;
  if (!PyArg_ParseTuple(args, "OOOi:WatchedCall", &recorder, &module, &inner, &node)) return nullptr;
  if (!py::isinstance<CallRecorder>(recorder)) {
    PyErr_Format(PyExc_TypeError, "WatchedCall needs a CallRecorder, got %s", Py_TYPE(recorder)->tp_name);
    return nullptr;
  }
  PyObject* weak = PyWeakref_NewRef(module, nullptr);
  if (weak == nullptr) return nullptr;
  auto* self = reinterpret_cast<WatchedCall*>(type->tp_alloc(type, 0));
  if (self == nullptr) {
    Py_DECREF(weak);
    return nullptr;
  }
  self->owner = Py_NewRef(recorder);
  self->recorder = py::handle(recorder).cast<CallRecorder*>();
  self->module = weak;
  self->inner = inner == Py_None ? nullptr : Py_NewRef(inner);
  self->node = node;
  return reinterpret_cast<PyObject*>(self);
}

PyObject* inner_of(PyObject* object, void*) {
  PyObject* inner = reinterpret_cast<WatchedCall*>(object)->inner;
  return Py_NewRef(inner != nullptr ? inner : Py_None);
}

PyObject* module_of(PyObject* object, void*) {
  return Py_NewRef(PyWeakref_GetObject(reinterpret_cast<WatchedCall*>(object)->module));
}

int set_inner(PyObject* object, PyObject* value, void*) {
  auto* self = reinterpret_cast<WatchedCall*>(object);
  Py_XSETREF(self->inner, value == nullptr || value == Py_None ? nullptr : Py_NewRef(value));
  return 0;
}

PyObject* recorder_of(PyObject* object, void*) {
  PyObject* owner = reinterpret_cast<WatchedCall*>(object)->owner;
  return Py_NewRef(owner != nullptr ? owner : Py_None);
}

PyGetSetDef properties[] = {{"recorder", recorder_of, nullptr, "The CallRecorder.", nullptr},
                            {"inner", inner_of, set_inner, "What stood in this place before, or None.", nullptr},
                            {"module", module_of, nullptr, "The module, or None once it is gone.", nullptr},
                            {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(create)},
                       {Py_tp_call, reinterpret_cast<void*>(call)},
                       {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                       {Py_tp_getset, reinterpret_cast<void*>(properties)},
                       {Py_tp_doc, const_cast<char*>("WatchedCall(recorder, module, inner, node)")},
                       {0, nullptr}};

PyType_Spec spec = {"nanwatch._C.WatchedCall", sizeof(WatchedCall), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};

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
  // Without a bound method where nothing but the class has the name: to make one takes a tenth of a watched call.
  if (attributes && PyDict_Check(attributes.ptr()) && PyDict_GetItemWithError(attributes.ptr(), name) == nullptr &&
      function && PyFunction_Check(function.ptr()) && count <= kFew &&
      (kwargs == nullptr || PyDict_GET_SIZE(kwargs) == 0)) [[likely]] {
    PyObject* stack[kFew + 2];  // one before the arguments for whom they are given to
    stack[1] = module;
    std::copy_n(&PyTuple_GET_ITEM(args, 0), count, stack + 2);
    return PyObject_Vectorcall(function.ptr(), stack + 1, size_t(count + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
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
      auto* watched = reinterpret_cast<WatchedCall*>(wrapper.ptr());
      if (watched->owner != nullptr) nodes->push_back({wrapper, watched->recorder, watched->node});
      wrapper = py::reinterpret_borrow<py::object>(watched->inner);
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
  m.add_object("WatchedCall", py::reinterpret_steal<py::object>(PyType_FromSpec(&spec)));
  m.def("take_call", &take_call, py::arg("type"), "Lets a subclass of WatchedCall be called as WatchedCall is.");
}

}  // namespace nanwatch
