// Interfaces between CallRecorder and gradients/, which is built on top of it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "blackbox/layout.h"
#include "recorder/batch_start.h"
#include "recorder/frame.h"

namespace nanwatch {

// A recorded call, as its gradients refer to it.
struct CallOrigin {
  int64_t batch = 0;
  int32_t node = 0, caller = -1;
  bool recomputed = false;
  std::shared_ptr<const BatchStart> start = {};  // lives as long as a gradient of the batch can still come
  uint32_t box = box::kUnnamed;  // the number of the module in the black box
};

// Follows the gradients of recorded calls. Used under the interpreter lock.
class GradientTracker {
 public:
  virtual ~GradientTracker() = default;

  // False once gradients are no longer followed.
  virtual bool is_active() const = 0;
  // Leaves hooks for the gradients of the tensors of a call. `keep`: for a call in compiled code, holds that call.
  virtual void follow(const std::vector<GradientCandidate>& candidates, const CallOrigin& call,
                      std::shared_ptr<const void>* keep) = 0;
  // Finishes the backwards that ended by an exception. False with a Python exception set.
  virtual bool finish_broken_backwards() = 0;
};

}  // namespace nanwatch
