#include "device/pending_row.h"

#include "device/graph_rows.h"

namespace nanwatch {

LatePtr LateFrame::collect(const at::Tensor& x, Format format, int device) {
  const auto row = std::make_shared<LateRow>();
  row->device = device;
  row->collector = this;
  row->graph = graph();
  const size_t at = geometry.size();
  geometry.insert(geometry.end(), x.sizes().begin(), x.sizes().end());
  geometry.insert(geometry.end(), x.strides().begin(), x.strides().end());
  reads.push_back({row, x.storage(), x.const_data_ptr(), format, x.dim(), at});
  return row;
}

// The stream on which the frame reads tensors of the device.
const LateFrame::Lane& LateFrame::lane_of(int device, const NanwatchBackend& backend) {
  for (const Lane& lane : lanes)
    if (lane.device == device) return lane;
  Lane lane{device, nullptr, 0, 0};
  lane.error = backend.stream(device, &lane.stream, &lane.capture);
  lanes.push_back(lane);
  return lanes.back();
}

}  // namespace nanwatch
