#include "gradients/gradient_recorder.h"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <unordered_map>

#include "recorder/stopwatch.h"

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

void await(const std::vector<PendingRowPtr>& rows) {
  if (!rows.empty()) RowTable::instance()->wait(rows);
}

// A row that Python made, under the label of another user.
PyObject* relabelled(PyObject* row, const std::string& label) {
  return with_item(row, row_item::label, py::str(label)).release().ptr();
}

}  // namespace

GradientRecorder::GradientRecorder(CallRecorder* recorder, const Options& options)
    : recorder_(*recorder),
      log_(std::make_shared<GradientLog>(this, recorder->subscriptions, recorder->observer().observe_helper(),
                                         options)) {}

GradientRecorder::~GradientRecorder() {
  if (log_) log_->leave();
}

void GradientRecorder::follow(const std::vector<GradientCandidate>& candidates, const CallOrigin& call,
                              std::shared_ptr<const void>* keep) {
  if (log_ != nullptr) log_->follow(candidates, call, recorder_.observer().labels(), keep);
}

py::object GradientRecorder::self() {
  return py::cast(&recorder_, py::return_value_policy::reference);
}

bool GradientRecorder::backward_started() {
  return recorder_.notify("on_backward_start", py::make_tuple());
}

bool GradientRecorder::backward_ended(std::unique_ptr<Backward> backward) {
  if (!backward || recorder_.paused) return true;
  await(backward->pending_rows());
  return report(*backward);
}

bool GradientRecorder::report(Backward& backward) {
  CallObserver& observer = recorder_.observer();
  FrameRing& ring = recorder_.ring();
  const Stopwatch stopwatch(recorder_.subscriptions->has(kOwnTime), &observer.counters.nanoseconds);
  observer.counters.nanoseconds += std::exchange(backward.nanoseconds, 0);
  backward.take_completed();
  if (recorder_.gathers_gradient_peaks)
    for (const GradientEvent& one : backward.events)
      recorder_.add_gradient_peak(one.user.call->batch, one.user.call->node, one.user.label, one.row);
  observer.counters.tensors += int64_t(backward.events.size());
  observer.counters.tensors_read += backward.tensors_read;
  observer.counters.bytes_read += backward.bytes_read;
  observer.counters.cache_hits += int64_t(backward.events.size()) - backward.tensors_read;
  observer.counters.stale_hits += backward.stale_hits;
  std::vector<const GradientCall*> calls = calls_of(backward);
  observer.counters.frames += int64_t(calls.size());
  if (!backward.has_nonfinite && !recorder_.traces() && calls.size() > ring.capacity()) {
    const auto seen = calls.end() - int64_t(ring.capacity());
    std::for_each(calls.begin(), seen, [&ring](const GradientCall* call) { ring.skip(call->batch); });
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
      row.python = relabelled(row.python, observer.label_text(event.user.label));
    }
    row.label = event.user.label;
    if (event.pending != nullptr) {
      row.pending = int32_t(frame.pending.rows.size());
      frame.pending.rows.push_back(event.pending);
    }
    row.shape_at = uint32_t(frame.shapes.size());
    if (row.python == nullptr) {
      const auto shape = backward.shapes.begin() + event.row.shape_at;
      frame.shapes.insert(frame.shapes.end(), shape, shape + row.dims);
    }
    frame.has_nonfinite |= event.has_nonfinite;
    if (backward.has_nonfinite)
      events.append(py::make_tuple(found->second, frame.rows.size(), part_name(event.user.part), event.arrival));
    frame.rows.push_back(row);
  }
  for (const auto& [again, known] : backward.pending_checks) {
    again->verifies = known;
    if (!frames.empty()) frames.front().pending.rows.push_back(again);
  }
  const Node nobody;
  for (FrameData& frame : frames)
    if (!observer.resolve(nobody, &frame)) return false;
  // Reported before the frames are kept: the callback finds the frames that led here still in the ring.
  py::list reported;
  bool done = true;
  for (size_t i = 0; i < frames.size() && done; ++i) {
    const bool traced = recorder_.is_traced(frames[i].batch);
    if (!backward.has_nonfinite && !traced) continue;
    const py::object seen = recorder_.to_python(frames[i]);
    reported.append(py::make_tuple(seen, recorder_.name_of(calls[i]->caller), calls[i]->number));
    done = !traced || recorder_.notify("on_frame", py::make_tuple(seen));
  }
  if (done && backward.has_nonfinite) done = recorder_.notify("on_backward_end", py::make_tuple(reported, events));
  for (FrameData& frame : frames) recorder_.push(frame);
  return done;
}

bool GradientRecorder::finish_broken_backwards() {
  const std::shared_ptr<GradientLog> log = log_;  // a callback may stop the watch, which resets log_
  if (log == nullptr) return true;
  while (std::unique_ptr<Backward> backward = log->take_broken())
    if (!backward_ended(std::move(backward))) return false;
  return true;
}

bool GradientRecorder::finish_nonfinite_backward() {
  const std::shared_ptr<GradientLog> log = log_;
  if (log == nullptr) return true;
  await(log->pending_rows());
  const std::unique_ptr<Backward> backward = log->take_nonfinite();
  return !backward || recorder_.paused || report(*backward);
}

void GradientRecorder::excuse(const std::vector<int64_t>& batches, const py::object& note) {
  const NoCollection none;  // it may run code that calls a model, and that call moves the frames
  for (size_t i = 0; i < recorder_.ring().size(); ++i) {
    FrameData& frame = recorder_.ring().oldest(i);
    if (frame.phase != Phase::backward || std::find(batches.begin(), batches.end(), frame.batch) == batches.end())
      continue;
    frame.has_nonfinite = false;
    for (RowData& row : frame.rows) {
      if (row.python == nullptr || PyTuple_GET_ITEM(row.python, row_item::isfinite) != Py_False) continue;
      Py_SETREF(row.python, with_item(row.python, row_item::note, note).release().ptr());
    }
  }
}

void GradientRecorder::stop(const std::vector<at::Tensor>& leaves) {
  if (log_ == nullptr) return;
  for (const at::Tensor& leaf : leaves) log_->release(leaf);
  log_->leave();
  log_.reset();
}

}  // namespace nanwatch
