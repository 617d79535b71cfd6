#include "device/row_table.h"

#include <pybind11/pybind11.h>

#include <utility>

#include "device/cuda_backend.h"

namespace nanwatch {
namespace {

// In one call to the backend: a round number above any frame's.
constexpr size_t kMostAtOnce = 1024;

const NanwatchBackend* installed = cuda_backend();

}  // namespace

// ---- StreamEvent ----------------------------------------------------------------------------------------------------

StreamEvent::StreamEvent(const NanwatchBackend* backend, int device, void* stream)
    : backend_(backend), device_(device), stream_(stream), error_(backend->record(device, stream, &event_)) {}

StreamEvent::StreamEvent(StreamEvent&& other) noexcept
    : backend_(other.backend_),
      device_(other.device_),
      stream_(other.stream_),
      event_(std::exchange(other.event_, nullptr)),
      error_(other.error_) {}

StreamEvent::~StreamEvent() {
  if (event_ != nullptr) backend_->release(event_);
}

int StreamEvent::wait() const {
  if (event_ == nullptr) return error_;
  const pybind11::gil_scoped_release release;
  return backend_->wait(event_);
}

// ---- RowTable -------------------------------------------------------------------------------------------------------

const NanwatchBackend* RowTable::backend() {
  return installed;
}

void RowTable::set_backend(const NanwatchBackend* backend) {
  installed = backend;
}

RowTable* RowTable::instance() {
  static RowTable* table = nullptr;  // never destroyed: at exit a device may still write
  if (installed == nullptr) return table;
  if (table == nullptr) table = new RowTable;
  if (table->backend_ != installed) {
    for (const PendingRowPtr& row : table->in_flight_) row->fail(0);
    table->in_flight_.clear();
    table->slots_ = table->address_ = nullptr;
    table->backend_ = installed;
  }
  return table;
}

std::string RowTable::words(int error) const {
  return error == 0 ? "its row was not fetched" : backend_->error(error);
}

int RowTable::allocate(int device) {
  if (slots_ != nullptr) return 0;
  void *memory = nullptr, *address = nullptr;
  const int error = backend_->allocate(device, kSlots * sizeof(NanwatchRow), &memory, &address);
  // Another thread's block may have come first, where asking for one let go of the interpreter lock.
  if (error != 0 || slots_ != nullptr) return error;
  slots_ = static_cast<NanwatchRow*>(memory);
  address_ = static_cast<NanwatchRow*>(address);
  for (size_t i = 0; i < kSlots; ++i) slots_[i].stamp = 0;
  return 0;
}

// A slot is free again when its row has come.
int RowTable::make_room(size_t count) {
  while (!in_flight_.empty()) {
    const PendingRowPtr oldest = in_flight_.front();
    if (oldest->poll()) {
      in_flight_.pop_front();
      continue;
    }
    if (next_ + count - oldest->stamp <= kSlots) return 0;
    wait({oldest});  // without the lock: others may come in, and the oldest be another
    if (oldest->state == PendingRow::State::pending) return kNanwatchNotReady;
  }
  return 0;
}

int RowTable::send_on_stream(const PendingRows& frame, const PendingRows::StreamSlot& stream_slot, size_t* next) {
  std::vector<NanwatchTensor> tensors;
  std::vector<PendingRowPtr> rows;
  for (; *next < frame.reads.size() && tensors.size() < kMostAtOnce; ++*next) {
    const PendingRows::Read& read = frame.reads[*next];
    if (read.row->device != stream_slot.device) continue;
    tensors.push_back(read.run);
    rows.push_back(read.row);
  }
  for (size_t done = 0; done < tensors.size();) {
    if (const int error = make_room(tensors.size() - done)) return error;
    const size_t slot = size_t(next_ % kSlots);
    const size_t count = std::min(tensors.size() - done, kSlots - slot);
    const uint64_t first = next_;
    next_ += count;
    if (const int error = backend_->observe(tensors.data() + done, int64_t(count), address_ + slot, first,
                                            stream_slot.device, stream_slot.stream))
      return error;
    for (size_t i = 0; i < count; ++i) {
      PendingRow& row = *rows[done + i];
      row.slot = slots_ + slot + i;
      row.stamp = first + i;
      row.stream = stream_slot.stream;
      row.state = PendingRow::State::pending;
      in_flight_.push_back(rows[done + i]);
    }
    done += count;
  }
  return 0;
}

int RowTable::send(PendingRows* frame) {
  int error = 0;
  for (const PendingRows::StreamSlot& stream_slot : frame->stream_slots) {
    if (error == 0) error = allocate(stream_slot.device);
    for (size_t next = 0; error == 0 && next < frame->reads.size();) error = send_on_stream(*frame, stream_slot, &next);
  }
  for (const PendingRows::Read& read : frame->reads)
    if (read.row->state == PendingRow::State::unsent) read.row->fail(error);
  frame->sent();
  return error;
}

// ---- waiting --------------------------------------------------------------------------------------------------------

void RowTable::wait(const std::vector<PendingRowPtr>& rows) const {
  std::vector<StreamEvent> events;  // all recorded before the first wait
  for (const PendingRowPtr& row : rows) {
    if (row->poll()) continue;
    const bool is_known =
        std::any_of(events.begin(), events.end(), [&](const StreamEvent& event) { return event.is_behind(*row); });
    if (!is_known) events.emplace_back(backend_, row->device, row->stream);
  }
  for (const StreamEvent& event : events) {
    const int error = event.wait();
    for (const PendingRowPtr& row : rows)
      if (event.is_behind(*row) && error != kNanwatchCapturing) row->fail(error);
  }
}

void RowTable::drain() const {
  wait({in_flight_.begin(), in_flight_.end()});
}

}  // namespace nanwatch
