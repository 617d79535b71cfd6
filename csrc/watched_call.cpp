// The callable that makes a module's call while it is watched.
//
// nn.Module.__call__ asks for `_compiled_call_impl` before it runs its hooks and its forward (see place.cpp). A
// WatchedCall put there sees the arguments, makes the call with everything PyTorch does around it, and sees the result:
// 0.2 µs, where registering any forward hook makes PyTorch itself 0.85 µs slower, and an exception needs no second hook
// to be noticed.
#include <torch/csrc/Exceptions.h>

#include "call_recorder.h"

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
    static PyObject* const call_impl = PyUnicode_InternFromString("_call_impl");
    const py::object module = py::reinterpret_borrow<py::object>(PyWeakref_GetObject(self->module));
    if (module.is_none()) {
      PyErr_SetString(PyExc_ReferenceError, "nanwatch: the watched module of this call no longer exists");
      return nullptr;
    }
    const py::object target = self->inner != nullptr
                                  ? py::reinterpret_borrow<py::object>(self->inner)
                                  : py::reinterpret_steal<py::object>(PyObject_GetAttr(module.ptr(), call_impl));
    if (!target) return nullptr;
    if (self->owner == nullptr) return PyObject_Call(target.ptr(), args, kwargs);
    const py::object keep = py::reinterpret_borrow<py::object>(object);  // stop() may drop it during the call
    return self->recorder->run(self->node, module.ptr(), target.ptr(), args, kwargs);
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

// CallRecorder takes part in garbage collection: its listener usually refers back to it.
CallRecorder* if_constructed(PyObject* object) {
  auto* instance = reinterpret_cast<py::detail::instance*>(object);
  return instance->get_value_and_holder().holder_constructed() ? py::cast<CallRecorder*>(py::handle(object)) : nullptr;
}

void collect_recorder(PyHeapTypeObject* heap_type) {
  PyTypeObject* type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = [](PyObject* object, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(object));
    const CallRecorder* recorder = if_constructed(object);
    return recorder != nullptr ? recorder->traverse(visit, arg) : 0;
  };
  type->tp_clear = [](PyObject* object) {
    if (CallRecorder* recorder = if_constructed(object)) recorder->drop_references();
    return 0;
  };
}

Check check_of(const std::string& name) {
  return name == "module" ? Check::module : name == "async" ? Check::async : Check::batch;
}

void bind_recorder(py::module_& m) {
  m.def(
      "set_device_backend",
      [](uintptr_t table) { RowTable::set_backend(reinterpret_cast<const NanwatchBackend*>(table)); }, py::arg("table"),
      "Puts a NanwatchBackend (its address; see csrc/device_backend.h) in the place of the devices', for tests. 0: "
      "none.");
  m.def(
      "device_backend", [] { return reinterpret_cast<uintptr_t>(RowTable::backend()); },
      "The address of the one there is.");
  m.def(
      "tensor_at", [](uintptr_t address) { return *reinterpret_cast<const at::Tensor*>(address); }, py::arg("address"),
      "The tensor that such a backend is asked about.");
  m.add_object("WatchedCall", py::reinterpret_steal<py::object>(PyType_FromSpec(&spec)));
  m.def("take_call", &take_call, py::arg("type"), "Lets a subclass of WatchedCall be called as WatchedCall is.");
  m.def("bind_row", &bind_row, py::arg("type"), "Sets the named tuple that rows are made of.");
  py::class_<Subscription>(m, "Subscription", "Some events that a CallRecorder reports until `remove()`.")
      .def_property("active", &Subscription::active, &Subscription::set_active)
      .def("remove", [](Subscription& self) { self.set_active(false); });
  py::class_<CallRecorder>(m, "CallRecorder", py::custom_type_setup(&collect_recorder),
                           "Records the calls of watched modules; see python/nanwatch/instrumentation/calls.py.")
      .def(py::init([](py::object events, py::object frame_type, const py::dict& helpers, size_t max_frames,
                       int64_t every, std::vector<int64_t> traced, bool weights, bool buffers, bool inputs,
                       bool outputs, int64_t reread_weights, bool verify_hits, bool measure_time, bool gradients,
                       bool counts, const std::string& check) {
             const Options options{check_of(check), weights,     buffers,      inputs,    outputs,
                                   reread_weights,  verify_hits, measure_time, gradients, counts};
             return std::make_unique<CallRecorder>(
                 options,
                 Helpers{helpers["observe"], helpers["leaves"], helpers["is_container"], helpers["spell_key"],
                         helpers["completed_row"]},
                 std::move(events), std::move(frame_type), max_frames, every, std::move(traced));
           }),
           py::kw_only(), py::arg("events"), py::arg("frame_type"), py::arg("helpers"), py::arg("max_frames"),
           py::arg("every"), py::arg("traced"), py::arg("weights"), py::arg("buffers"), py::arg("inputs"),
           py::arg("outputs"), py::arg("reread_weights"), py::arg("verify_hits"), py::arg("measure_time"),
           py::arg("gradients"), py::arg("counts"), py::arg("check"))
      .def("add_node", &CallRecorder::add_node, py::arg("name"), py::arg("module"), py::arg("observed"),
           py::arg("allow_inf"))
      .def("frames", &CallRecorder::frames)
      .def("frames_since", &CallRecorder::frames_since)
      .def("frames_of_batch", &CallRecorder::frames_of_batch)
      .def("pending_frames", &CallRecorder::pending_frames)
      .def("poll", &CallRecorder::poll, py::arg("wait"))
      .def_property_readonly("has_devices", [](const CallRecorder&) { return RowTable::has_devices(); })
      .def_property_readonly("may_be_pending", &CallRecorder::may_be_pending)
      .def("await_before_step", &CallRecorder::await_before_step)
      .def("begin_compiled", [](CallRecorder& self, int64_t node,
                                const std::vector<at::Tensor>& tensors) { self.begin_compiled(node, tensors); })
      .def("record_compiled",
           [](CallRecorder& self, int64_t node, int64_t caller, const std::string& plan,
              const std::vector<at::Tensor>& tensors) { self.record_compiled(node, caller, plan, tensors); })
      .def_property("watch", &CallRecorder::watch, &CallRecorder::set_watch)
      .def("forget_tensors", [](CallRecorder& self) { self.observer().forget_tensors(); })
      .def("finish_broken_backwards",
           [](CallRecorder& self) {
             if (!self.finish_broken_backwards()) throw py::error_already_set();
           })
      .def("finish_nonfinite_backward",
           [](CallRecorder& self) {
             if (!self.finish_bad_backward()) throw py::error_already_set();
           })
      .def_property_readonly("gradient_sums_may_overflow", &CallRecorder::gradient_sums_may_overflow)
      .def("forget_gradient_sums", &CallRecorder::forget_gradient_sums)
      .def("add_frame", &CallRecorder::add_frame)
      .def("excuse_gradients", &CallRecorder::excuse_gradients)
      .def("forget_gradients", &CallRecorder::forget_gradients)
      .def("forget_weights", [](CallRecorder& self) { self.observer().forget_weights(); })
      .def_property(
          "paused", [](const CallRecorder& self) { return self.paused != 0; },
          [](CallRecorder& self, bool on) { self.paused = (self.paused & ~1) | int(on); })
      .def("suspend", [](CallRecorder& self, bool on) { self.paused += on ? 2 : -2; })
      .def("subscribe",
           [](const CallRecorder& self, uint32_t events) { return Subscription(self.subscriptions, events); })
      .def_readwrite("awaits_backwards", &CallRecorder::awaits_backwards)
      .def_readwrite("gathers_peaks", &CallRecorder::gathers_peaks)
      .def("take_peaks", &CallRecorder::take_peaks)
      .def_readwrite("gathers_weights", &CallRecorder::gathers_weights)
      .def_property_readonly("latest_batch", &CallRecorder::latest_batch)
      .def_property_readonly("is_under_way", &CallRecorder::is_under_way)
      .def_property_readonly("frames_kept", &CallRecorder::frames_kept)
      .def_property_readonly("counters", [](CallRecorder& self) {
        const CallObserver& observer = self.observer();
        const Counters& c = observer.counters;
        py::dict found;
        found["calls"] = c.calls;
        found["frames"] = c.frames;
        found["tensors"] = c.tensors;
        found["tensors_read"] = c.tensors_read;
        found["bytes_read"] = c.bytes_read;
        found["cache_hits"] = c.cache_hits;
        found["stale_hits"] = c.stale_hits;
        found["nanoseconds"] = c.nanoseconds;
        found["labels"] = observer.num_labels();
        found["weights_remembered"] = observer.num_weights();
        return found;
      });
}

}  // namespace nanwatch
