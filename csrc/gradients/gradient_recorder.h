// CallRecorder's part for gradients: follows those of its calls, and makes frames of what came in a backward.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gradients/gradient_log.h"
#include "gradients/gradient_sink.h"
#include "recorder/call_recorder.h"

namespace nanwatch {

// All of it is used under the interpreter lock. Functions that return a bool return false with a Python exception set.
class GradientRecorder final : public GradientTracker, private GradientSink {
 public:
  // `recorder` owns this.
  GradientRecorder(CallRecorder* recorder, const Options& options);
  GradientRecorder(const GradientRecorder&) = delete;
  GradientRecorder& operator=(const GradientRecorder&) = delete;
  ~GradientRecorder() override;

  bool is_active() const override { return log_ != nullptr; }
  void follow(const std::vector<GradientCandidate>& candidates, const CallOrigin& call,
              std::shared_ptr<const void>* keep) override;
  bool finish_broken_backwards() override;

  // Finishes the backward under way on this thread, as far as it has come, if something in it is not finite.
  bool finish_nonfinite_backward();
  // Makes the frames of a backward and calls `on_backward_end`.
  bool report(Backward& backward);

  // Notes on the non-finite rows of these batches' backwards why they are meant.
  void excuse(const std::vector<int64_t>& batches, const pybind11::object& note);
  // Takes the hooks from these leaves, and follows no more gradients.
  void stop(const std::vector<at::Tensor>& leaves);

 private:
  pybind11::object owner() override;
  std::string label_text(Labels::Id label) override { return recorder_.observer().label_text(label); }
  PendingRowPtr enqueue_read(const at::Tensor& gradient) override {
    return recorder_.observer().enqueue_read(gradient);
  }
  bool backward_started() override;
  bool backward_ended(std::unique_ptr<Backward> backward) override;

  CallRecorder& recorder_;
  std::shared_ptr<GradientLog> log_;  // null once gradients are no longer followed
};

}  // namespace nanwatch
