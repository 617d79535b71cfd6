// CallRecorder as Python sees it, with its GradientRecorder.
#include <torch/csrc/utils/pybind.h>

#include "gradients/gradient_recorder.h"
#include "recorder/watched_call.h"

namespace py = pybind11;

namespace nanwatch {
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
      .def("step_begins", &box::BlackBox::step_begins)
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
             if (options.gradients)
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
      .def("forget_weights", &CallRecorder::forget_weights, py::arg("groups") = py::list())
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
        counters["nanoseconds"] = self.subscriptions->nanoseconds.load();
        counters["labels"] = observer.labels().size();
        counters["weights_remembered"] = observer.num_weights();
        return counters;
      });
}

}  // namespace nanwatch
