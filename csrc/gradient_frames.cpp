// From what came in a backward to its frames: CallRecorder's part of the work. All of it under the interpreter lock.
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <unordered_map>

#include "call_recorder.h"
#include "gradient_log.h"
#include "stopwatch.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

const char* part_name(Part part) {
  return part == Part::output ? "output" : part == Part::input ? "input" : "weight";
}

// While Python objects are made, no garbage is collected.
class NoCollection {
 public:
  NoCollection() : was_on_(PyGC_Disable() != 0) {}
  NoCollection(const NoCollection&) = delete;
  NoCollection& operator=(const NoCollection&) = delete;
  ~NoCollection() {
    if (was_on_) PyGC_Enable();
  }

 private:
  bool was_on_;
};

// The calls of a backward, ordered by when each was done: when it and all calls made in it had their last gradient. So
// a parent comes after its children, as in the forward.
std::vector<const GradientCall*> calls_of(const Backward& backward) {
  std::unordered_map<const GradientCall*, size_t> done;
  std::vector<const GradientCall*> calls;
  for (size_t i = 0; i < backward.events.size(); ++i) {
    const GradientCall* const call = backward.events[i].user.call.get();
    if (!done.insert_or_assign(call, i).second) continue;
    calls.push_back(call);
  }
  const auto by_number = [](const GradientCall* a, const GradientCall* b) { return a->number < b->number; };
  std::sort(calls.begin(), calls.end(), by_number);
  std::unordered_map<int32_t, size_t> of_children;  // by the module that made them, until its own call is met
  for (const GradientCall* call : calls) {
    size_t& end = done[call];
    if (const auto children = of_children.find(call->node); children != of_children.end()) {
      end = std::max(end, children->second);
      of_children.erase(children);
    }
    size_t& siblings = of_children.try_emplace(call->caller, 0).first->second;
    siblings = std::max(siblings, end);
  }
  std::stable_sort(calls.begin(), calls.end(),
                   [&](const GradientCall* a, const GradientCall* b) { return done[a] < done[b]; });
  return calls;
}

void await(const std::vector<LatePtr>& rows) {
  if (rows.empty()) return;
  const RowTable& table = *RowTable::instance();
  table.wait(rows, table.mark(rows));
}

// A row that Python made, under the label of another user.
PyObject* relabelled(PyObject* row, const std::string& label) {
  return with_item(row, 0, py::str(label)).release().ptr();
}

}  // namespace

void CallRecorder::follow_gradients(const Thread& thread, std::vector<Tap> taps, int32_t index, int32_t caller,
                                    std::shared_ptr<const GradientCall>* keep) {
  if (gradient_log_ == nullptr || taps.empty()) return;
  GradientCall call;
  call.batch = thread.batch;
  call.node = index;
  call.caller = caller;
  call.recomputed = thread.recomputed;
  call.thread = &thread;
  call.held = thread.held;
  gradient_log_->follow(taps, call, observer_.labels(), keep);
}

// Makes its frames and tells of it, when its rows have come and what came before it was told.
bool CallRecorder::finish_backward(std::unique_ptr<Backward> backward) {
  if (!backward || paused) return true;
  std::vector<LatePtr> rows = backward->awaited();
  const GradientCall* const call = backward->events.empty() ? nullptr : backward->events.front().user.call.get();
  const bool has_to_wait =
      !rows.empty() || (call != nullptr && std::any_of(pending_.begin(), pending_.end(), [call](const auto& batch) {
                          return batch->thread == call->thread;
                        }));
  if (!has_to_wait) return tell_of(*backward, py::none());
  py::object left;
  if (!tell("on_backward_pending", py::make_tuple(), &left)) return false;
  auto batch = std::make_unique<PendingBatch>(PendingBatch{call->thread, call->batch, false, true, true, true, true});
  batch->await_rows(*RowTable::instance(), std::move(rows));
  batch->backward = std::move(backward);
  batch->left = std::move(left);
  pending_.push_back(std::move(batch));
  if (!awaits_backwards) return true;
  Thread& thread = this_thread();
  if (thread.recording) return true;
  const Recording recording(&thread);
  return look_at_batches(thread, true, true);
}

bool CallRecorder::tell_of(Backward& backward, const py::object& left) {
  const Stopwatch stopwatch(measures_time_, &observer_.counters.nanoseconds);
  observer_.counters.nanoseconds += std::exchange(backward.nanoseconds, 0);
  backward.take_late();
  if (gradient_log_ != nullptr) {
    const std::lock_guard<std::mutex> lock(gradient_log_->mutex);
    for (const Backward::LateTerm& one : backward.late_terms) gradient_log_->add_up(one.sum.get(), one.term);
  }
  observer_.counters.tensors += int64_t(backward.events.size());
  observer_.counters.tensors_read += backward.tensors_read;
  observer_.counters.bytes_read += backward.bytes_read;
  observer_.counters.cache_hits += int64_t(backward.events.size()) - backward.tensors_read;
  observer_.counters.stale_hits += backward.stale_hits;
  std::vector<const GradientCall*> calls = calls_of(backward);
  observer_.counters.frames += int64_t(calls.size());
  if (!backward.is_bad && traced_.empty() && calls.size() > ring_.capacity()) {
    const auto seen = calls.end() - int64_t(ring_.capacity());
    std::for_each(calls.begin(), seen, [this](const GradientCall* call) { ring_.skip(call->batch); });
    calls.erase(calls.begin(), seen);  // they would be overwritten at once
  }
  std::unordered_map<const GradientCall*, size_t> positions;
  for (const GradientCall* call : calls) positions.emplace(call, positions.size());
  std::vector<FrameData> frames(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    frames[i].batch = calls[i]->batch;
    frames[i].node = calls[i]->node;
    frames[i].recomputed = calls[i]->recomputed;
    frames[i].phase = Phase::backward;
  }
  py::list events;
  for (const GradientEvent& event : backward.events) {
    const auto found = positions.find(event.user.call.get());
    if (found == positions.end()) continue;
    FrameData& frame = frames[found->second];
    RowData row = event.row;
    if (row.python == nullptr || row.label == event.user.label) {
      Py_XINCREF(row.python);
    } else {
      row.python = relabelled(row.python, observer_.label_text(event.user.label));
    }
    row.label = event.user.label;
    if (event.late != nullptr) {
      row.late = int32_t(frame.late.rows.size());
      frame.late.rows.push_back(event.late);
    }
    row.shape_at = uint32_t(frame.shapes.size());
    if (row.python == nullptr) {
      const auto shape = backward.shapes.begin() + event.row.shape_at;
      frame.shapes.insert(frame.shapes.end(), shape, shape + row.dims);
    }
    frame.has_fault |= event.is_bad;
    if (backward.is_bad)
      events.append(py::make_tuple(found->second, frame.rows.size(), part_name(event.user.part), event.arrival));
    frame.rows.push_back(row);
  }
  for (const auto& [again, known] : backward.late_checks) {
    again->verifies = known;
    if (!frames.empty()) frames.front().late.rows.push_back(again);
  }
  const Node nobody;
  for (FrameData& frame : frames)
    if (!observer_.resolve(nobody, &frame)) return false;
  // Told before they are kept: the listener finds the frames that led here still in the ring.
  py::list told;
  bool done = true;
  for (size_t i = 0; i < frames.size() && done; ++i) {
    const bool traced = is_traced(frames[i].batch);
    if (!backward.is_bad && !traced) continue;
    const py::object seen = to_python(frames[i]);
    const py::object caller =
        calls[i]->caller < 0 ? py::object(py::none()) : py::object(py::str(nodes_[size_t(calls[i]->caller)]->name));
    told.append(py::make_tuple(seen, caller, calls[i]->number));
    done = !traced || tell("on_frame", py::make_tuple(seen));
  }
  if (done && backward.is_bad) done = tell("on_backward_end", py::make_tuple(told, events, left));
  for (FrameData& frame : frames) ring_.push(frame);
  return done;
}

bool CallRecorder::gradient_sums_may_overflow() const {
  return gradient_log_ != nullptr && gradient_log_->sums_may_overflow;
}

void CallRecorder::forget_gradient_sums() {
  if (gradient_log_ == nullptr) return;
  gradient_log_->sums_may_overflow = false;
  ++gradient_log_->sums_looked_at;
}

bool CallRecorder::tell_backward_started() {
  return tell("on_backward_start", py::make_tuple());
}

// Backwards that ended by an exception: what came until then.
bool CallRecorder::finish_broken_backwards() {
  const std::shared_ptr<GradientLog> log = gradient_log_;  // which goes where the listener stops the watch
  if (log == nullptr) return true;
  while (std::unique_ptr<Backward> backward = log->take_broken())
    if (!finish_backward(std::move(backward))) return false;
  return true;
}

bool CallRecorder::finish_bad_backward() {
  const std::shared_ptr<GradientLog> log = gradient_log_;
  if (log == nullptr) return true;
  await(log->awaited());
  const std::unique_ptr<Backward> backward = log->take_bad();
  return !backward || paused || tell_of(*backward, py::none());
}

void CallRecorder::add_frame(int64_t batch, int32_t node, const py::list& rows) {
  FrameData frame;
  frame.batch = batch;
  frame.node = node;
  frame.phase = Phase::step;
  for (const py::handle row : rows)
    frame.rows.push_back({0, Role::weight, Note::none, -1, 0, 0, kNotLate, {}, row.inc_ref().ptr()});
  ++observer_.counters.frames;
  ring_.push(frame);
}

void CallRecorder::excuse_gradients(const std::vector<int64_t>& batches, const std::string& note) {
  const NoCollection none;  // it may run code that calls a model, and that call moves the frames
  const py::str text(note);
  for (size_t i = 0; i < ring_.size(); ++i) {
    FrameData& frame = ring_.oldest(i);
    if (frame.phase != Phase::backward || std::find(batches.begin(), batches.end(), frame.batch) == batches.end())
      continue;
    frame.has_fault = false;
    for (RowData& row : frame.rows) {
      if (row.python == nullptr || PyTuple_GET_ITEM(row.python, 6) != Py_False) continue;
      Py_SETREF(row.python, with_item(row.python, 8, text).release().ptr());
    }
  }
}

void CallRecorder::forget_gradients(const std::vector<at::Tensor>& leaves) {
  if (gradient_log_ == nullptr) return;
  for (const at::Tensor& leaf : leaves) gradient_log_->release(leaf);
  gradient_log_->leave();
  gradient_log_.reset();
}

}  // namespace nanwatch
