// The part of CallObserver that asks devices for rows, and what becomes of a row when it has come.
#include <pybind11/pybind11.h>

#include "recorder/call_observer.h"
#include "recorder/cached_read.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

// Returns whether a range is that of an additive mask made with the dtype's minimum in place of -inf.
bool may_be_mask(const RecordData& row, const RangeRow& range) {
  if (range.abs_min != 0.0 || (row.role != Role::input && row.role != Role::buffer)) return false;
  const std::optional<Format> format = format_of(static_cast<at::ScalarType>(row.dtype));
  return format.has_value() && range.abs_max == largest_finite(*format);
}

bool is_completed(PendingRow& row) {
  return row.poll() && row.state == PendingRow::State::completed;
}

// -1 for what no device is asked for, as a tensor of a subclass.
int device_of(PyObject* object, const NanwatchBackend& backend) {
  return THPVariable_CheckExact(object) ? backend.device_of(&THPVariable_Unpack(object)) : -1;
}

// How a device is asked for it; nothing where it cannot be.
std::optional<Format> device_format(const at::Tensor& x) {
  const std::optional<Format> format = format_of(x.scalar_type());
  if (!format.has_value() || x.is_neg() || !storage_covers(x)) return std::nullopt;
  return format;
}

bool same(const RangeRow& a, const RangeRow& b) {
  return a.isfinite == b.isfinite && (!a.isfinite || (a.abs_min == b.abs_min && a.abs_max == b.abs_max));
}

}  // namespace

CallObserver::CallObserver(const Options& options, Helpers helpers)
    : options_(options),
      may_be_pending_(options.may_be_pending()),
      has_turns_(options.sketches > 0),
      helpers_(std::move(helpers)) {
  const NanwatchBackend* backend = RowTable::backend();
  if (backend != nullptr && backend->takes_host_memory != 0) table_ = RowTable::instance();
}

bool CallObserver::meets_device(PyObject* object) {
  const NanwatchBackend* backend = RowTable::backend();
  if (backend == nullptr || devices_off_ || device_of(object, *backend) < 0) return false;
  table_ = RowTable::instance();
  return true;
}

// ---- asking for a row -----------------------------------------------------------------------------------------------

// The reader of cached_read.h for a tensor of a device.
struct CallObserver::DeviceReader {
  CallObserver& self;
  const at::Tensor& x;
  Format format;
  int device;
  OpenFrame* frame;
  bool is_urgent = false, is_refused = false;

  PendingRowPtr read() {
    ++self.counters.tensors_read;
    self.counters.bytes_read += bytes();
    return collect();
  }
  int64_t bytes() const { return std::min(x.numel() * int64_t(word_size(format)), int64_t(x.storage().nbytes())); }

  bool knows(const CacheEntry& entry) const { return entry.is_pending && entry.pending->serves(&frame->pending); }

  PendingRowPtr hit(const CacheEntry& entry) {
    ++self.counters.cache_hits;
    if (self.options_.verify_hits) {
      const PendingRowPtr again = collect();
      again->verifies = entry.pending;
      frame->pending.rows.push_back(again);
    }
    return entry.pending;
  }

  bool keeps(const PendingRowPtr&) const { return true; }

 private:
  PendingRowPtr collect() const { return frame->pending.collect(x, format, device); }
};

// False for what is no plain tensor of a device, and where none can be read: then nothing was done.
bool CallObserver::device_tensor(PyObject* object, Labels::Id label, Role role, Memory memory, Node::Slot* slot,
                                 OpenFrame* frame) {
  const NanwatchBackend* backend = RowTable::backend();
  if (devices_off_ || backend == nullptr) return false;
  const int device = device_of(object, *backend);
  if (device < 0) return false;
  const at::Tensor& x = THPVariable_Unpack(object);
  const std::optional<Format> format = device_format(x);
  if (!format.has_value()) return false;
  const PendingRows::StreamSlot& stream_slot = frame->pending.stream_slot_of(device, *backend);
  if (stream_slot.error != 0 || stream_slot.capturing != 0) return false;
  DeviceReader reader{*this, x, *format, device, frame};
  const PendingRowPtr row = range_of<PendingRowPtr>(object, frame->batch, memory, slot, reader);
  if (reader.is_refused) return not_read_yet(label, role, frame);
  const auto at = uint32_t(frame->shapes.size());
  frame->shapes.insert(frame->shapes.end(), x.sizes().begin(), x.sizes().end());
  frame->add({label,
              role,
              NoteKind::none,
              int8_t(x.scalar_type()),
              uint8_t(x.dim()),
              at,
              int32_t(frame->pending.rows.size()),
              {},
              nullptr});
  frame->pending.rows.push_back(row);
  return true;
}

// A row of its own for a tensor that belongs to no frame yet, sent at once; null where that cannot be, as in a capture.
PendingRowPtr CallObserver::enqueue_read(const at::Tensor& x) {
  const NanwatchBackend* const backend = RowTable::backend();
  if (devices_off_ || backend == nullptr) return nullptr;
  const std::optional<Format> format = device_format(x);
  const int device = format.has_value() ? backend->device_of(&x) : -1;
  if (device < 0) return nullptr;
  PendingRows pending;
  const PendingRows::StreamSlot& stream_slot = pending.stream_slot_of(device, *backend);
  if (stream_slot.error != 0 || stream_slot.capturing != 0) return nullptr;
  const PendingRowPtr row = pending.collect(x, *format, device);
  if (const int error = RowTable::instance()->send(&pending)) {
    devices_off_ = backend->cannot_run(error) != 0;
    return nullptr;
  }
  return row;
}

// Completes a frame whose rows are enqueued. With check="module" it waits for them.
bool CallObserver::complete(const Node& node, OpenFrame* frame) {
  if (!options_.waits_for_calls) return true;
  table_->wait(frame->pending.rows);
  return resolve(node, frame);
}

// ---- when it has come -----------------------------------------------------------------------------------------------

bool CallObserver::resolve(const Node& node, OpenFrame* frame) {
  if (frame->pending.empty()) return true;
  for (size_t i = 0; i < frame->records.size(); ++i) {
    const int32_t pending = std::exchange(frame->records[i].pending, kNotPending);
    if (pending != kNotPending &&
        !resolve_record(node, *frame->pending.rows[size_t(pending)], *frame, &frame->records[i])) {
      frame->clear();
      return false;
    }
    frame->has_objects |= frame->records[i].python != nullptr;
    frame->has_nonfinite |= is_nonfinite(frame->records[i]);
  }
  for (const PendingRowPtr& row : frame->pending.rows)
    if (row->verifies != nullptr && is_completed(*row) && is_completed(*row->verifies))
      counters.stale_hits += !same(row->range, row->verifies->range);
  frame->pending.clear();
  return true;
}

bool CallObserver::resolve_record(const Node& node, const PendingRow& pending, const OpenFrame& frame,
                                  RecordData* row) {
  row->range = pending.range;
  const bool is_here = pending.state == PendingRow::State::completed;
  if (is_here && pending.range.isfinite && !may_be_mask(*row, pending.range)) return true;
  const OutsideCompiler outside;
  const py::tuple shape = shape_of(frame, *row);
  py::object values = py::none();
  if (is_here) {
    values = py::list();
    for (int i = 0; i < (pending.examined ? kDeviceColumns : kRangeColumns); ++i)
      py::cast<py::list>(values).append(pending.values[i]);
  } else {
    values = py::str("its row did not come from the device (" + table_->words(pending.error) + ")");
  }
  row->python =
      PyObject_CallFunction(helpers_.completed.ptr(), "ssOsOO", labels_.text(row->label).c_str(), role_name(row->role),
                            shape.ptr(), dtype_name(*row).c_str(), values.ptr(), node.allow_inf.ptr());
  if (row->python != nullptr) return true;
  const std::optional<std::string> reason = excuse_error();
  if (reason.has_value()) row->python = unread_record(labels_.text(row->label), row->role, *reason);
  return reason.has_value();
}

}  // namespace nanwatch
