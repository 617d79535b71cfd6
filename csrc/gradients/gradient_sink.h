// Interface between a GradientLog and its owner. The caller holds the interpreter lock.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "device/pending_row.h"
#include "gradients/backward.h"
#include "recorder/labels.h"

namespace nanwatch {

class GradientSink {
 public:
  // The Python object that has to live while the sink is used.
  virtual pybind11::object owner() = 0;
  virtual std::string label_text(Labels::Id label) = 0;
  // Sends a gradient on a device to be read; null where that cannot be.
  virtual PendingRowPtr enqueue_read(const at::Tensor& gradient) = 0;
  // These return false with a Python exception set.
  virtual bool backward_started() = 0;
  virtual bool backward_ended(std::unique_ptr<Backward> backward) = 0;

 protected:
  ~GradientSink() = default;
};

}  // namespace nanwatch
