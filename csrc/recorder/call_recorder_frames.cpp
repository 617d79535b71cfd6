// The part of CallRecorder for what becomes of a frame: it is kept, reported, and made a Python object.
#include <algorithm>

#include "recorder/call_recorder.h"
#include "recorder/python_error.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

// As NOT_READ_YET of python/nanwatch/records/note.py.
constexpr const char* kNotReadYet = "not read yet";

}  // namespace

// Keeps the frame that was made and reports it; at the end of the batch, if this one or one before it waits for a
// device.
bool CallRecorder::finish(Thread& thread, int32_t caller) {
  OpenFrame& frame = thread.frame;
  ++observer_.counters.frames;
  if (frame.pending.empty() && thread.deferred.empty()) return tell(thread, caller, false);
  if (box_.box() != nullptr) box_.add(frame, nodes_[size_t(frame.node)]->box, observer_.labels());
  thread.deferred.emplace_back().frame.swap(frame);
  thread.deferred.back().caller = caller;
  return true;
}

// Keeps the thread's frame, whose ranges are known, and reports it. `is_over`: its call and its batch have ended.
bool CallRecorder::tell(Thread& thread, int32_t caller, bool is_over) {
  FrameData& frame = thread.frame;
  const bool has_nonfinite = frame.has_nonfinite;
  keep(frame);
  if (!has_nonfinite && !reports_frames(thread.batch)) return true;
  FrameData copy;
  copy.copy(ring_.latest());
  const py::object seen = to_python(copy);
  if (reports_frames(thread.batch) && !notify("on_frame", py::make_tuple(seen))) return false;
  if (!has_nonfinite) return true;
  return notify("on_nonfinite",
                py::make_tuple(seen, name_of(caller), given_to(thread), named_given_to(thread), is_over));
}

// Waits for the records of the frames that the batch has deferred, once for each stream, and reports the frames. Each
// goes into the ring before the next, so that a report ends at the first non-finite one. Returns false with an
// exception set if a callback raised.
bool CallRecorder::take_deferred(Thread& thread) {
  std::deque<CallFrame> deferred = std::exchange(thread.deferred, {});
  std::vector<PendingRowPtr> rows;
  for (const CallFrame& entry : deferred)
    rows.insert(rows.end(), entry.frame.pending.rows.begin(), entry.frame.pending.rows.end());
  RowTable::instance()->wait(rows);
  unconfirmed_.clear();
  for (const CallFrame& entry : deferred)
    for (const PendingRowPtr& row : entry.frame.pending.rows)
      if (row->state != PendingRow::State::completed) {
        unconfirmed_.emplace_back(entry.frame.batch, entry.frame.node);
        break;
      }
  std::optional<HeldError> first;  // of what was raised
  for (CallFrame& entry : deferred) {
    bool done = observer_.resolve(*nodes_[size_t(entry.frame.node)], &entry.frame);
    thread.frame.swap(entry.frame);
    if (first) {
      keep(thread.frame);
    } else {
      done = done && tell(thread, entry.caller, true);
      if (!done) first.emplace();
    }
    if (first) PyErr_Clear();
    thread.frame.clear();
  }
  return !first;
}

void CallRecorder::add_frame(int64_t batch, int32_t node, const py::list& records) {
  FrameData frame;
  frame.batch = batch;
  frame.node = node;
  frame.phase = Phase::step;
  for (const py::handle record : records)
    frame.add({0, Role::weight, NoteKind::none, -1, 0, 0, kNotPending, {}, record.inc_ref().ptr()});
  ++observer_.counters.frames;
  push(frame);
}

// A frame whose ranges are known goes into the ring.
void CallRecorder::keep(FrameData& frame) {
  if (box_.box() != nullptr) box_.add(frame, nodes_[size_t(frame.node)]->box, observer_.labels());
  if (frame.batch >= gathers_from) peaks_.add(frame, observer_.labels(), gathers_inputs);
  ring_.push(frame);
}

py::tuple CallRecorder::taken(PeakMagnitudes& peaks) {
  // All taken before any Python object is made that the garbage collector knows: that may run code which calls a model.
  const std::vector<PeakMagnitudes::Key> keys = peaks.take_new();
  const std::vector<double>& values = peaks.values();
  const py::bytes found(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double));
  const int64_t batch = peaks.batch();
  peaks.clear();
  py::list names;
  for (const PeakMagnitudes::Key& key : keys)
    names.append(py::make_tuple(nodes_[size_t(key.node)]->name, observer_.label_text(key.label),
                                dtype_name(static_cast<at::ScalarType>(key.dtype))));
  return py::make_tuple(batch, names, found);
}

py::object CallRecorder::to_python(const FrameData& frame) const {
  const Node& node = *nodes_[size_t(frame.node)];
  py::list records;
  for (const RecordData& record : frame.records) {
    if (record.python != nullptr) {
      records.append(py::handle(record.python));
      continue;
    }
    const std::string label = observer_.label_text(record.label);  // a copy: new objects may run code that adds labels
    RecordItems items = items_without_range(label, record.role);
    if (record.note == NoteKind::none) {
      items[record_item::shape] = shape_of(frame, record);
      items[record_item::dtype] = py::str(dtype_name(record));
      items[record_item::abs_min] = py::float_(record.range.abs_min);
      items[record_item::abs_max] = py::float_(record.range.abs_max);
      items[record_item::isfinite] = py::bool_(record.range.isfinite);
    } else {
      items[record_item::note] = make_note(record.note, record.note == NoteKind::not_checked ? kNotReadYet : "");
    }
    records.append(make_record(std::move(items)));
  }
  return frame_type_(frame.batch, node.name, node.class_name, py::tuple(records), kPhases[int(frame.phase)],
                     frame.recomputed);
}

std::optional<int64_t> CallRecorder::frames_of_batch(int64_t batch) const {
  const int64_t count = ring_.counts().of(batch);
  return count == BatchCounts::kForgotten ? std::nullopt : std::optional<int64_t>(count);
}

std::pair<int64_t, py::list> CallRecorder::frames_since(int64_t kept) const {
  const int64_t pushed = ring_.pushed();
  const size_t held = ring_.size();
  // Copied first: making Python objects may run other code, and that another call.
  std::vector<FrameData> copies(std::min(held, size_t(std::max(int64_t(0), pushed - kept))));
  for (size_t i = 0; i < copies.size(); ++i) copies[i].copy(ring_.oldest(held - copies.size() + i));
  py::list found;
  for (const FrameData& frame : copies) found.append(to_python(frame));
  return {pushed, std::move(found)};
}

py::list CallRecorder::frames() const {
  return frames_since(0).second;
}

py::list CallRecorder::unconfirmed_calls() const {
  py::list found;
  for (const auto& [batch, node] : std::vector(unconfirmed_))  // a copy: new objects may run code that calls a model
    found.append(py::make_tuple(batch, nodes_[size_t(node)]->name, nodes_[size_t(node)]->class_name));
  return found;
}

}  // namespace nanwatch
