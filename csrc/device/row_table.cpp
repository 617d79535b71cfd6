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

// ---- Mark -----------------------------------------------------------------------------------------------------------

Mark::Mark(const NanwatchBackend* backend, int device, void* stream)
    : backend_(backend), device_(device), stream_(stream), error_(backend->record(device, stream, &event_)) {}

Mark::Mark(Mark&& other) noexcept
    : backend_(other.backend_),
      device_(other.device_),
      stream_(other.stream_),
      event_(std::exchange(other.event_, nullptr)),
      error_(other.error_) {}

Mark::~Mark() {
  if (event_ != nullptr) backend_->release(event_);
}

int Mark::query() const {
  return event_ == nullptr ? error_ : backend_->query(event_);
}

int Mark::wait() const {
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
    for (const LatePtr& row : table->in_flight_) row->lose(0);
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
    const LatePtr oldest = in_flight_.front();
    if (oldest->arrive()) {
      in_flight_.pop_front();
      continue;
    }
    if (next_ + count - oldest->stamp <= kSlots) return 0;
    const std::vector<LatePtr> rows{oldest};
    wait(rows, mark(rows));  // without the lock: others may come in, and the oldest be another
    if (oldest->state == LateRow::State::pending) return kNanwatchNotReady;
  }
  return 0;
}

int RowTable::send_lane(const LateFrame& frame, const LateFrame::Lane& lane, size_t* next) {
  std::vector<NanwatchTensor> tensors;
  std::vector<LatePtr> rows;
  for (; *next < frame.reads.size() && tensors.size() < kMostAtOnce; ++*next) {
    const LateFrame::Read& read = frame.reads[*next];
    if (read.row->device != lane.device) continue;
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
    if (const int error = backend_->observe(tensors.data() + done, int64_t(count), &target, lane.device, lane.stream))
      return error;
    for (size_t i = 0; i < count; ++i) {
      LateRow& row = *rows[done + i];
      row.slot = slots_ + slot + i;
      row.stamp = target.first + i;
      row.stream = lane.stream;
      row.state = LateRow::State::pending;
      in_flight_.push_back(rows[done + i]);
    }
    done += count;
  }
  return 0;
}

int RowTable::send(LateFrame* frame) {
  int error = 0;
  for (const LateFrame::Lane& lane : frame->lanes) {
    if (error == 0 && frame->graph() != nullptr) {
      error = send_to_graph(frame, lane);
      continue;
    }
    if (error == 0) error = allocate(lane.device);
    for (size_t next = 0; error == 0 && next < frame->reads.size();) error = send_lane(*frame, lane, &next);
  }
  for (const LateFrame::Read& read : frame->reads)
    if (read.row->state == LateRow::State::unsent) read.row->lose(error);
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

Mark RowTable::mark_now(int device) const {
  void* stream = nullptr;
  uint64_t capture = 0;
  (void)backend_->stream(device, &stream, &capture);
  return Mark(backend_, device, stream);
}

int RowTable::send_to_graph(LateFrame* frame, const LateFrame::Lane& lane) {
  GraphRows& graph = **frame->graph_of_batch;
  const size_t replays = GraphRows::kReplays;
  std::vector<NanwatchTensor> tensors;
  std::vector<LatePtr> rows;
  for (const LateFrame::Read& read : frame->reads) {
    if (read.row->device != lane.device) continue;
    const int64_t* const sizes = frame->geometry.data() + read.geometry;
    tensors.push_back({read.data, sizes, sizes + read.dims, read.dims, int32_t(read.format)});
    rows.push_back(read.row);
  }
  if (tensors.empty()) return 0;
  if (graph_next_ + rows.size() * replays > kSlots + kGraphSlots) return kNanwatchNoWorkspace;
  if (graph.rows.empty())
    if (const int error = backend_->step(graph.step_address, nullptr, lane.device, lane.stream)) return error;
  const NanwatchTarget target = {address_ + graph_next_, int64_t(replays), 0, graph.step_address};
  if (const int error = backend_->observe(tensors.data(), int64_t(tensors.size()), &target, lane.device, lane.stream))
    return error;
  for (const LatePtr& row : rows) {
    row->slot = slots_ + graph_next_;
    row->stream = lane.stream;
    row->state = LateRow::State::captured;
    graph_next_ += replays;
    graph.rows.push_back(row);
  }
  return 0;
}

// ---- waiting --------------------------------------------------------------------------------------------------------

std::vector<Mark> RowTable::mark(const std::vector<LatePtr>& rows) const {
  std::vector<Mark> marks;
  for (const LatePtr& row : rows) {
    if (row->arrive()) continue;
    const bool known = std::any_of(marks.begin(), marks.end(), [&](const Mark& mark) { return mark.is_behind(*row); });
    if (!known) marks.emplace_back(backend_, row->device, row->stream);
  }
  return marks;
}

bool RowTable::have_come(const std::vector<LatePtr>& rows, const std::vector<Mark>& marks) const {
  const auto missing = [&] {
    return std::any_of(rows.begin(), rows.end(), [](const LatePtr& row) { return !row->arrive(); });
  };
  if (!missing()) return true;
  for (const Mark& mark : marks) {
    const int error = mark.query();
    if (error == kNanwatchNotReady || error == kNanwatchCapturing) continue;
    for (const LatePtr& row : rows)
      if (mark.is_behind(*row)) row->lose(error);
  }
  return !missing();
}

bool RowTable::is_capturing(const std::vector<Mark>& marks) const {
  return std::any_of(marks.begin(), marks.end(), [this](const Mark& mark) {
    void* stream = nullptr;
    uint64_t capture = 0;
    (void)backend_->stream(mark.device(), &stream, &capture);
    return capture != 0;
  });
}

void RowTable::wait(const std::vector<LatePtr>& rows, const std::vector<Mark>& marks) const {
  for (const Mark& mark : marks) {
    const int error = mark.wait();
    for (const LatePtr& row : rows)
      if (mark.is_behind(*row) && error != kNanwatchCapturing) row->lose(error);
  }
}

void RowTable::drain() const {
  const std::vector<LatePtr> rows(in_flight_.begin(), in_flight_.end());
  wait(rows, mark(rows));
}

}  // namespace nanwatch
