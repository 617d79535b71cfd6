#include "device/pending_row.h"

#include "ops/dense.h"

namespace nanwatch {
namespace {

std::unique_ptr<const Layout> layout_of(const at::Tensor& x, const at::Tensor& run) {
  if (x.is_contiguous()) return nullptr;
  auto layout = std::make_unique<Layout>(Layout{x.sizes().vec(), run.strides().vec(), x.numel() / run.numel()});
  for (int64_t d = 0; d < x.dim(); ++d)
    if (run.size(d) == 1) layout->strides[size_t(d)] = 0;
  return layout;
}

}  // namespace

void Layout::apply(double* values) const {
  for (const int count :
       {column::num_nan, column::num_posinf, column::num_neginf, column::num_zero, column::num_subnormal})
    values[count] *= double(repeats);
  if (values[column::first_nonfinite] < 0) return;
  const auto place = int64_t(values[column::first_nonfinite]);
  int64_t position = 0, weight = 1;
  for (size_t d = sizes.size(); d-- > 0; weight *= sizes[d])
    if (strides[d] != 0) position += place / strides[d] % sizes[d] * weight;
  values[column::first_nonfinite] = double(position);
}

PendingRowPtr PendingRows::collect(const at::Tensor& x, Format format, int device) {
  const auto row = std::make_shared<PendingRow>();
  row->device = device;
  row->collector = this;
  const at::Tensor run = dense(x);
  if (x.numel() != 0) row->layout = layout_of(x, run);
  reads.push_back({row, run.storage(), {run.const_data_ptr(), run.numel(), int32_t(format)}});
  return row;
}

// The stream on which the frame reads tensors of the device.
const PendingRows::StreamSlot& PendingRows::stream_slot_of(int device, const NanwatchBackend& backend) {
  for (const StreamSlot& stream_slot : stream_slots)
    if (stream_slot.device == device) return stream_slot;
  StreamSlot stream_slot{device, nullptr, 0, 0};
  stream_slot.error = backend.stream(device, &stream_slot.stream, &stream_slot.capturing);
  stream_slots.push_back(stream_slot);
  return stream_slots.back();
}

}  // namespace nanwatch
