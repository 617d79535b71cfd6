#include "device/row_table.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <pybind11/pybind11.h>

#include <utility>

#include "device/cuda_backend.h"
#include "device/graph_rows.h"

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

int StreamEvent::query() const {
  return event_ == nullptr ? error_ : backend_->query(event_);
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

bool RowTable::has_devices() {
  return installed != nullptr && (installed->takes_host_memory != 0 || at::detail::getCUDAHooks().hasCUDART());
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
  const size_t slots = kSlots + kGraphSlots;
  const int error = backend_->allocate(device, slots * sizeof(NanwatchRow), &memory, &address);
  // Another thread's block may have come first, where asking for one let go of the interpreter lock.
  if (error != 0 || slots_ != nullptr) return error;
  slots_ = static_cast<NanwatchRow*>(memory);
  address_ = static_cast<NanwatchRow*>(address);
  for (size_t i = 0; i < slots; ++i) slots_[i].stamp = 0;
  graph_next_ = kSlots;
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
    const std::vector<PendingRowPtr> rows{oldest};
    wait(rows, record_events(rows));  // without the lock: others may come in, and the oldest be another
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
    const int64_t* const sizes = frame.geometry.data() + read.geometry;
    tensors.push_back({read.data, sizes, sizes + read.dims, read.dims, int32_t(read.format)});
    rows.push_back(read.row);
  }
  for (size_t done = 0; done < tensors.size();) {
    if (const int error = make_room(tensors.size() - done)) return error;
    const size_t slot = size_t(next_ % kSlots);
    const size_t count = std::min(tensors.size() - done, kSlots - slot);
    const NanwatchTarget target = {address_ + slot, 1, next_, nullptr};
    next_ += count;
    if (const int error =
            backend_->observe(tensors.data() + done, int64_t(count), &target, stream_slot.device, stream_slot.stream))
      return error;
    for (size_t i = 0; i < count; ++i) {
      PendingRow& row = *rows[done + i];
      row.slot = slots_ + slot + i;
      row.stamp = target.first + i;
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
    if (error == 0 && frame->graph() != nullptr) {
      error = send_to_graph(frame, stream_slot);
      continue;
    }
    if (error == 0) error = allocate(stream_slot.device);
    for (size_t next = 0; error == 0 && next < frame->reads.size();) error = send_on_stream(*frame, stream_slot, &next);
  }
  for (const PendingRows::Read& read : frame->reads)
    if (read.row->state == PendingRow::State::unsent) read.row->fail(error);
  frame->sent();
  return error;
}

// ---- graphs ---------------------------------------------------------------------------------------------------------

std::shared_ptr<GraphRows> RowTable::new_graph(int device, uint64_t capture) {
  if (allocate(device) != 0 || graph_next_ == kSlots + kGraphSlots) return nullptr;
  const auto graph = std::make_shared<GraphRows>();
  // Its two counters are in a slot of their own.
  const size_t slot = graph_next_++;
  slots_[slot] = {};
  auto* const here = reinterpret_cast<uint64_t*>(slots_ + slot);
  auto* const there = reinterpret_cast<uint64_t*>(address_ + slot);
  graph->step = here;
  graph->done = here + 1;
  graph->step_address = there;
  graph->done_address = there + 1;
  graph->device = device;
  graph->capture = capture;
  return graph;
}

int RowTable::end_graph(const GraphRows& graph) const {
  void* stream = nullptr;
  uint64_t capture = 0;
  if (const int error = backend_->stream(graph.device, &stream, &capture)) return error;
  if (capture != graph.capture) return kNanwatchCapturing;
  return backend_->step(graph.step_address, graph.done_address, graph.device, stream);
}

StreamEvent RowTable::record_event(int device) const {
  void* stream = nullptr;
  uint64_t capture = 0;
  (void)backend_->stream(device, &stream, &capture);
  return StreamEvent(backend_, device, stream);
}

int RowTable::send_to_graph(PendingRows* frame, const PendingRows::StreamSlot& stream_slot) {
  GraphRows& graph = **frame->graph_of_batch;
  const size_t replays = GraphRows::kReplays;
  std::vector<NanwatchTensor> tensors;
  std::vector<PendingRowPtr> rows;
  for (const PendingRows::Read& read : frame->reads) {
    if (read.row->device != stream_slot.device) continue;
    const int64_t* const sizes = frame->geometry.data() + read.geometry;
    tensors.push_back({read.data, sizes, sizes + read.dims, read.dims, int32_t(read.format)});
    rows.push_back(read.row);
  }
  if (tensors.empty()) return 0;
  if (graph_next_ + rows.size() * replays > kSlots + kGraphSlots) return kNanwatchNoWorkspace;
  if (graph.rows.empty())
    if (const int error = backend_->step(graph.step_address, nullptr, stream_slot.device, stream_slot.stream))
      return error;
  const NanwatchTarget target = {address_ + graph_next_, int64_t(replays), 0, graph.step_address};
  if (const int error =
          backend_->observe(tensors.data(), int64_t(tensors.size()), &target, stream_slot.device, stream_slot.stream))
    return error;
  for (const PendingRowPtr& row : rows) {
    row->slot = slots_ + graph_next_;
    row->stream = stream_slot.stream;
    row->state = PendingRow::State::captured;
    graph_next_ += replays;
    graph.rows.push_back(row);
  }
  return 0;
}

// ---- waiting --------------------------------------------------------------------------------------------------------

std::vector<StreamEvent> RowTable::record_events(const std::vector<PendingRowPtr>& rows) const {
  std::vector<StreamEvent> events;
  for (const PendingRowPtr& row : rows) {
    if (row->poll()) continue;
    const bool known =
        std::any_of(events.begin(), events.end(), [&](const StreamEvent& event) { return event.is_behind(*row); });
    if (!known) events.emplace_back(backend_, row->device, row->stream);
  }
  return events;
}

bool RowTable::poll(const std::vector<PendingRowPtr>& rows, const std::vector<StreamEvent>& events) const {
  const auto missing = [&] {
    return std::any_of(rows.begin(), rows.end(), [](const PendingRowPtr& row) { return !row->poll(); });
  };
  if (!missing()) return true;
  for (const StreamEvent& event : events) {
    const int error = event.query();
    if (error == kNanwatchNotReady || error == kNanwatchCapturing) continue;
    for (const PendingRowPtr& row : rows)
      if (event.is_behind(*row)) row->fail(error);
  }
  return !missing();
}

bool RowTable::is_capturing(const std::vector<StreamEvent>& events) const {
  return std::any_of(events.begin(), events.end(), [this](const StreamEvent& event) {
    void* stream = nullptr;
    uint64_t capture = 0;
    (void)backend_->stream(event.device(), &stream, &capture);
    return capture != 0;
  });
}

void RowTable::wait(const std::vector<PendingRowPtr>& rows, const std::vector<StreamEvent>& events) const {
  for (const StreamEvent& event : events) {
    const int error = event.wait();
    for (const PendingRowPtr& row : rows)
      if (event.is_behind(*row) && error != kNanwatchCapturing) row->fail(error);
  }
}

void RowTable::drain() const {
  const std::vector<PendingRowPtr> rows(in_flight_.begin(), in_flight_.end());
  wait(rows, record_events(rows));
}

}  // namespace nanwatch
