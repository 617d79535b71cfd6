// A recorded call, as its gradients refer to it.
#pragma once

#include <cstdint>
#include <memory>

#include "blackbox/layout.h"
#include "recorder/batch_start.h"

namespace nanwatch {

struct CallOrigin {
  int64_t batch = 0;
  int32_t node = 0, caller = -1;
  bool recomputed = false;
  std::shared_ptr<const BatchStart> start = {};  // lives as long as a gradient of the batch can still come
  uint32_t box = box::kUnnamed;                  // the number of the module in the black box
};

}  // namespace nanwatch
