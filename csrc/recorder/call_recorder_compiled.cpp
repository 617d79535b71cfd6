// Calls of watched modules inside compiled code. There is no module call any more:
// python/nanwatch/instrumentation/compiled.py has put an operator into the graph in its place:
//
//   record_(sequence, site, None, plan, tensors)     before a call that no call of the graph made, with its arguments
//   record_(sequence, site, caller, plan, tensors)   after every call, with all the tensors of its frame
//
// The plan of the first names no class.
// `site` and `caller` hold the addresses of modules. They are inputs of the graph, so that one graph serves every
// module that Dynamo takes for equal. The wrappers of a module, if there are any, know its recorders.
//
// `sequence` is declared as written, so that a compiler keeps the operators and their order. call_observer.h explains
// plans.
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "ops/tensor_view.h"
#include "recorder/call_recorder.h"
#include "recorder/watched_call.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

PyObject* module_at(const at::Tensor& site) {
  return reinterpret_cast<PyObject*>(*site.const_data_ptr<int64_t>());
}

// Adds the watched calls of the module at a site. False if a recorder in Python has one.
bool find_at(const at::Tensor& site, std::vector<WatchedNode>* nodes) {
  return !site.is_cpu() || site.numel() == 0 || find_watched(module_at(site), nodes);
}

void record_(const at::Tensor& sequence, const at::Tensor& site, const std::optional<at::Tensor>& caller,
             c10::string_view plan, at::TensorList tensors) {
  const py::gil_scoped_acquire lock;
  std::vector<WatchedNode> calls, callers;
  if (!find_at(site, &calls) || (caller && !find_at(*caller, &callers)))
    return call_reference<void(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, c10::string_view,
                               at::TensorList)>("nanwatch::record_", sequence, site, caller, plan, tensors);
  if (sequence.is_cpu() && sequence.numel() > 0) ++*sequence.mutable_data_ptr<int64_t>();
  if (plan.empty() || plan.front() == kPlanSeparator) {
    for (const WatchedNode& watched : calls) watched.recorder->begin_compiled(watched.node, plan, tensors);
    return;
  }
  for (auto watched = calls.rbegin(); watched != calls.rend(); ++watched) {
    int64_t outer = CallRecorder::kNoCaller;
    for (const WatchedNode& candidate : callers)
      if (candidate.recorder == watched->recorder) outer = candidate.node;
    watched->recorder->record_compiled(watched->node, module_at(site), outer, plan, tensors);
  }
}

}  // namespace

// Ends the batch of an outermost call in compiled code. Returns false with an exception set if a callback raised.
bool CallRecorder::end_compiled(Thread& thread, bool completed) {
  for (size_t i = thread.nodes.size(); i > 0; --i) box::BlackBox::end(thread.slot, !completed);
  thread.nodes.clear();
  thread.call_ids.clear();
  thread.compiled = false;
  const bool done = end_batch(thread, completed);
  thread.compiled_inputs = py::object();
  return done;
}

void CallRecorder::begin_compiled(int64_t index, std::string_view plan, at::TensorList tensors) {
  Thread& thread = this_thread();
  if (thread.recording || index < 0 || index >= int64_t(nodes_.size())) return;
  // No operator reported the end of a call that an exception ended.
  if (thread.compiled && !end_compiled(thread, false) && PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (!thread.nodes.empty() || paused) return;
  // No tensor lives longer for being watched.
  py::dict inputs;
  size_t next = 0;
  each_planned(plan, [&](Role, char kind, const std::string& label, const std::string&) {
    if (kind != 't' || next == tensors.size()) return true;
    const py::object object = wrap(tensors[next++]);
    py::object weak;
    if (object) weak = py::reinterpret_steal<py::object>(PyWeakref_NewRef(object.ptr(), nullptr));
    if (weak) inputs[py::str(label.substr(6, label.size() - 7))] = weak;  // `input[0]` without `input[` and `]`
    if (!weak) PyErr_Clear();
    return true;
  });
  if (!begin_batch(thread, int32_t(index), nullptr, nullptr, nullptr)) throw py::error_already_set();
  thread.nodes.push_back(int32_t(index));
  box::BlackBox::begin(thread.slot, nodes_[size_t(index)]->box, thread.batch, thread.recomputed);
  thread.compiled = true;
  thread.compiled_inputs = std::move(inputs);
}

void CallRecorder::record_compiled(int64_t index, PyObject* module, int64_t caller, std::string_view plan,
                                   at::TensorList tensors) {
  Thread& thread = this_thread();
  if (thread.recording || index < 0 || index >= int64_t(nodes_.size())) return;
  // The graph was made for another watch, for which this call was no outermost one.
  if (thread.nodes.empty()) begin_compiled(caller == kNoCaller ? index : caller, {}, {});
  if (thread.nodes.empty()) return;
  const bool ends = thread.compiled && caller == kNoCaller;
  if (caller >= int64_t(nodes_.size())) caller = kNoCaller;
  if (ends) {
    thread.nodes.pop_back();
  } else if (caller == kNoCaller) {
    caller = thread.nodes.back();
  }
  ++observer_.counters.calls;
  Node& node = *nodes_[size_t(index)];
  if (ends) box::BlackBox::end(thread.slot, false);
  if (!ends) box::BlackBox::ended(thread.slot, node.box, thread.batch);
  note_class(node, module);
  bool done = !thread.active || paused || !node.observed || survived([&] {
    return record_frame(
        thread, int32_t(index), int32_t(caller), &node.compiled_call,
        [&](Node& observed, OpenFrame* frame) { return observer_.observe_compiled(observed, plan, tensors, frame); });
  });
  if (ends || (!done && thread.compiled)) done = end_compiled(thread, done);
  if (!done) throw py::error_already_set();
}

TORCH_LIBRARY_IMPL(nanwatch, CPU, m) {
  m.impl("record_", record_);
}

TORCH_LIBRARY_IMPL(nanwatch, CUDA, m) {
  m.impl("record_", record_);
}

TORCH_LIBRARY_IMPL(nanwatch, Conjugate, m) {
  m.impl("record_", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(nanwatch, Negative, m) {
  m.impl("record_", torch::CppFunction::makeFallthrough());
}

}  // namespace nanwatch
