// The frames that are made of what came in a backward.
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <unordered_map>

#include "gradients/gradient_recorder.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

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
  std::unordered_map<int64_t, size_t> of_children;  // by the call that made them, until it is met
  for (const GradientCall* call : calls) {
    size_t& end = done[call];
    if (const auto children = of_children.find(call->id); children != of_children.end()) {
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

}  // namespace

void Backward::add(const std::vector<GradientUser>& users, const GradientPlace& place, const GradientEvent& event) {
  arrivals += !(place == latest_);
  latest_ = place;
  has_nonfinite |= event.has_nonfinite;
  for (const GradientUser& user : users) {
    if (user.part == Part::output) user.call->task = task;
    events.push_back({user, arrivals, event.has_nonfinite, event.row, event.pending});
  }
}

void Backward::add_read(const std::vector<GradientUser>& users, const at::Tensor& gradient, const GradientPlace& place,
                        GradientEvent read) {
  ++tensors_read;
  read.row.shape_at = uint32_t(shapes.size());
  if (read.row.python != nullptr) {
    python_rows.push_back(pybind11::reinterpret_steal<pybind11::object>(read.row.python));
  } else {
    shapes.insert(shapes.end(), gradient.sizes().begin(), gradient.sizes().end());
  }
  add(users, place, read);
}

std::vector<PendingRowPtr> Backward::pending_rows() const {
  std::vector<PendingRowPtr> rows;
  for (const GradientEvent& event : events)
    if (event.pending != nullptr && !event.pending->poll()) rows.push_back(event.pending);
  return rows;
}

void Backward::take_completed() {
  for (GradientEvent& event : events) {
    if (event.pending == nullptr || event.pending->state != PendingRow::State::completed) continue;
    event.row.range = event.pending->range;
    event.has_nonfinite = !event.row.range.isfinite;
    has_nonfinite |= event.has_nonfinite;
  }
}

// Makes the frames of a backward and calls `on_backward_end`, which may stop the watch.
bool GradientRecorder::report(CallRecorder& recorder, Backward& backward) {
  CallObserver& observer = recorder.observer();
  FrameRing& ring = recorder.ring();
  const Stopwatch stopwatch(*subscriptions);
  backward.take_completed();
  observer.counters.tensors += int64_t(backward.events.size());
  observer.counters.tensors_read += backward.tensors_read;
  observer.counters.bytes_read += backward.bytes_read;
  observer.counters.cache_hits += int64_t(backward.events.size()) - backward.tensors_read;
  std::vector<const GradientCall*> calls = calls_of(backward);
  observer.counters.frames += int64_t(calls.size());
  if (!backward.has_nonfinite && !recorder.traces() && calls.size() > ring.capacity()) {
    const auto first_kept = calls.end() - int64_t(ring.capacity());
    std::for_each(calls.begin(), first_kept, [&ring](const GradientCall* call) { ring.skip(call->batch); });
    calls.erase(calls.begin(), first_kept);  // they would be overwritten at once
  }
  std::unordered_map<int64_t, size_t> positions;  // by the id of the call
  for (const GradientCall* call : calls) positions.emplace(call->id, positions.size());
  std::vector<OpenFrame> frames(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    const GradientCall& call = *calls[i];
    static_cast<FrameHead&>(frames[i]) = {call.batch, call.node, call.class_name, call.recomputed, Phase::backward};
  }
  py::list events;
  for (const GradientEvent& event : backward.events) {
    RecordData row = event.row;
    row.label = event.user.label;
    if (recorder.gathers_gradient_peaks) recorder.add_gradient_peak(event.user.call->batch, event.user.call->node, row);
    const auto position = positions.find(event.user.call->id);
    if (position == positions.end()) continue;
    OpenFrame& frame = frames[position->second];
    if (row.python != nullptr) {
      const py::str label(observer.labels().text(row.label));
      row.python = with_item(row.python, record_item::label, label).release().ptr();
    }
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
      events.append(
          py::make_tuple(position->second, frame.records.size(), kParts[int(event.user.part)], event.arrival));
    frame.add(row);
  }
  const Node nobody;
  for (OpenFrame& frame : frames)
    if (!observer.resolve(nobody, &frame)) return false;
  // Reported before the frames are kept: the callback finds the frames that led here still in the ring.
  py::list reported;
  bool done = true;
  for (size_t i = 0; i < frames.size() && done; ++i) {
    const bool traced = recorder.is_traced(frames[i].batch);
    if (!backward.has_nonfinite && !traced) continue;
    const py::object frame_object = recorder.to_python(frames[i]);
    const auto caller = positions.find(calls[i]->caller);
    reported.append(py::make_tuple(
        frame_object, caller == positions.end() ? py::object(py::none()) : py::int_(caller->second), calls[i]->number));
    done = !traced || recorder.notify("on_frame", py::make_tuple(frame_object));
  }
  if (done && backward.has_nonfinite) done = recorder.notify("on_backward_end", py::make_tuple(reported, events));
  for (OpenFrame& frame : frames) recorder.keep(frame);
  return done;
}

void GradientRecorder::excuse(FrameRing& ring, const std::vector<int64_t>& batches, const py::object& note) {
  const bool collects = PyGC_Disable() != 0;  // it may run code that calls a model, and that call moves the frames
  for (size_t i = 0; i < ring.size(); ++i) {
    FrameData& frame = ring.oldest(i);
    if (frame.phase != Phase::backward || std::find(batches.begin(), batches.end(), frame.batch) == batches.end())
      continue;
    frame.has_nonfinite = false;
    for (RecordData& row : frame.records) {
      if (row.python == nullptr || PyTuple_GET_ITEM(row.python, record_item::isfinite) != Py_False) continue;
      Py_SETREF(row.python, with_item(row.python, record_item::note, note).release().ptr());
    }
  }
  if (collects) PyGC_Enable();
}

}  // namespace nanwatch
