// CallRecorder's part for gradients: follows those of its calls, and makes frames of what came in a backward.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gradients/gradient_log.h"
#include "recorder/call_recorder.h"

namespace nanwatch {

// All of it is used under the interpreter lock. Functions that return a bool return false with a Python exception set.
class GradientRecorder {
 public:
  // `recorder` owns this.
  GradientRecorder(CallRecorder* recorder, const Options& options);
  GradientRecorder(const GradientRecorder&) = delete;
  GradientRecorder& operator=(const GradientRecorder&) = delete;
  ~GradientRecorder();

  // False once gradients are no longer followed.
  bool is_active() const { return log_ != nullptr; }
  void follow(const std::vector<GradientCandidate>& candidates, const CallOrigin& call,
              std::shared_ptr<const void>* keep);
  bool finish_broken_backwards();

  // Finishes the backward under way on this thread, as far as it has come, if something in it is not finite.
  bool finish_nonfinite_backward();
  // Makes the frames of a backward and calls `on_backward_end`.
  bool report(Backward& backward);

  // Notes on the non-finite rows of these batches' backwards why they are meant.
  void excuse(const std::vector<int64_t>& batches, const pybind11::object& note);
  // Takes the hooks from these leaves, and follows no more gradients.
  void stop(const std::vector<at::Tensor>& leaves);

  // For the log: the Python object that has to live while this is used, what it asks, and what it reports.
  pybind11::object self();
  std::string label_text(Labels::Id label) { return recorder_.observer().label_text(label); }
  PendingRowPtr enqueue_read(const at::Tensor& gradient) { return recorder_.observer().enqueue_read(gradient); }
  bool backward_started();
  bool backward_ended(std::unique_ptr<Backward> backward);

 private:
  CallRecorder& recorder_;
  std::shared_ptr<GradientLog> log_;  // null once gradients are no longer followed
};

}  // namespace nanwatch
