// nanwatch._C: what Python calls directly. `abs_range` is a raw METH_O function, because a pybind11 call costs more
// than the reduction of a small tensor does; everything off the hot path goes through pybind11.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "cpu/range_cpu.h"
#include "device/row_table.h"
#include "gradients/gradient_recorder.h"
#include "ops/tensor_view.h"
#include "recorder/watched_call.h"

namespace py = pybind11;

namespace nanwatch {

namespace {

// Set by `bind`: the named tuple that is returned, and the same function in Python, for everything but a plain tensor.
struct Result {
  PyTypeObject* type = nullptr;
  PyObject* fallback = nullptr;
  PyObject* latest = nullptr;  // what was returned last
} range_result;

// A tuple of three, its items still to be set. The one that was returned last is used again once nobody else holds it,
// as zip() does with its own: to make and free one takes 30 ns, as long as all the rest of a small call.
PyObject* range_tuple() {
#if PY_VERSION_HEX < 0x030E0000  // later versions keep the tuple's hash, or have no lock that makes this safe
  PyObject* const latest = range_result.latest;
  if (latest != nullptr && Py_REFCNT(latest) == 1) {
    for (int i = 0; i < kRangeColumns; ++i) Py_DECREF(PyTuple_GET_ITEM(latest, i));
    return Py_NewRef(latest);
  }
  PyObject* result = range_result.type->tp_alloc(range_result.type, kRangeColumns);
  if (result != nullptr) Py_XSETREF(range_result.latest, Py_NewRef(result));
  return result;
#else
  return range_result.type->tp_alloc(range_result.type, kRangeColumns);
#endif
}

PyObject* abs_range(PyObject*, PyObject* object) {
  // Not HANDLE_TH_ERRORS: its buffer for warnings, of which there are none here, takes 10 ns.
  try {
    View view;
    if (!plain_view(object, &view)) return PyObject_CallOneArg(range_result.fallback, object);
    const int64_t bytes = view.numel * int64_t(word_size(view.format));
    const RangeRow row =
        read_released(THPVariable_Unpack(object), view, bytes, [](const View& view) { return range_cpu(view); });
    PyObject* result = range_tuple();
    if (result == nullptr) return nullptr;
    PyTuple_SET_ITEM(result, column::abs_min, PyFloat_FromDouble(row.abs_min));
    PyTuple_SET_ITEM(result, column::abs_max, PyFloat_FromDouble(row.abs_max));
    PyTuple_SET_ITEM(result, column::isfinite, PyBool_FromLong(row.isfinite));
    return result;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyMethodDef abs_range_def = {"abs_range", abs_range, METH_O, nullptr};  // `bind` gives its docstring

std::map<std::string, std::string> build_info() {
  return {{"torch", TORCH_VERSION}, {"compiler", __VERSION__}};
}

// Lets abs_range return this named tuple, and describe itself as its fallback in Python does.
void bind_range(const py::type& type, const py::function& fallback) {
  auto* candidate = reinterpret_cast<PyTypeObject*>(type.ptr());
  if (!PyType_IsSubtype(candidate, &PyTuple_Type)) throw py::type_error("bind: expected a named tuple type");
  Py_INCREF(candidate);
  Py_INCREF(fallback.ptr());
  // For good: Python binds once, at import.
  range_result = {candidate, fallback.ptr(), nullptr};
  const std::string text = py::str(py::module_::import("inspect").attr("getdoc")(fallback));
  abs_range_def.ml_doc = strdup(("abs_range(x, /)\n--\n\n" + text).c_str());
}

bool are_finite(const py::list& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](py::handle x) {
    View view;
    return plain_view(x.ptr(), &view) && range_cpu(view).isfinite;
  });
}

// In C++ no other thread comes in between: see _extension.instances_of.
py::list instances_of(const py::type& kind) {
  const py::object get_objects = py::module_::import("gc").attr("get_objects");
  py::list instances;
  for (const py::handle object : py::list(get_objects()))
    if (PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(kind.ptr())) != 0)
      instances.append(object);
  return instances;
}

// CallRecorder as Python sees it, with its GradientRecorder.
void bind_recorder(py::module_& m) {
  m.def(
      "set_device_backend",
      [](uintptr_t table) {
        return reinterpret_cast<uintptr_t>(RowTable::set_backend(reinterpret_cast<const NanwatchBackend*>(table)));
      },
      py::arg("table"),
      "Puts a NanwatchBackend (its address; see csrc/device/row_table.h) in the place of the devices', for tests, "
      "and returns the one before. 0: none.");
  m.def(
      "tensor_at", [](uintptr_t address) { return *reinterpret_cast<const at::Tensor*>(address); }, py::arg("address"),
      "The tensor that such a backend is asked about.");
  py::class_<box::BlackBox, std::unique_ptr<box::BlackBox, py::nodelete>>(m, "BlackBox",
                                                                          "The file of this process; blackbox/.")
      .def("add_note", &box::BlackBox::add_note)
      .def("add_sample", &box::BlackBox::add_sample)
      .def("pulse", &box::BlackBox::pulse)
      .def("exits", &box::BlackBox::exits)
      .def_static("close", &box::BlackBox::close);
  m.def("open_black_box", &box::BlackBox::open, py::arg("path"), py::arg("kept"), py::return_value_policy::reference);
  m.def("catch_signals", &box::catch_signals);
  m.def("bind_record", &bind_record, py::arg("record"), py::arg("note"),
        "Sets the named tuples that rows are made of.");
  py::class_<Subscription>(m, "Subscription", "Some events that a CallRecorder reports until `remove()`.")
      .def_property("active", &Subscription::active, &Subscription::set_active)
      .def("remove", [](Subscription& self) { self.set_active(false); });
  // Its RecorderEvents usually refer back to it.
  const auto set_up = [](PyHeapTypeObject* heap_type) { collect<CallRecorder>(&heap_type->ht_type); };
  py::class_<CallRecorder>(m, "CallRecorder", py::custom_type_setup(set_up),
                           "Records the calls of watched modules; see python/nanwatch/instrumentation/calls.py.")
      .def(py::init([](const py::object& settings, py::object events, py::object frame_type, py::object start_type,
                       const py::dict& helpers) {
             const Options options(settings);
             auto recorder = std::make_unique<CallRecorder>(
                 options,
                 Helpers{helpers["observe"], helpers["leaves"], helpers["is_container"], helpers["spell_key"],
                         helpers["completed_record"], helpers["plain_mask"]},
                 std::move(events), std::move(frame_type), std::move(start_type));
             if (options.gradients || options.output_gradients)
               recorder->set_gradients(std::make_shared<GradientRecorder>(recorder.get(), options));
             return recorder;
           }),
           py::arg("settings"), py::kw_only(), py::arg("events"), py::arg("frame_type"), py::arg("start_type"),
           py::arg("helpers"))
      .def("add_node", &CallRecorder::add_node, py::arg("name"), py::arg("module"), py::arg("observed"),
           py::arg("allow_inf"))
      .def("set_allow_inf", &CallRecorder::set_allow_inf)
      .def("frames", [](const CallRecorder& self) { return self.frames_since(0).second; })
      .def("frames_since", &CallRecorder::frames_since)
      .def("frames_of_batch", &CallRecorder::frames_of_batch)
      .def("settle", &CallRecorder::settle)
      .def("forget_tensors", [](CallRecorder& self) { self.observer().forget_tensors(); })
      .def("finish_nonfinite_backward",
           [](CallRecorder& self) {
             GradientRecorder* const gradients = self.gradients();
             if (gradients != nullptr && !gradients->finish_nonfinite_backward()) throw py::error_already_set();
           })
      .def("add_frame", &CallRecorder::add_frame)
      .def("call_under_way", &CallRecorder::call_under_way)
      .def("outermost", &CallRecorder::outermost)
      .def("add_output", &CallRecorder::add_output)
      .def("excuse_gradients", [](CallRecorder& self, const std::vector<int64_t>& batches,
                                  const py::object& note) { GradientRecorder::excuse(self.ring(), batches, note); })
      .def("forget_gradients",
           [](CallRecorder& self, const std::vector<at::Tensor>& leaves) {
             if (GradientRecorder* const gradients = self.gradients()) gradients->stop(leaves);
           })
      .def("losses",
           [](CallRecorder& self) {
             GradientRecorder* const gradients = self.gradients();
             return gradients == nullptr ? std::vector<double>() : gradients->losses();
           })
      .def("stepped", &CallRecorder::stepped)
      .def("step_begins", &CallRecorder::step_begins)
      .def_readonly("step_generator", &CallRecorder::step_generator)
      .def_property(
          "paused", [](const CallRecorder& self) { return self.paused != 0; },
          [](CallRecorder& self, bool on) { self.paused = (self.paused & ~1) | int(on); })
      .def("suspend", [](CallRecorder& self, bool on) { self.paused += on ? 2 : -2; })
      .def("subscribe",
           [](const CallRecorder& self, uint32_t events) { return Subscription(self.subscriptions, events); })
      .def_readwrite("keeps_starts", &CallRecorder::keeps_starts)
      .def("start", &CallRecorder::start)
      .def("ended_starts", &CallRecorder::ended_starts)
      .def("forget_starts", &CallRecorder::forget_starts)
      .def_property_readonly("num_other_threads", &CallRecorder::num_other_threads)
      .def("watch_buffers",
           [](CallRecorder& self, py::list buffers) { self.signals.watch_buffers(std::move(buffers)); })
      .def("watch_generators",
           [](CallRecorder& self, py::dict cuda) { self.signals.watch_generators(std::move(cuda)); })
      .def("watch_name", [](CallRecorder& self, py::dict names,
                            const std::string& name) { self.signals.watch_name(std::move(names), name); })
      .def_readwrite("gathers_from", &CallRecorder::gathers_from)
      .def_readwrite("gathers_inputs", &CallRecorder::gathers_inputs)
      .def("take_peaks", &CallRecorder::take_peaks)
      .def("called", &CallRecorder::called)
      .def_readwrite("gathers_gradient_peaks", &CallRecorder::gathers_gradient_peaks)
      .def("take_gradient_peaks", &CallRecorder::take_gradient_peaks)
      .def_readwrite("gathers_weights", &CallRecorder::gathers_weights)
      .def_property_readonly("latest_batch", &CallRecorder::latest_batch)
      .def_property_readonly("frames_kept", &CallRecorder::frames_kept)
      .def_property_readonly("counters", [](CallRecorder& self) {
        const CallObserver& observer = self.observer();
        const Counters& c = observer.counters;
        py::dict counters;
        counters["calls"] = c.calls;
        counters["frames"] = c.frames;
        counters["tensors"] = c.tensors;
        counters["tensors_read"] = c.tensors_read;
        counters["bytes_read"] = c.bytes_read;
        counters["cache_hits"] = c.cache_hits;
        counters["stale_hits"] = c.stale_hits;
        counters["labels"] = observer.labels().size();
        counters["weights_remembered"] = observer.num_weights();
        return counters;
      });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled part of nanwatch.";
  m.add_object("abs_range", py::reinterpret_steal<py::object>(
                                PyCFunction_NewEx(&abs_range_def, nullptr, py::str("nanwatch").ptr())));
  m.def(
      "bind", &bind_range, py::arg("range_type"), py::arg("fallback"),
      "Sets what abs_range returns, and the function that serves what it does not and has the text that describes it.");
  m.def("cpu_capabilities", &cpu_capabilities, "Instruction sets this machine can run, widest last.");
  m.def("cpu_capability", &cpu_capability, "The instruction set in force.");
  m.def("cpu_capability_warning", &cpu_capability_warning, "Not empty if NANWATCH_CPU could not be honoured.");
  m.def(
      "set_cpu_capability",
      [](const std::string& name) {
        if (set_cpu_capability(name)) return;
        std::string accepted;
        for (const std::string& level : cpu_capabilities()) accepted += " " + level;
        throw py::value_error("set_cpu_capability: got '" + name + "'; accepted on this machine:" + accepted);
      },
      py::arg("name"), "Holds the reduction at an instruction set, for tests and measurements.");
  m.def("build_info", &build_info, "What the compiled part was built with.");
  m.def("are_finite", &are_finite, py::arg("tensors"), "Whether all lie in plain memory and are finite.");
  m.def("instances_of", &instances_of, py::arg("kind"),
        "The objects of that class, or of one derived from it, that gc knows.");
  m.def("cuda_compiled", [] { return cuda_backend() != nullptr; }, "Whether CUDA kernels are linked in.");
  bind_watched_call(m);
  bind_recorder(m);
  bind_call_slot(m);
}

}  // namespace nanwatch
