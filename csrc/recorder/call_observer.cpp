// The part of CallObserver that reads tensors, or asks a device to, and fills frames.
#include <pybind11/stl.h>

#include "recorder/call_observer.h"

namespace py = pybind11;

namespace nanwatch {
namespace {

// The record of a tensor says this where the budget of a batch had no room for it.
constexpr const char* kNotReadYet = "not read yet";
// A weight that nothing has changed since is read again after so many batches.
constexpr uint32_t kAge = 64;

// Returns whether a tensor may be an additive mask made with the dtype's minimum in place of -inf, which Python
// recognises. 8-bit tensors do not count: saturation fills finite ones with the largest number.
bool may_be_mask(const RangeRow& range, Role role, Format format) {
  return range.abs_min == 0.0 && (role == Role::input || role == Role::buffer) && word_size(format) > 1 &&
         range.abs_max == largest_finite(format);
}

}  // namespace

CallObserver::CallObserver(const Options& options, Helpers helpers)
    : options_(options),
      python_makes_some_(options.counts || options.fingerprints || options.sketches > 0),
      helpers_(std::move(helpers)) {
  const NanwatchBackend* const backend = RowTable::backend();
  devices_first_ = backend != nullptr && backend->takes_host_memory != 0;
}

CallObserver::~CallObserver() {
  for (const auto& entry : kinds_) Py_DECREF(reinterpret_cast<PyObject*>(entry.first));
}

// ---- what has to be read --------------------------------------------------------------------------------------------

// Fills in how a tensor is read; false where only Python reads it.
bool CallObserver::is_readable(Source* source, Role role) {
  if (python_makes_some_ && options_.is_made_by_python(role, source->batch)) return false;
  if (devices_first_ && find_device(source)) [[unlikely]]
    return true;
  if (plain_view(source->object, &source->view)) [[likely]]
    return source->view.dims <= 255;
  return !devices_first_ && find_device(source);
}

[[gnu::noinline]] bool CallObserver::find_device(Source* source) {
  return THPVariable_CheckExact(source->object) &&
         find_device(source->x, &source->frame->pending, &source->view, &source->stream_slot);
}

// Fills in how a device reads the tensor; false for what is on no device, and where none can be asked.
bool CallObserver::find_device(const at::Tensor& x, PendingRows* pending, View* view,
                               PendingRows::StreamSlot* stream_slot) {
  const NanwatchBackend* const backend = RowTable::backend();
  if (backend == nullptr || devices_off_) return false;
  const int number = backend->device_of(&x);
  const std::optional<Format> format = number < 0 ? std::nullopt : format_of(x.scalar_type());
  if (!format.has_value() || x.is_neg() || !covered_view(x, *format, view)) return false;
  const PendingRows::StreamSlot& current = pending->stream_slot_of(number, *backend);
  if (current.error != 0 || current.capturing != 0) return false;
  *stream_slot = current;
  return true;
}

Reading CallObserver::read(const Source& source) {
  const int64_t bytes = source.bytes();
  ++counters.tensors_read;
  counters.bytes_read += bytes;
  if (source.is_on_device()) {
    table_ = RowTable::instance();
    return {{}, &source.frame->pending.collect(source.x, source.view.format, source.stream_slot)};
  }
  return {read_released(source.x, source.view, bytes, [](const View& view) { return range_cpu(view); })};
}

Reading CallObserver::hit(const Source& source, const CacheEntry& entry) {
  ++counters.cache_hits;
  if (options_.verify_hits && !source.is_on_device()) [[unlikely]] {
    const RangeRow again = range_cpu(source.view);
    counters.stale_hits += again.abs_min != entry.abs_min || again.abs_max != entry.abs_max;
  }
  return entry.reading();
}

Reading CallObserver::weight_range(const Source& source, bool moves, Node::Slot* slot) {
  const Content content(source.x, epoch_);
  if (slot->cached == nullptr || !slot->cached->entry.content.is_same_part(content)) find_entry(content.key(), slot);
  const CacheEntry& entry = slot->cached->entry;
  const bool unchanged = entry.content.has_same_version(content);
  const bool is_known = unchanged && entry.content.epoch == epoch_ && source.is_served_by(entry) && !moves;
  if (is_known && uint32_t(source.batch) - entry.batch < kAge) [[likely]]
    return hit(source, entry);
  if (!budget_.spend(source.bytes(), !is_known, &slot->cached->turn))
    return is_known ? hit(source, entry) : Reading{{}, nullptr, true};
  // While the lock is released for the read, another thread may drop the slot's entry, or the slot.
  const std::shared_ptr<WeightEntry> cached = slot->cached;
  const Reading reading = read(source);
  if (reading.may_be_kept()) {
    // Each weight starts at another age, so that no batch comes in which all are read again.
    const int64_t age = unchanged ? 0 : first_entries_++ % kAge;
    cached->take(source.x, content, reading, source.batch - age);
  } else {
    cached->entry.forget();
  }
  return reading;
}

Reading CallObserver::range_of(const Source& source, Memory memory, Node::Slot* slot) {
  ++counters.tensors;
  const bool has_version = can_be_remembered(source.x);
  if (memory == Memory::weight || memory == Memory::moving) {
    if (has_version) [[likely]]
      return weight_range(source, memory == Memory::moving, slot);
    find_entry(Content::key_of(source.x), slot);
    if (!budget_.spend(source.bytes(), true, &slot->cached->turn)) return {{}, nullptr, true};
    return read(source);
  }
  if (memory == Memory::none || !has_version) {
    budget_.earn(source.bytes());
    return read(source);
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(source.object)) == ParameterClass) {
    // A weight handed around: torch.utils.swap_tensors refuses a parameter that has weak references.
    Node::Slot passing;
    return weight_range(source, false, &passing);
  }
  const Content content(source.x, epoch_);
  const CacheEntry* const entry = activations_.find(content);
  if (entry != nullptr && entry->content.epoch == epoch_ && entry->batch == uint32_t(source.batch) &&
      source.is_served_by(*entry))
    return hit(source, *entry);
  budget_.earn(source.bytes());
  const Reading reading = read(source);
  if (reading.may_be_kept()) activations_.remember(source.object, content, reading, source.batch);
  return reading;
}

void CallObserver::find_entry(uint64_t key, Node::Slot* slot) {
  if (slot->cached && slot->key == key) return;
  slot->cached = weight_cache_.entry(key);
  slot->key = key;
}

CallObserver::Stepped CallObserver::stepped(PyObject* weight, bool reads, int64_t batch) {
  const at::Tensor& x = THPVariable_Unpack(weight);
  if (!x.has_storage()) return Stepped::unknown;
  const uint64_t key = Content::key_of(x);
  Node::Slot slot{.cached = weight_cache_.find(key), .key = key};
  if (slot.cached == nullptr) return Stepped::unknown;
  if (!x.grad().defined()) return Stepped::known;
  slot.cached->entry.forget();
  Source source{weight, x, {}, {}, batch, nullptr};
  // A weight that no call has read yet stays unread: its module may never be called, which `called` tells.
  if (!reads || slot.cached->turn == -1 || devices_first_ || !can_be_remembered(x) || !plain_view(weight, &source.view))
    return Stepped::known;
  const Reading reading = weight_range(source, false, &slot);
  return reading.is_refused || reading.range.isfinite ? Stepped::known : Stepped::nonfinite;
}

PendingRowPtr CallObserver::enqueue_read(const at::Tensor& x) {
  // Taken, as another thread may come in where the table is full.
  PendingRows pending = std::exchange(gradient_rows_, {});
  View view;
  PendingRows::StreamSlot stream_slot;
  if (!find_device(x, &pending, &view, &stream_slot)) return nullptr;
  const PendingRowPtr row = pending.collect(x, view.format, stream_slot);
  table_ = RowTable::instance();
  if (const int error = table_->send(&pending)) {
    devices_off_ = RowTable::backend()->cannot_run(error) != 0;
    return nullptr;
  }
  gradient_rows_ = std::move(pending);
  return row;
}

// ---- records --------------------------------------------------------------------------------------------------------

void CallObserver::unread(Labels::Id label, Role role, const std::string& reason, OpenFrame* frame) {
  if (PyObject* const record = unread_record(labels_.text(label), role, reason))
    frame->add({.label = label, .role = role, .python = record});
}

// Turns an exception that came while a value was read into the value's record. Returns false, and leaves the exception
// set, if it must end the call.
bool CallObserver::excuse(Labels::Id label, Role role, OpenFrame* frame) {
  const std::optional<std::string> reason = excuse_error();
  if (reason.has_value()) unread(label, role, *reason, frame);
  return reason.has_value();
}

[[gnu::noinline]] bool CallObserver::record_from_python(PyObject* value, Labels::Id label, Role role, const Node& node,
                                                        OpenFrame* frame) {
  const OutsideCompiler outside;
  const py::object text = from_utf8(labels_.text(label)), role_text = from_utf8(role_name(role));
  PyObject* record = PyObject_CallFunctionObjArgs(helpers_.observe.ptr(), value, text.ptr(), role_text.ptr(),
                                                  node.allow_inf.ptr(), py::int_(frame->batch).ptr(), nullptr);
  if (record == nullptr) return excuse(label, role, frame);
  frame->add({.label = label, .role = role, .python = record});
  if (THPVariable_Check(value)) frame->records.back().requires_grad = THPVariable_Unpack(value).requires_grad();
  frame->has_nonfinite |= is_nonfinite(frame->records.back());
  return true;
}

bool CallObserver::tensor(PyObject* object, Labels::Id label, Role role, const Node& node, Memory memory,
                          Node::Slot* slot, OpenFrame* frame) {
  const at::Tensor& x = THPVariable_Unpack(object);
  if (frame->candidates != nullptr && x.requires_grad()) frame->candidates->push_back({x, label, role});
  if (frame->reads_all) [[unlikely]]
    memory = Memory::none;
  Source source{object, x, {}, {}, frame->batch, frame};
  if (!is_readable(&source, role)) [[unlikely]] {
    ++counters.tensors;
    ++counters.tensors_read;
    return record_from_python(object, label, role, node, frame);
  }
  if (!masks_.empty() && !source.is_on_device() && !frame->reads_all && known_mask(x, label, role, frame)) [[unlikely]]
    return true;
  // Taken before the read: another thread may give the tensor other sizes while the lock is released.
  RecordData record{.label = label, .role = role, .shape_at = uint32_t(frame->shapes.size())};
  record.describe(x);
  for (int64_t d = 0; d < source.view.dims; ++d) frame->shapes.push_back(source.view.sizes[d]);
  const Reading reading = range_of(source, memory, slot);
  record.range = reading.range;
  if (reading.pending == nullptr && !reading.is_refused && record.range.isfinite &&
      !may_be_mask(record.range, role, source.view.format)) [[likely]] {
    frame->add(record);
    return true;
  }
  return unusual(source, reading, node, &record);
}

// Adds the record of a tensor that was not read here and now, or that Python has to look at.
[[gnu::noinline]] bool CallObserver::unusual(const Source& source, const Reading& reading, const Node& node,
                                             RecordData* record) {
  OpenFrame* const frame = source.frame;
  const at::Tensor& x = source.x;
  const Role role = record->role;
  if (reading.pending != nullptr) {
    const PendingRow& row = **reading.pending;
    if (row.state == PendingRow::State::completed && !may_be_mask(row.range, role, source.view.format)) {
      record->range = row.range;  // of an earlier batch, as a weight has
    } else {
      record->requires_grad = x.requires_grad();
      record->pending = int32_t(frame->pending.rows.size());
      frame->pending.rows.push_back(*reading.pending);
    }
    frame->add(*record);
    return true;
  }
  frame->shapes.resize(record->shape_at);
  if (reading.is_refused) {
    frame->add({record->label, role, NoteKind::not_checked});
    return true;
  }
  const std::optional<Content> content =
      can_be_remembered(x) ? std::optional<Content>(Content(x, epoch_)) : std::nullopt;
  // A copy to the host that nobody has waited for yet leaves in the output what was there before.
  if (!record->range.isfinite && table_ != nullptr && role == Role::output) table_->drain();
  if (!record_from_python(source.object, record->label, role, node, frame)) return false;
  if (content.has_value() && frame->records.back().python != nullptr) remember_mask(x, *content, frame->records.back());
  return true;
}

// The record as a Python object.
py::object CallObserver::to_python(const FrameData& frame, const RecordData& record) const {
  if (record.python != nullptr) return py::reinterpret_borrow<py::object>(record.python);
  RecordItems items = items_without_range(labels_.text(record.label), record.role);
  if (record.note == NoteKind::none) {
    items[record_item::shape] = shape_of(frame, record);
    items[record_item::dtype] = py::str(dtype_name(record));
    items[record_item::abs_min] = py::float_(record.range.abs_min);
    items[record_item::abs_max] = py::float_(record.range.abs_max);
    items[record_item::isfinite] = py::bool_(record.range.isfinite);
  } else {
    items[record_item::note] = make_note(record.note, record.note == NoteKind::not_checked ? kNotReadYet : "");
  }
  return make_record(std::move(items));
}

// ---- masks ----------------------------------------------------------------------------------------------------------

// Adds the record of a tensor that is known to be a mask, and has not changed since.
[[gnu::noinline]] bool CallObserver::known_mask(const at::Tensor& x, Labels::Id label, Role role, OpenFrame* frame) {
  if ((role != Role::input && role != Role::buffer) || !can_be_remembered(x)) return false;
  const Content content(x, epoch_);
  const auto mask = masks_.find(content.key());
  if (mask == masks_.end() || !mask->second.tensor.entry.content.has_same_version(content) ||
      mask->second.tensor.is_expired())
    return false;
  py::object record = mask->second.record;
  if (mask->second.label != label || mask->second.role != role) {
    record = with_item(record.ptr(), record_item::label, from_utf8(labels_.text(label)));
    record = with_item(record.ptr(), record_item::role, from_utf8(role_name(role)));
  }
  ++counters.tensors;
  ++counters.cache_hits;
  frame->add({.label = label, .role = role, .python = record.release().ptr()});
  return true;
}

// Remembers the record of a tensor that Python has found to be a mask.
void CallObserver::remember_mask(const at::Tensor& x, const Content& content, const RecordData& data) {
  constexpr size_t kMost = 256;
  PyObject* const record = data.python;
  if (!is_record(record) || PyTuple_GET_ITEM(record, record_item::note) != helpers_.plain_mask.ptr()) return;
  if (masks_.size() >= kMost) masks_.clear();
  Mask& mask = masks_[content.key()];
  mask.tensor.take(x, content, {}, 0);
  mask.record = py::reinterpret_borrow<py::object>(record);
  mask.label = data.label;
  mask.role = data.role;
}

// ---- frames ---------------------------------------------------------------------------------------------------------

// Fills the frame by make(). If a device refuses the reads of the frame, makes the frame again without devices.
template <typename Make>
bool CallObserver::fill_once(const Node& node, OpenFrame* frame, const Make& make) {
  if (!make()) return false;
  if (frame->pending.rows.empty()) [[likely]]
    return true;
  if (const int error = table_->send(&frame->pending)) {
    const bool for_good = RowTable::backend()->cannot_run(error) != 0;
    frame->start_over();
    devices_off_ = true;
    const bool done = make();
    devices_off_ = for_good;
    return done;
  }
  if (!options_.waits_for_calls) return true;
  table_->wait(frame->pending.rows);
  return resolve(node, frame);
}

template <typename Make>
bool CallObserver::fill_frame(const Node& node, OpenFrame* frame, const Make& make) {
  bool done = fill_once(node, frame, make);
  if (done && frame->has_nonfinite) [[unlikely]] {
    // Read every tensor of a non-finite call again: memory behind a cached range may have changed unseen.
    frame->start_over();
    frame->reads_all = true;
    done = fill_once(node, frame, make);
    frame->reads_all = false;
    if (done) excuse_absorbed(frame);
  }
  return done;
}

bool CallObserver::observe(Node& node, const ModuleCall& call, OpenFrame* frame) {
  return fill_frame(node, frame, [&] { return records(node, call, frame); });
}

bool CallObserver::observe_compiled(const Node& node, std::string_view plan, at::TensorList tensors, OpenFrame* frame) {
  return fill_frame(node, frame, [&] { return compiled_records(node, plan, tensors, frame); });
}

bool CallObserver::compiled_records(const Node& node, std::string_view plan, at::TensorList tensors, OpenFrame* frame) {
  size_t next = 0;
  std::vector<const void*> owned;
  return each_planned(plan, [&](Role role, char kind, const std::string& text, const std::string& reason) {
    const bool is_tensor = kind == 't', is_own = role == Role::weight || role == Role::buffer;
    const at::Tensor* const x = is_tensor && next < tensors.size() ? &tensors[next] : nullptr;
    next += is_tensor;
    if (!options_.reads(role) || (is_tensor && x == nullptr)) return true;
    const Labels::Id label = labels_.of_text(text);
    if (!is_tensor) {
      if (kind == 'u') unread(label, role, reason, frame);
      if (kind != 'u') frame->add({label, role, kind == 'n' ? NoteKind::absent : NoteKind::not_a_tensor});
      return true;
    }
    if (is_own) {
      const void* const identity = x->unsafeGetTensorImpl();  // a tensor under two names counts once
      if (std::find(owned.begin(), owned.end(), identity) != owned.end()) return true;
      owned.push_back(identity);
    }
    const py::object object = wrap(*x);
    if (!object) {
      PyErr_Clear();
      unread(label, role, "Python has no object for it", frame);
      return true;
    }
    // Compiled code gives the memory of one activation to the next and has no version counter. So what is between
    // modules is read each time; a parameter is the user's own tensor, and is known again.
    const bool is_parameter =
        role == Role::weight && reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == ParameterClass;
    Node::Slot passing;
    const Memory memory = is_parameter ? Memory::weight : is_own ? Memory::moving : Memory::none;
    return tensor(object.ptr(), label, role, node, memory, &passing, frame);
  });
}

// ---- rows of devices ------------------------------------------------------------------------------------------------

bool CallObserver::resolve(const Node& node, OpenFrame* frame) {
  if (frame->pending.rows.empty()) return true;
  for (RecordData& record : frame->records) {
    const int32_t pending = std::exchange(record.pending, kNotPending);
    if (pending != kNotPending && !resolve_record(node, *frame->pending.rows[size_t(pending)], *frame, &record)) {
      frame->clear();
      return false;
    }
    frame->has_objects |= record.python != nullptr;
    frame->has_nonfinite |= is_nonfinite(record);
  }
  frame->pending.clear();
  if (frame->has_nonfinite) excuse_absorbed(frame);
  return true;
}

bool CallObserver::resolve_record(const Node& node, const PendingRow& pending, const OpenFrame& frame,
                                  RecordData* record) {
  record->range = pending.range;
  const bool is_here = pending.state == PendingRow::State::completed;
  const Format format = *format_of(static_cast<at::ScalarType>(record->dtype));
  if (is_here && pending.range.isfinite && !may_be_mask(pending.range, record->role, format)) return true;
  const OutsideCompiler outside;
  py::object values = py::str("its row did not come from the device (" + table_->words(pending.error) + ")");
  if (is_here) {
    double row[kRangeColumns];
    pending.range.write(row);
    values = py::cast(pending.columns.empty() ? std::vector<double>(row, row + kRangeColumns) : pending.columns);
  }
  record->python = PyObject_CallFunction(helpers_.completed.ptr(), "ssOsOO", labels_.text(record->label).c_str(),
                                         role_name(record->role), shape_of(frame, *record).ptr(),
                                         dtype_name(*record).c_str(), values.ptr(), node.allow_inf.ptr());
  if (record->python != nullptr) return true;
  const std::optional<std::string> reason = excuse_error();
  if (reason.has_value()) record->python = unread_record(labels_.text(record->label), record->role, *reason);
  return reason.has_value();
}

}  // namespace nanwatch
