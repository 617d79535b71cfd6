#include "device/pending_row.h"

namespace nanwatch {

PendingRowPtr PendingRows::collect(const at::Tensor& x, Format format, int device) {
  const auto row = std::make_shared<PendingRow>();
  row->device = device;
  row->collector = this;
  const size_t at = geometry.size();
  geometry.insert(geometry.end(), x.sizes().begin(), x.sizes().end());
  geometry.insert(geometry.end(), x.strides().begin(), x.strides().end());
  reads.push_back({row, x.storage(), x.const_data_ptr(), format, x.dim(), at});
  return row;
}

// The stream on which the frame reads tensors of the device.
const PendingRows::StreamSlot& PendingRows::stream_slot_of(int device, const NanwatchBackend& backend) {
  for (const StreamSlot& stream_slot : stream_slots)
    if (stream_slot.device == device) return stream_slot;
  StreamSlot stream_slot{device, nullptr, 0, 0};
  stream_slot.error = backend.stream(device, &stream_slot.stream, &stream_slot.capture);
  stream_slots.push_back(stream_slot);
  return stream_slots.back();
}

}  // namespace nanwatch
