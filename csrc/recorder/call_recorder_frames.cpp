// The part of CallRecorder for what becomes of a frame: it is kept, reported, and made a Python object.
#include <algorithm>

#include "recorder/call_recorder.h"

namespace py = pybind11;

namespace nanwatch {

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
  std::optional<HeldError> first;  // of what was raised
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
    frame.add({0, Role::weight, NoteKind::none, -1, 0, 0, kNotPending, {}, record.inc_ref().ptr()});
  ++observer_.counters.frames;
  keep(frame);
}

void CallRecorder::keep(FrameData& frame) {
  if (frame.batch >= gathers_from) peaks_.add(frame, gathers_inputs);
  ring_.push(frame);
}

py::tuple CallRecorder::peaks_to_python(PeakMagnitudes& peaks) {
  // All taken before any Python object is made that the garbage collector knows: that may run code which calls a model.
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

}  // namespace nanwatch
