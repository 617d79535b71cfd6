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
// `sequence` is declared as written, so that a compiler keeps the operators and their order. call_observer_compiled.cpp
// explains plans.
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "recorder/call_recorder.h"
#include "ops/readable.h"
#include "recorder/python_error.h"
#include "recorder/watched_call.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

// Adds the watched calls of the module at a site. False if a recorder in Python has one.
bool find_at(const at::Tensor& site, std::vector<WatchedNode>* nodes) {
  if (!site.is_cpu() || site.numel() == 0) return true;
  return find_watched(reinterpret_cast<PyObject*>(*site.const_data_ptr<int64_t>()), nodes);
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
    watched->recorder->record_compiled(watched->node, outer, plan, tensors);
  }
}

}  // namespace

// Ends the batch of an outermost call in compiled code whose end no operator reported. Returns false with an exception
// set if a callback raised.
bool CallRecorder::abandon(Thread& thread) {
  return end_compiled(thread, false) || PyErr_Occurred() == nullptr;
}

bool CallRecorder::end_compiled(Thread& thread, bool completed) {
  for (size_t i = thread.nodes.size(); i > 0 && box_.box() != nullptr; --i) box_.box()->end(thread.slot, !completed);
  thread.nodes.clear();
  thread.compiled = false;
  const bool done = end_batch(thread, completed);
  thread.given = py::object();
  return done;
}

void CallRecorder::begin_compiled(int64_t node, std::string_view text, at::TensorList tensors) {
  Thread& thread = this_thread();
  if (thread.recording || node < 0 || node >= int64_t(nodes_.size())) return;
  if (thread.compiled && !abandon(thread)) throw py::error_already_set();
  if (!thread.nodes.empty() || paused) return;
  // No tensor lives longer for being watched.
  py::dict given;
  const std::shared_ptr<Node::Plan> plan = observer_.plan_of(*nodes_[size_t(node)], text);
  size_t next = 0;
  for (const Node::Plan::Value& value : plan->values) {
    if (value.kind != 't' || next == tensors.size()) continue;
    const py::object object = wrap(tensors[next++]);
    py::object weak =
        object ? py::reinterpret_steal<py::object>(PyWeakref_NewRef(object.ptr(), nullptr)) : py::object();
    if (weak) {
      const std::string& label = observer_.labels().text(value.slot.label);
      given[py::str(label.substr(6, label.size() - 7))] = weak;  // `input[0]` without `input[` and `]`
    } else {
      PyErr_Clear();
    }
  }
  if (!begin_batch(thread, nullptr, nullptr, nullptr)) throw py::error_already_set();
  thread.nodes.push_back(int32_t(node));
  if (box_.box() != nullptr) box_.box()->begin(thread.slot, nodes_[size_t(node)]->box, thread.batch, thread.recomputed);
  thread.compiled = true;
  thread.given = std::move(given);
}

void CallRecorder::record_compiled(int64_t index, int64_t caller, std::string_view text, at::TensorList tensors) {
  Thread& thread = this_thread();
  if (thread.recording || index < 0 || index >= int64_t(nodes_.size())) return;
  // The graph was made for another watch, for which this call was no outermost one.
  if (thread.nodes.empty()) begin_compiled(caller == kNoCaller ? index : caller, {}, {});
  if (thread.nodes.empty()) return;
  const bool ends = thread.compiled && caller == kNoCaller;
  if (caller >= int64_t(nodes_.size())) caller = kNoCaller;
  if (ends) {
    thread.nodes.pop_back();
    if (box_.box() != nullptr) box_.box()->end(thread.slot, false);
  } else if (caller == kNoCaller) {
    caller = thread.nodes.back();
  }
  ++observer_.counters.calls;
  if (!ends && box_.box() != nullptr) box_.box()->ended(thread.slot, nodes_[size_t(index)]->box, thread.batch);
  Node& node = *nodes_[size_t(index)];
  const auto look = [&] {
    std::vector<GradientCandidate> candidates;
    const Recording recording(&thread);
    OpenFrame& frame = begin_frame(thread, int32_t(index), &candidates);
    const std::shared_ptr<Node::Plan> plan = observer_.plan_of(node, text);
    if (node.class_name != plan->class_name) {
      node.class_name = plan->class_name;
      node.box = box_.number_of(node.name, node.class_name);
      node.type = nullptr;
    }
    if (!observer_.observe_compiled(node, *plan, tensors, &frame)) return false;
    follow_gradients(thread, std::move(candidates), int32_t(index), int32_t(caller), &node.compiled_call);
    return finish(thread, int32_t(caller));
  };
  bool done = !thread.active || paused || !node.observed || survived(look);
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
