// Calls of watched modules inside compiled code. There is no module call any more; what python/nanwatch/compiled.py put
// into the graph in its place are operators, and these find their recorder by its number:
//
//   begin_(sequence, watch, callee, tensors)                  before a call that no watched call of the graph made
//   record_(sequence, watch, callee, caller, plan, tensors)   after every call, with all the tensors of its frame
//
// and where those will be captured into a CUDA graph one that stays outside of it:
//   poll_(sequence, watch)                                    before the first call, at what the replays have left
//
// `sequence` is declared as written, so that a compiler keeps the operators and their order. The plan is a text made
// when the call was traced: the class, then a line for every value of the frame:
//   role (w b i o)  kind (t tensor, n None, x no tensor, u unread)  space  label  [tab  why it is not read]
#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "call_recorder.h"
#include "fallback.h"
#include "python_error.h"
#include "recall.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

// Used under the interpreter lock.
std::unordered_map<int64_t, CallRecorder*>& numbered() {
  static auto* const recorders = new std::unordered_map<int64_t, CallRecorder*>;
  return *recorders;
}

Role role_of(char letter) {
  switch (letter) {
    case 'w': return Role::weight;
    case 'b': return Role::buffer;
    case 'i': return Role::input;
    default: return Role::output;
  }
}

py::object wrap(const at::Tensor& x) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(x));
}

// Sets the compiler that follows the frames of this thread; what was set before, owned.
PyObject* set_compiler(PyObject* callback) {
  // Not a plain static: an import may let another thread in, which would wait for it with the interpreter lock held.
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> set;
  set.call_once_and_store_result(
      [] { return py::object(py::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame")); });
  return PyObject_CallOneArg(set.get_stored().ptr(), callback);
}

// Calls look(recorder) for the recorder of that number. False where there is none here: the watch has stopped, or its
// recorder is the Python one.
template <typename Look>
bool looked(const at::Tensor& sequence, int64_t watch, const Look& look) {
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
  if (!looked(sequence, watch, [&](CallRecorder* recorder) { recorder->begin_compiled(callee, tensors); }))
    call_reference<void(const at::Tensor&, int64_t, int64_t, at::TensorList)>("nanwatch::begin_", sequence, watch,
                                                                              callee, tensors);
}

void record_(const at::Tensor& sequence, int64_t watch, int64_t callee, int64_t caller, c10::string_view plan,
             at::TensorList tensors) {
  const auto look = [&](CallRecorder* recorder) { recorder->record_compiled(callee, caller, plan, tensors); };
  if (!looked(sequence, watch, look))
    call_reference<void(const at::Tensor&, int64_t, int64_t, int64_t, c10::string_view, at::TensorList)>(
        "nanwatch::record_", sequence, watch, callee, caller, plan, tensors);
}

void poll_(const at::Tensor& sequence, int64_t watch) {
  if (!looked(sequence, watch, [](CallRecorder* recorder) { recorder->poll(false); }))
    call_reference<void(const at::Tensor&, int64_t)>("nanwatch::poll_", sequence, watch);
}

}  // namespace

OutsideCompiler::OutsideCompiler() {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  before_ = set_compiler(Py_None);
  PyErr_Clear();
  PyErr_Restore(type, value, traceback);
}

OutsideCompiler::~OutsideCompiler() {
  if (before_ == nullptr) return;
  if (before_ != Py_None) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Py_XDECREF(set_compiler(before_));
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
  }
  Py_DECREF(before_);
}

// ---- CallObserver ---------------------------------------------------------------------------------------------------

std::shared_ptr<Node::Plan> CallObserver::plan_of(Node& node, std::string_view text) {
  for (const std::shared_ptr<Node::Plan>& known : node.plans)
    if (known->text == text) return known;
  // Shapes are no part of a plan: a module has one for each way it is called. Past any reason, the first one goes.
  if (node.plans.size() >= 64) node.plans.pop_front();
  const auto made = std::make_shared<Node::Plan>();
  node.plans.push_back(made);
  Node::Plan& plan = *made;
  plan.text = text;
  size_t end = text.find('\n');
  plan.class_name = text.substr(0, end);
  while (end != std::string_view::npos) {
    const size_t start = end + 1;
    end = text.find('\n', start);
    const std::string_view line = text.substr(start, end == std::string_view::npos ? end : end - start);
    if (line.size() < 3) continue;
    const size_t tab = line.find('\t');
    Node::Plan::Value value{{}, role_of(line[0]), line[1], ""};
    value.slot.label = labels_.of_text(std::string(line.substr(3, tab == std::string_view::npos ? tab : tab - 3)));
    if (tab != std::string_view::npos) value.reason = line.substr(tab + 1);
    plan.values.push_back(std::move(value));
  }
  return made;
}

bool CallObserver::compiled_rows(Node& node, Node::Plan& plan, at::TensorList tensors, FrameData* frame) {
  size_t next = 0;
  std::vector<const void*> own;
  for (Node::Plan::Value& value : plan.values) {
    const Labels::Id label = value.slot.label;
    if (value.kind != 't') {
      if (value.kind == 'u') {
        unread(label, value.role, value.reason, frame);
      } else {
        const Note note = value.kind == 'n' ? Note::is_none : Note::not_a_tensor;
        frame->rows.push_back({label, value.role, note, -1, 0, 0, kNotLate, {}, nullptr});
      }
      continue;
    }
    if (next == tensors.size()) return true;  // a plan of another call
    const at::Tensor& x = tensors[next++];
    if (value.role == Role::weight || value.role == Role::buffer) {
      const void* identity = x.unsafeGetTensorImpl();  // a tensor under two names counts once
      if (std::find(own.begin(), own.end(), identity) != own.end()) continue;
      own.push_back(identity);
    }
    const py::object object = wrap(x);
    if (!object) {
      PyErr_Clear();
      unread(label, value.role, "Python has no object for it", frame);
      continue;
    }
    // Compiled code gives the memory of one activation to the next and tells no version counter. So what is between
    // modules is read each time; a parameter is the user's own tensor, and is known again.
    const bool is_parameter =
        value.role == Role::weight && reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == ParameterClass;
    const Memory memory = is_parameter ? Memory::weight : Memory::none;
    if (!tensor(object.ptr(), label, value.role, node, memory, &value.slot, frame)) return false;
  }
  return true;
}

bool CallObserver::observe_compiled(Node& node, Node::Plan& plan, at::TensorList tensors, FrameData* frame) {
  return look(node, frame, [&] { return compiled_rows(node, plan, tensors, frame); });
}

// ---- CallRecorder ---------------------------------------------------------------------------------------------------

void CallRecorder::set_watch(int64_t watch) {
  const auto found = numbered().find(watch_);
  if (found != numbered().end() && found->second == this) numbered().erase(found);
  watch_ = watch;
  if (watch >= 0) numbered()[watch] = this;
}

// Ends the batch of an outermost call in compiled code whose end nothing told. False with an exception set if the
// listener raised.
bool CallRecorder::abandon(Thread& thread) {
  return end_compiled(thread, false) || PyErr_Occurred() == nullptr;
}

bool CallRecorder::end_compiled(Thread& thread, bool completed) {
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
  } else if (caller == kNoCaller) {
    caller = thread.nodes.back();
  }
  ++observer_.counters.calls;
  Node& node = *nodes_[size_t(index)];
  const auto look = [&] {
    std::vector<Tap> taps;
    const Recording recording(&thread);
    FrameData& frame = thread.frame;
    frame.batch = thread.batch;
    frame.node = int32_t(index);
    frame.recomputed = thread.recomputed;
    const std::shared_ptr<Node::Plan> plan = observer_.plan_of(node, text);
    if (node.class_name != plan->class_name) {
      node.class_name = plan->class_name;
      node.type = nullptr;
    }
    frame.late.graph_of_batch = thread.pending == nullptr ? &thread.graph : nullptr;
    if (gradient_log_ != nullptr) frame.taps = &taps;
    if (!observer_.observe_compiled(node, *plan, tensors, &frame)) return false;
    follow_gradients(thread, std::move(taps), int32_t(index), int32_t(caller), &node.compiled_call);
    return finish(thread, int32_t(caller));
  };
  bool done = !thread.active || paused || !node.observed || survived(look);
  if (ends || (!done && thread.compiled)) done = end_compiled(thread, done);
  if (!done) throw py::error_already_set();
}

TORCH_LIBRARY_IMPL(nanwatch, CPU, m) {
  m.impl("begin_", begin_);
  m.impl("record_", record_);
  m.impl("poll_", poll_);
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
