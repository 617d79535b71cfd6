// Calls of watched modules inside compiled code. There is no module call any more:
// python/nanwatch/instrumentation/compile/dynamo.py has put operators into the graph in its place. They find their
// recorder by its number:
//
//   begin_(sequence, watch, callee, tensors)                  before a call that no watched call of the graph made
//   record_(sequence, watch, callee, caller, plan, tensors)   after every call, with all the tensors of its frame
//
// `sequence` is declared as written, so that a compiler keeps the operators and their order. call_observer_compiled.cpp
// explains plans.
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "recorder/call_recorder.h"
#include "ops/fallback.h"
#include "recorder/python_error.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

// Used under the interpreter lock.
std::unordered_map<int64_t, CallRecorder*>& numbered() {
  static auto* const recorders = new std::unordered_map<int64_t, CallRecorder*>;
  return *recorders;
}

// Calls look(recorder) for the recorder of that number. False where there is none here: the watch has stopped, or its
// recorder is the Python one.
template <typename Look>
bool with_recorder(const at::Tensor& sequence, int64_t watch, const Look& look) {
  const py::gil_scoped_acquire lock;
  const auto found = numbered().find(watch);
  if (found == numbered().end()) return false;
  CallRecorder* const recorder = found->second;
  const py::object keep = py::cast(recorder, py::return_value_policy::reference);
  if (sequence.is_cpu() && sequence.numel() > 0) ++*sequence.mutable_data_ptr<int64_t>();
  look(recorder);
  return true;
}

void begin_(const at::Tensor& sequence, int64_t watch, int64_t callee, at::TensorList tensors) {
  if (!with_recorder(sequence, watch, [&](CallRecorder* recorder) { recorder->begin_compiled(callee, tensors); }))
    call_reference<void(const at::Tensor&, int64_t, int64_t, at::TensorList)>("nanwatch::begin_", sequence, watch,
                                                                              callee, tensors);
}

void record_(const at::Tensor& sequence, int64_t watch, int64_t callee, int64_t caller, c10::string_view plan,
             at::TensorList tensors) {
  const auto look = [&](CallRecorder* recorder) { recorder->record_compiled(callee, caller, plan, tensors); };
  if (!with_recorder(sequence, watch, look))
    call_reference<void(const at::Tensor&, int64_t, int64_t, int64_t, c10::string_view, at::TensorList)>(
        "nanwatch::record_", sequence, watch, callee, caller, plan, tensors);
}

}  // namespace

void CallRecorder::set_watch(int64_t watch) {
  const auto found = numbered().find(watch_);
  if (found != numbered().end() && found->second == this) numbered().erase(found);
  watch_ = watch;
  if (watch >= 0) numbered()[watch] = this;
}

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

void CallRecorder::begin_compiled(int64_t node, at::TensorList tensors) {
  Thread& thread = this_thread();
  if (thread.recording || node < 0 || node >= int64_t(nodes_.size())) return;
  if (thread.compiled && !abandon(thread)) throw py::error_already_set();
  if (!thread.nodes.empty() || paused) return;
  // No tensor lives longer for being watched.
  py::list given;
  for (const at::Tensor& x : tensors) {
    const py::object object = wrap(x);
    py::object weak =
        object ? py::reinterpret_steal<py::object>(PyWeakref_NewRef(object.ptr(), nullptr)) : py::object();
    if (weak) {
      given.append(weak);
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
  if (thread.recording || thread.nodes.empty() || index < 0 || index >= int64_t(nodes_.size())) return;
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
    FrameData& frame = begin_frame(thread, int32_t(index), &candidates);
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
  m.impl("begin_", begin_);
  m.impl("record_", record_);
}

TORCH_LIBRARY_IMPL(nanwatch, CUDA, m) {
  m.impl("begin_", begin_);
  m.impl("record_", record_);
}

TORCH_LIBRARY_IMPL(nanwatch, Conjugate, m) {
  m.impl("begin_", torch::CppFunction::makeFallthrough());
  m.impl("record_", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(nanwatch, Negative, m) {
  m.impl("begin_", torch::CppFunction::makeFallthrough());
  m.impl("record_", torch::CppFunction::makeFallthrough());
}

}  // namespace nanwatch
