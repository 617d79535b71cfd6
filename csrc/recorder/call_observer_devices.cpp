// The part of CallObserver that asks devices for rows, and what becomes of a row when it has come.
#include <pybind11/pybind11.h>

#include "recorder/call_observer.h"
#include "device/graph_rows.h"
#include "recorder/cached_read.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

// Whether a range is that of an additive mask made with the dtype's minimum in place of -inf.
bool may_be_mask(const RowData& row, const RangeRow& range) {
  if (range.abs_min != 0.0 || (row.role != Role::input && row.role != Role::buffer)) return false;
  const std::optional<Format> format = format_of(static_cast<at::ScalarType>(row.dtype));
  return format.has_value() && range.abs_max == largest_finite(*format);
}

bool has_come(LateRow& row) {
  return row.arrive() && row.state == LateRow::State::arrived;
}

// -1 for what no device is asked for, as a tensor of a subclass.
int device_of(PyObject* object, const NanwatchBackend& backend) {
  return THPVariable_CheckExact(object) ? backend.device_of(&THPVariable_Unpack(object)) : -1;
}

// How a device is asked for it; nothing where it cannot be.
std::optional<Format> late_format(const at::Tensor& x) {
  const std::optional<Format> format = format_of(x.scalar_type());
  if (!format.has_value() || x.dim() > kNanwatchMaxDims || negation_changes_magnitude(x, *format) || !storage_covers(x))
    return std::nullopt;
  return format;
}

bool same(const RangeRow& a, const RangeRow& b) {
  return a.isfinite == b.isfinite && (!a.isfinite || (a.abs_min == b.abs_min && a.abs_max == b.abs_max));
}

}  // namespace

CallObserver::CallObserver(const Options& options, Helpers helpers) : options_(options), helpers_(std::move(helpers)) {
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
struct CallObserver::LateReader {
  CallObserver& self;
  const at::Tensor& x;
  Format format;
  int device;
  FrameData* frame;

  LatePtr read() {
    ++self.counters.tensors_read;
    self.counters.bytes_read += x.numel() * int64_t(word_size(format));
    return collect();
  }

  bool knows(const Reading& reading) const {
    return reading.late != nullptr && reading.late->serves(&frame->late, frame->late.graph());
  }

  LatePtr hit(const Reading& reading) {
    ++self.counters.cache_hits;
    if (self.options_.verify_hits && reading.late->graph == nullptr) {
      const LatePtr again = collect();
      again->verifies = reading.late;
      frame->late.rows.push_back(again);
    }
    return reading.late;
  }

  bool keeps(const LatePtr&) const { return true; }

 private:
  LatePtr collect() const { return frame->late.collect(x, format, device); }
};

// False for what is no plain tensor of a device, and where none can be read: then nothing was done.
bool CallObserver::late_tensor(PyObject* object, Labels::Id label, Role role, Memory memory, Node::Slot* slot,
                               FrameData* frame) {
  const NanwatchBackend* backend = RowTable::backend();
  if (devices_off_ || backend == nullptr) return false;
  const int device = device_of(object, *backend);
  if (device < 0) return false;
  const at::Tensor& x = THPVariable_Unpack(object);
  const std::optional<Format> format = late_format(x);
  if (!format.has_value()) return false;
  const LateFrame::Lane& lane = frame->late.lane_of(device, *backend);
  if (lane.error != 0) return false;
  if (lane.capture != 0) {
    if (frame->late.graph_of_batch == nullptr) return false;  // a part of a batch alone is captured
    if (frame->late.graph() == nullptr) *frame->late.graph_of_batch = table_->new_graph(device, lane.capture);
  }
  const GraphRows* const graph = frame->late.graph();
  if (lane.capture != (graph != nullptr ? graph->capture : 0)) return false;
  const LatePtr row =
      range_of<LatePtr>(object, frame->batch, memory, slot, LateReader{*this, x, *format, device, frame});
  const auto at = uint32_t(frame->shapes.size());
  frame->shapes.insert(frame->shapes.end(), x.sizes().begin(), x.sizes().end());
  frame->rows.push_back({label,
                         role,
                         Note::none,
                         int8_t(x.scalar_type()),
                         uint8_t(x.dim()),
                         at,
                         int32_t(frame->late.rows.size()),
                         {},
                         nullptr});
  frame->late.rows.push_back(row);
  return true;
}

// A row of its own for a tensor that belongs to no frame yet, sent at once; null where that cannot be, as in a capture.
LatePtr CallObserver::ask(const at::Tensor& x) {
  const NanwatchBackend* const backend = RowTable::backend();
  if (devices_off_ || backend == nullptr) return nullptr;
  const std::optional<Format> format = late_format(x);
  const int device = format.has_value() ? backend->device_of(&x) : -1;
  if (device < 0) return nullptr;
  LateFrame late;
  const LateFrame::Lane& lane = late.lane_of(device, *backend);
  if (lane.error != 0 || lane.capture != 0) return nullptr;
  const LatePtr row = late.collect(x, *format, device);
  if (const int error = RowTable::instance()->send(&late)) {
    devices_off_ = backend->cannot_run(error) != 0;
    return nullptr;
  }
  return row;
}

// The frame's rows were sent; where each call is looked at by itself, waits for them.
bool CallObserver::complete(const Node& node, FrameData* frame) {
  if (options_.check != Check::module || frame->late.graph() != nullptr) return true;
  table_->wait(frame->late.rows, table_->mark(frame->late.rows));
  return resolve(node, frame);
}

bool CallObserver::observe_given(PyObject* args, PyObject* kwargs, FrameData* frame) {
  const Node nobody;
  if (!input_rows(nobody, args, kwargs, frame)) return false;
  if (!frame->late.empty()) table_->send(&frame->late);  // a row that is not sent is lost, and says so
  return true;
}

// ---- when it has come -----------------------------------------------------------------------------------------------

bool CallObserver::resolve(const Node& node, FrameData* frame) {
  if (frame->late.empty()) return true;
  for (size_t i = 0; i < frame->rows.size(); ++i) {
    const int32_t late = std::exchange(frame->rows[i].late, kNotLate);
    if (late != kNotLate && !resolve_row(node, *frame->late.rows[size_t(late)], *frame, &frame->rows[i])) {
      frame->clear();
      return false;
    }
    frame->has_fault |= is_fault(frame->rows[i]);
  }
  for (const LatePtr& row : frame->late.rows)
    if (row->verifies != nullptr && has_come(*row) && has_come(*row->verifies))
      counters.stale_hits += !same(row->range, row->verifies->range);
  frame->late.clear();
  return true;
}

bool CallObserver::resolve_row(const Node& node, const LateRow& late, const FrameData& frame, RowData* row) {
  row->range = late.range;
  const bool is_here = late.state == LateRow::State::arrived;
  if (is_here && late.range.isfinite && !may_be_mask(*row, late.range)) return true;
  const OutsideCompiler outside;
  const py::tuple shape = shape_of(frame, *row);
  py::object values = py::none();
  if (is_here) {
    values = py::list();
    for (int i = 0; i < (late.examined ? int(kNanwatchRowValues) : kRangeColumns); ++i)
      py::cast<py::list>(values).append(late.values[i]);
  } else {
    values = py::str("its row did not come from the device (" + table_->words(late.error) + ")");
  }
  row->python =
      PyObject_CallFunction(helpers_.arrived.ptr(), "ssOsOO", labels_.text(row->label).c_str(), role_name(row->role),
                            shape.ptr(), dtype_name(*row).c_str(), values.ptr(), node.allow_inf.ptr());
  if (row->python != nullptr) return true;
  const std::optional<std::string> reason = excuse_error();
  if (reason.has_value()) row->python = unread_row(labels_.text(row->label), row->role, *reason);
  return reason.has_value();
}

}  // namespace nanwatch
