#include "device/row_table.h"

#include <pybind11/pybind11.h>

#include "ops/tensor_view.h"

namespace nanwatch {
namespace {

std::unique_ptr<const Layout> layout_of(const at::Tensor& x, const at::Tensor& run) {
  if (x.is_contiguous() || x.numel() == 0) return nullptr;
  auto layout = std::make_unique<Layout>(Layout{x.sizes().vec(), run.strides().vec(), x.numel() / run.numel()});
  for (int64_t d = 0; d < x.dim(); ++d)
    if (run.size(d) == 1) layout->strides[size_t(d)] = 0;
  return layout;
}

}  // namespace

// ---- one frame's rows -----------------------------------------------------------------------------------------------

void Layout::apply(double* values) const {
  for (int count = column::num_nan; count <= column::num_subnormal; ++count) values[count] *= double(repeats);
  if (values[column::first_nonfinite] < 0) return;
  const auto place = int64_t(values[column::first_nonfinite]);
  int64_t position = 0, weight = 1;
  for (size_t d = sizes.size(); d-- > 0; weight *= sizes[d])
    if (strides[d] != 0) position += place / strides[d] % sizes[d] * weight;
  values[column::first_nonfinite] = double(position);
}

const PendingRowPtr& PendingRows::collect(const at::Tensor& x, Format format, const StreamSlot& stream_slot) {
  auto row = std::make_shared<PendingRow>();
  row->device = stream_slot.device;
  row->stream = stream_slot.stream;
  row->collector = this;
  // Not by a copy of `x`: the second reference to a tensor that Python knows takes the interpreter lock.
  const at::Tensor made = is_dense(x) ? at::Tensor() : dense(x);
  const at::Tensor& run = made.defined() ? made : x;
  row->layout = layout_of(x, run);
  runs.push_back({run.const_data_ptr(), run.numel(), int32_t(format)});
  return reads.emplace_back(Read{std::move(row), run.storage()}).row;
}

const PendingRows::StreamSlot& PendingRows::stream_slot_of(int device, const NanwatchBackend& backend) {
  for (const StreamSlot& stream_slot : stream_slots)
    if (stream_slot.device == device) return stream_slot;
  StreamSlot& stream_slot = stream_slots.emplace_back(StreamSlot{device});
  stream_slot.error = backend.stream(device, &stream_slot.stream, &stream_slot.capturing);
  return stream_slot;
}

// ---- the table ------------------------------------------------------------------------------------------------------

RowTable* RowTable::instance() {
  static RowTable* table = nullptr;  // never destroyed: at exit a device may still write
  if (installed_ == nullptr) return table;
  if (table == nullptr) table = new RowTable;
  if (table->backend_ != installed_) {
    for (const PendingRowPtr& row : table->in_flight_) row->fail(0);
    table->in_flight_.clear();
    table->slots_ = table->address_ = nullptr;
    table->backend_ = installed_;
  }
  return table;
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

int RowTable::enqueue(const PendingRows& frame, size_t begin, size_t* count) {
  const int device = frame.reads[begin].row->device;
  if (const int error = allocate(device)) return error;
  if (const int error = make_room(std::min(frame.reads.size() - begin, kSlots))) return error;
  const size_t slot = size_t(next_ % kSlots), most = std::min(frame.reads.size() - begin, kSlots - slot);
  for (*count = 1; *count < most && frame.reads[begin + *count].row->device == device;) ++*count;
  const uint64_t first = std::exchange(next_, next_ + *count);
  void* const stream = frame.reads[begin].row->stream;
  if (const int error = backend_->observe(&frame.runs[begin], int64_t(*count), address_ + slot, first, device, stream))
    return error;
  for (size_t i = 0; i < *count; ++i) {
    const PendingRowPtr& row = frame.reads[begin + i].row;
    row->slot = slots_ + slot + i;
    row->stamp = first + i;
    row->state = PendingRow::State::pending;
    in_flight_.push_back(row);
  }
  return 0;
}

int RowTable::send(PendingRows* frame) {
  int error = 0;
  for (size_t done = 0, count = 0; done < frame->reads.size() && error == 0; done += count)
    error = enqueue(*frame, done, &count);
  frame->sent(error);
  return error;
}

void RowTable::wait(const std::vector<PendingRowPtr>& rows) const {
  for (const PendingRowPtr& awaited : rows) {
    if (awaited->poll()) continue;
    int error;
    {
      const pybind11::gil_scoped_release release;
      error = backend_->wait(awaited->device, awaited->stream);
    }
    if (error == kNanwatchCapturing) continue;
    for (const PendingRowPtr& row : rows)
      if (row->device == awaited->device && row->stream == awaited->stream) row->fail(error);
  }
}

}  // namespace nanwatch
