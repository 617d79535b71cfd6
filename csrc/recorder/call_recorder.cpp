#include "recorder/call_recorder.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>

#include "gradients/gradient_recorder.h"
#include "recorder/watched_call.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

uint64_t next_id = 1;

// The recorders there are, by their numbers. Like all here it is used under the interpreter lock.
std::unordered_set<uint64_t>& living() {
  static auto* const ids = new std::unordered_set<uint64_t>;
  return *ids;
}

// Returns whether the class is FSDP1's (a wrapper) or FSDP2's (put between a class and its module).
bool is_sharded(PyTypeObject* type) {
  PyObject* const bases = type->tp_mro;
  for (Py_ssize_t i = 0; bases != nullptr && i < PyTuple_GET_SIZE(bases); ++i) {
    const std::string_view name = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(bases, i))->tp_name;
    if (name == "FSDPModule" || name == "FullyShardedDataParallel") return true;
  }
  return false;
}

// A class's name. Not by its __name__: to ask for that may run Python code, of a metaclass.
std::string class_name_of(PyTypeObject* type) {
  const std::string_view name = type->tp_name;
  return std::string(PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) ? name : name.substr(name.rfind('.') + 1));
}

}  // namespace

// One thread's calls under way, for each recorder. A list: references to a Thread stay valid while others are added.
struct CallRecorder::Threads {
  std::list<Thread> all;
  Thread* latest = nullptr;

  // A thread ends without the interpreter lock, which a batch that it left open may need to be freed. The next thread
  // that a recorder meets does that.
  ~Threads() {
    const std::lock_guard<std::mutex> lock(ended_mutex);
    ended.splice(ended.end(), all);
  }
  static void free_ended() {
    std::list<Thread> freed;
    const std::lock_guard<std::mutex> lock(ended_mutex);
    freed.swap(ended);
  }

 private:
  static inline std::mutex& ended_mutex = *new std::mutex;  // never destroyed: threads end later
  static inline std::list<Thread>& ended = *new std::list<Thread>;
};

CallRecorder::CallRecorder(const Options& options, Helpers helpers, py::object events, py::object frame_type,
                           py::object start_type)
    : observer_(options, std::move(helpers)),
      events_(std::move(events)),
      frame_type_(std::move(frame_type)),
      start_type_(std::move(start_type)),
      ring_(options.max_frames),
      box_(options.black_box ? box::BlackBox::active() : nullptr),
      every_(options.every),
      traced_(options.traced),
      id_(next_id++) {
  std::sort(traced_.begin(), traced_.end());
  living().insert(id_);
}

CallRecorder::~CallRecorder() {
  if (gradients_ != nullptr) gradients_->leave();
  living().erase(id_);
}

// A module's class, which may change while it is watched: fully_shard() puts another one there.
void CallRecorder::note_class(Node& node, PyObject* module) {
  PyTypeObject* const type = Py_TYPE(module);
  if (type == node.type) return;
  node.type = type;
  node.class_name = observer_.labels().of_text(class_name_of(type));
  if (live_box() != nullptr) node.box = live_box()->number_of(node.name, class_name_of(type));
  gathers_weights |= is_sharded(type);
}

int32_t CallRecorder::add_node(const std::string& name, py::handle module, bool observed, py::object allow_inf) {
  auto node = std::make_unique<Node>();
  node->name = name;
  node->observed = observed;
  node->is_function = py::hasattr(py::type::of(module), "is_watched_function");
  node->allow_inf = std::move(allow_inf);
  note_class(*node, module.ptr());
  if (observed) observer_.prepare(*node, module.ptr());
  nodes_.push_back(std::move(node));
  peaks_.reserve_node();
  return int32_t(nodes_.size() - 1);
}

CallRecorder::Thread& CallRecorder::this_thread() {
  thread_local Threads threads;
  if (threads.latest != nullptr && threads.latest->recorder == id_) [[likely]]
    return *threads.latest;
  for (Thread& thread : threads.all)
    if (thread.recorder == id_) return *(threads.latest = &thread);
  Threads::free_ended();
  threads.all.remove_if([](const Thread& thread) { return living().count(thread.recorder) == 0; });
  threads.all.emplace_front(Thread{id_});
  return *(threads.latest = &threads.all.front());
}

bool CallRecorder::is_traced(int64_t batch) const {
  return !traced_.empty() && std::binary_search(traced_.begin(), traced_.end(), batch);
}

// Calls a callback of RecorderEvents. Returns false with the exception set if it raised: the module call raises it.
bool CallRecorder::notify(const char* method, py::args arguments, py::object* answer) {
  if (!events_) return true;  // collected
  const OutsideCompiler outside;
  const py::object bound = py::reinterpret_steal<py::object>(PyObject_GetAttrString(events_.ptr(), method));
  if (!bound) return false;
  auto returned = py::reinterpret_steal<py::object>(PyObject_CallObject(bound.ptr(), arguments.ptr()));
  if (!returned) return false;
  if (answer != nullptr) *answer = std::move(returned);
  return true;
}

// ---- batches --------------------------------------------------------------------------------------------------------

bool CallRecorder::begin_batch(Thread& thread, int32_t index, PyObject* module, PyObject* args, PyObject* kwargs) {
  if (gradients_ != nullptr && !gradients_->finish_broken_backwards()) return false;
  // Called from a backward: activation checkpointing runs the forward again. That is no new batch.
  thread.recomputed = torch::autograd::get_current_graph_task_id() != -1;
  if (!thread.recomputed) latest_batch_ = next_batch_++;
  if (!thread.recomputed && gathers_weights) observer_.forget_weights();
  thread.batch = latest_batch_;
  thread.active = thread.batch % every_ == 0;
  if (!thread.recomputed && !start_batch(thread, index, module, args, kwargs)) return false;
  thread.slot = live_box() != nullptr ? live_box()->slot() : nullptr;
  thread.args = args;
  thread.kwargs = kwargs;
  return true;
}

// Keeps the start of the batch, and asks Python for its part where that may have changed.
bool CallRecorder::start_batch(Thread& thread, int32_t index, PyObject* module, PyObject* args, PyObject* kwargs) {
  const bool keeps = keeps_starts && module != nullptr;
  // Also of a batch that is not recorded: its thread is inside the model.
  const bool is_asked =
      subscriptions->has(kBatchStart) || (thread.active && is_traced(thread.batch)) || signals.is_any_true();
  // The modules that have buffers are looked for anew in every batch whose number is a power of two.
  if (is_asked || (keeps && (!extra_ || (thread.batch & (thread.batch - 1)) == 0 || signals.has_buffer_changed()))) {
    const auto or_none = [](PyObject* object) { return py::handle(object != nullptr ? object : Py_None); };
    const py::object arguments = args != nullptr ? py::reinterpret_borrow<py::object>(args) : py::object(py::tuple());
    extra_ = py::object();
    py::object answer;
    if (!notify("on_batch_start",
                py::make_tuple(thread.batch, is_traced(thread.batch), or_none(module), arguments, or_none(kwargs)),
                &answer))
      return false;
    signals.note_buffers();
    extra_ = std::move(answer);
  }
  const py::object extra = extra_;
  if (is_asked) extra_ = py::object();  // it may be another in the next batch
  if (module == nullptr) return true;
  if (keeps) {
    if (!nodes_[size_t(index)]->is_function) release_starts();
    try {
      thread.start = BatchStart::shared(std::make_unique<BatchStart>(
          thread.batch, module, args, kwargs, signals.random_state(), signals.generator_states(), extra));
    } catch (const std::exception&) {
      PyErr_Clear();  // then the batch has no re-run
    }
  }
  thread.is_inside = true;
  ++num_inside_;
  return true;
}

// The forward of the batch is left. Its start is kept while a gradient of it can come.
void CallRecorder::leave_start(Thread& thread) {
  if (std::exchange(thread.is_inside, false)) --num_inside_;
  const std::shared_ptr<BatchStart> start = std::move(thread.start);
  if (start == nullptr) return;
  start->end();
  std::erase_if(ended_starts_, [](const std::weak_ptr<BatchStart>& ended) { return ended.expired(); });
  if (start.use_count() > 1 && start->has_graph()) ended_starts_.push_back(start);
}

// Drops all that the starts of ended batches keep, but their numbers: a later batch of the model has begun.
void CallRecorder::release_starts() {
  for (const std::weak_ptr<BatchStart>& ended : std::vector(ended_starts_))
    if (const std::shared_ptr<BatchStart> start = ended.lock()) start->release();
}

void CallRecorder::forget_starts() {
  release_starts();
  ended_starts_.clear();
  kept_start_ = nullptr;
  step_generator = keeps_starts ? signals.random_state() : at::Tensor();
}

py::object CallRecorder::start() {
  const std::shared_ptr<BatchStart> start = this_thread().start;
  return start == nullptr ? py::object(py::none()) : start->to_python(start_type_);
}

py::list CallRecorder::ended_starts() const {
  py::list starts;
  for (const std::weak_ptr<BatchStart>& ended : std::vector(ended_starts_))
    if (const std::shared_ptr<BatchStart> start = ended.lock()) starts.append(start->to_python(start_type_));
  return starts;
}

// Returns false with an exception set: the call's own if it has one, unless a callback raised another from it.
bool CallRecorder::end_batch(Thread& thread, bool completed) {
  HeldError error;                     // the call's
  const Recording recording(&thread);  // the callback may run the model once more
  bool done = thread.num_deferred == 0 || survived([&] { return take_deferred(thread); });
  thread.args = thread.kwargs = nullptr;
  observer_.end_batch();
  // Every batch that ends by an exception is reported. The callback may change the subscriptions.
  const auto tells_end = [&] {
    return !thread.recomputed && (subscriptions->has(kBatchEnd) || thread.batch >= gathers_from || !completed);
  };
  if (!done || tells_end()) {
    HeldError raised;  // by a callback
    const bool is_fine = completed && done;
    const auto tell_end = [&] { return notify("on_batch_end", py::make_tuple(thread.batch, is_fine)); };
    if (tells_end()) done &= (completed ? raised : error).shown_in([&] { return survived(tell_end); });
  }
  leave_start(thread);
  return completed && done;
}

// ---- calls ----------------------------------------------------------------------------------------------------------

PyObject* CallRecorder::run(int32_t index, PyObject* module, PyObject* inner, PyObject* args, PyObject* kwargs) {
  Thread& thread = this_thread();
  if (thread.compiled && !thread.recording && !end_compiled(thread, false) && PyErr_Occurred() != nullptr)
    return nullptr;
  const bool outermost = thread.nodes.empty();
  if (thread.recording || (outermost && paused)) return call_past_wrappers(inner, module, args, kwargs);
  if (outermost && !begin_batch(thread, index, module, args, kwargs)) return nullptr;
  thread.nodes.push_back(index);
  Node& node = *nodes_[size_t(index)];
  box::BlackBox::begin(thread.slot, node.box, thread.batch, thread.recomputed);
  ++observer_.counters.calls;
  py::object output = py::reinterpret_steal<py::object>(call_past_wrappers(inner, module, args, kwargs));
  thread.nodes.pop_back();
  box::BlackBox::end(thread.slot, !output);
  note_class(node, module);
  if (output && thread.active && !paused && node.observed) [[likely]] {
    const ModuleCall call{module, args, kwargs, output.ptr(), outermost};
    if (!survived([&] { return record(thread, index, call); })) output = py::object();
  } else if (!output) {
    thread.call_ids.erase(index);
  }
  // Recorded, or of a call that has raised: before the thread may end without the interpreter lock.
  while (!thread.added.empty() && thread.added.back().depth > thread.nodes.size()) thread.added.pop_back();
  if (outermost && !end_batch(thread, bool(output))) output = py::object();
  return output.release().ptr();
}

// Makes the thread's frame of a call by observe(node, &frame), and keeps and reports it: at the end of the batch, if
// this frame or one before it waits for a device.
template <typename Observe>
bool CallRecorder::record_frame(Thread& thread, int32_t index, int32_t caller, std::shared_ptr<const void>* keep,
                                const Observe& observe) {
  const Recording recording(&thread);
  OpenFrame& frame = thread.frame;
  Node& node = *nodes_[size_t(index)];
  frame.batch = thread.batch;
  frame.node = index;
  frame.class_name = node.class_name;
  frame.recomputed = thread.recomputed;
  const auto is_observed = [this](int32_t around) { return nodes_[size_t(around)]->observed; };  // DDP's call is not
  const bool is_outermost = keep == nullptr && std::none_of(thread.nodes.begin(), thread.nodes.end(), is_observed);
  if (gradients_ != nullptr && gradients_->follows(is_outermost)) frame.candidates = &thread.candidates;
  if (!observe(node, &frame)) return false;
  if (frame.candidates != nullptr && gradients_ != nullptr) follow(thread, index, caller, thread.candidates, keep);
  ++observer_.counters.frames;
  if (frame.pending.rows.empty() && thread.num_deferred == 0) [[likely]]
    return tell(thread, frame, caller, false);
  if (thread.num_deferred == thread.deferred.size()) thread.deferred.emplace_back();
  frame.caller = caller;
  thread.deferred[thread.num_deferred++].swap(frame);
  return true;
}

// Leaves hooks for the gradients of a call that has ended. The next call of the caller's node that ends on this thread
// is the caller.
void CallRecorder::follow(Thread& thread, int32_t index, int32_t caller,
                          const std::vector<GradientCandidate>& candidates, std::shared_ptr<const void>* keep) {
  const auto id_of = [&](int32_t node) {
    const auto [entry, is_new] = thread.call_ids.try_emplace(node, next_call_id_);
    next_call_id_ += is_new;
    return entry->second;
  };
  const int64_t id = id_of(index);
  thread.call_ids.erase(index);
  if (candidates.empty()) return;
  const int64_t caller_id = caller == kNoCaller ? -1 : id_of(caller);
  const Node& node = *nodes_[size_t(index)];
  gradients_->follow(candidates,
                     {thread.batch, id, caller_id, index, node.class_name, thread.recomputed, thread.start, node.box},
                     keep);
}

bool CallRecorder::record(Thread& thread, int32_t index, const ModuleCall& call) {
  size_t first = thread.added.size();
  while (first > 0 && thread.added[first - 1].depth > thread.nodes.size()) --first;
  const int32_t caller = thread.nodes.empty() ? int32_t(kNoCaller) : thread.nodes.back();
  return record_frame(thread, index, caller, nullptr, [&](Node& node, OpenFrame* frame) {
    frame->added = std::span(thread.added).subspan(first);
    return observer_.observe(node, call, frame);
  });
}

// ---- frames ---------------------------------------------------------------------------------------------------------

// Keeps a frame whose ranges are known, and reports it. `is_over`: its call and its batch have ended.
bool CallRecorder::tell(const Thread& thread, OpenFrame& frame, int32_t caller, bool is_over) {
  const bool has_nonfinite = frame.has_nonfinite;
  keep(frame);
  if (!has_nonfinite && !reports_frames(thread.batch)) return true;
  const FrameData copy(ring_.latest());
  const py::object frame_object = to_python(copy);
  if (reports_frames(thread.batch) && !notify("on_frame", py::make_tuple(frame_object))) return false;
  if (!has_nonfinite) return true;
  const py::object args =
      thread.args != nullptr ? py::reinterpret_borrow<py::object>(thread.args) : py::object(py::tuple());
  return notify("on_nonfinite", py::make_tuple(frame_object, name_of(caller), args, named_inputs_of(thread), is_over));
}

// Returns the named arguments of the outermost call; in compiled code all tensors that still live, by their places.
py::object CallRecorder::named_inputs_of(const Thread& thread) const {
  if (thread.kwargs != nullptr) return py::reinterpret_borrow<py::object>(thread.kwargs);
  if (!thread.compiled_inputs) return py::none();
  py::dict alive;
  for (const auto& [place, weak] : py::reinterpret_borrow<py::dict>(thread.compiled_inputs)) {
    PyObject* object = PyWeakref_GetObject(weak.ptr());
    if (object != nullptr && object != Py_None) alive[place] = py::handle(object);
  }
  return alive;
}

// Reports the frames that the batch has deferred. Each goes into the ring before the next, so that a report ends at the
// first non-finite one. Those whose records have come are reported while the device still works; then it waits, once
// for each stream. Returns false with an exception set if a callback raised.
bool CallRecorder::take_deferred(Thread& thread) {
  const size_t count = std::exchange(thread.num_deferred, 0);
  std::optional<HeldError> first;  // the first error that was raised
  for (size_t i = 0; i < count; ++i) {
    OpenFrame& frame = thread.deferred[i];
    RowTable::instance()->wait(frame.pending.rows);
    bool done = observer_.resolve(*nodes_[size_t(frame.node)], &frame);
    if (first) {
      keep(frame);
    } else {
      done = done && tell(thread, frame, frame.caller, true);
      if (!done) first.emplace();
    }
    if (first) PyErr_Clear();
    frame.clear();
  }
  return !first;
}

void CallRecorder::add_frame(int64_t batch, int32_t node, const py::list& records) {
  FrameData frame;
  static_cast<FrameHead&>(frame) = {batch, node, nodes_[size_t(node)]->class_name, false, Phase::step};
  for (const py::handle record : records)
    frame.add({.label = 0, .role = Role::weight, .python = record.inc_ref().ptr()});
  ++observer_.counters.frames;
  keep(frame);
}

void CallRecorder::keep(FrameData& frame) {
  if (frame.batch >= gathers_from) peaks_.add(frame, gathers_inputs);
  ring_.push(frame);
}

py::tuple CallRecorder::peaks_to_python(PeakMagnitudes& peaks) {
  // Take everything before a Python object is made: the garbage collector may then run code that calls a model.
  const std::vector<PeakMagnitudes::Key> keys = peaks.take_new();
  const std::string values(reinterpret_cast<const char*>(peaks.values().data()),
                           peaks.values().size() * sizeof(double));
  const int64_t batch = peaks.batch();
  peaks.clear();
  py::list names;
  for (const PeakMagnitudes::Key& key : keys)
    names.append(py::make_tuple(nodes_[size_t(key.node)]->name, observer_.labels().text(key.label),
                                dtype_name(static_cast<at::ScalarType>(key.dtype))));
  return py::make_tuple(batch, names, py::bytes(values));
}

py::object CallRecorder::to_python(const FrameData& frame) const {
  const Node& node = *nodes_[size_t(frame.node)];
  py::list records;
  for (const RecordData& record : frame.records) records.append(observer_.to_python(frame, record));
  return frame_type_(frame.batch, node.name, observer_.labels().text(frame.class_name), py::tuple(records),
                     kPhases[int(frame.phase)], frame.recomputed);
}

std::pair<int64_t, py::list> CallRecorder::frames_since(int64_t kept) const {
  const int64_t pushed = ring_.pushed();
  const size_t size = ring_.size();
  // Copied first: making Python objects may run other code, and that another call.
  const size_t count = std::min(size, size_t(std::max(int64_t(0), pushed - kept)));
  std::vector<FrameData> copies;
  copies.reserve(count);
  for (size_t i = size - count; i < size; ++i) copies.emplace_back(ring_.oldest(i));
  py::list frames;
  for (const FrameData& frame : copies) frames.append(to_python(frame));
  return {pushed, std::move(frames)};
}

void CallRecorder::settle() {
  if (gradients_ != nullptr && !gradients_->finish_broken_backwards()) throw py::error_already_set();
}

std::vector<std::string> CallRecorder::called() const {
  const auto was_read = [](const Node::Slot& slot) { return slot.cached != nullptr && slot.cached->turn != -1; };
  std::vector<std::string> names;
  for (const auto& node : nodes_)
    if (std::any_of(node->weights.begin(), node->weights.end(), was_read)) names.push_back(node->name);
  return names;
}

py::object CallRecorder::name_of(int32_t caller) const {
  return caller == kNoCaller ? py::object(py::none()) : py::object(py::str(nodes_[size_t(caller)]->name));
}

py::object CallRecorder::outermost() {
  const Thread& thread = this_thread();
  return thread.nodes.empty() ? py::object(py::none()) : name_of(thread.nodes.front());
}

py::object CallRecorder::call_under_way() {
  const Thread& thread = this_thread();
  if (thread.nodes.empty() || thread.recording || thread.compiled || !thread.active || paused) return py::none();
  const Node& node = *nodes_[size_t(thread.nodes.back())];
  return py::make_tuple(thread.batch, node.name, observer_.labels().text(node.class_name));
}

void CallRecorder::add_output(const std::string& label, py::object tensor) {
  Thread& thread = this_thread();
  size_t depth = thread.nodes.size();
  while (depth > 0 && !nodes_[size_t(thread.nodes[depth - 1])]->observed) --depth;
  if (depth > 0) thread.added.push_back({depth, observer_.labels().of_text(label), std::move(tensor)});
}

}  // namespace nanwatch
