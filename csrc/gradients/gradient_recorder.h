// Gradients of the inputs, outputs and weights of watched modules, as a backward makes them.
//
// A recorded call whose outputs have a graph leaves a hook at the node behind each of its tensors. The hooks live in
// the graph and die with it; they hold no tensor, and pass gradients on unchanged. At a leaf, which outlives graphs,
// there is one hook for all calls. A gradient of plain memory is read without the interpreter lock; one on a device is
// sent to be read, in stream order, and nobody waits. The gradients of one backward become frames when it is over and
// its rows have come (gradient_frames.cpp).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "gradients/backward.h"
#include "recorder/call_recorder.h"
#include "recorder/subscriptions.h"

namespace nanwatch {

class GradientRecorder : public std::enable_shared_from_this<GradientRecorder> {
 public:
  // `recorder` owns this, and outlives it or calls `leave`.
  GradientRecorder(CallRecorder* recorder, const Options& options);
  GradientRecorder(const GradientRecorder&) = delete;
  GradientRecorder& operator=(const GradientRecorder&) = delete;
  ~GradientRecorder();

  // ---- for the recorder, under the interpreter lock. Those that return a bool return false with a Python error set.

  // False once gradients are no longer followed.
  bool is_active() const { return recorder_ != nullptr; }
  // Leaves hooks for the gradients of the tensors of a call. Without a graph behind its outputs there is none to come,
  // unless the call lies in compiled code: of such only weights are followed, and `keep` holds the call.
  void follow(const std::vector<GradientCandidate>& candidates, const CallOrigin& call,
              std::shared_ptr<const void>* keep);
  bool finish_broken_backwards();
  // Finishes the backward under way on this thread, as far as it has come, if something in it is not finite. Gradients
  // that still come make a backward of their own.
  bool finish_nonfinite_backward();
  // Notes on the non-finite rows of these batches' backwards why they are meant.
  static void excuse(FrameRing& ring, const std::vector<int64_t>& batches, const pybind11::object& note);
  // Takes the hooks from these leaves, and follows no more gradients.
  void stop(const std::vector<at::Tensor>& leaves);
  void leave() { recorder_ = nullptr; }

  // ---- for the hooks, on any thread, without the interpreter lock

  // A gradient came at a place of the graph.
  void on_gradient(const at::Tensor& gradient, const void* at, uint32_t nr, const std::vector<GradientUser>& users);
  // Returns those of the users of a leaf whose gradient comes now.
  std::vector<GradientUser> users_now(const std::vector<GradientUser>& alive);
  void over(int64_t task, bool completed);

  const std::shared_ptr<Subscriptions> subscriptions;

 private:
  pybind11::object kept_owner() const;
  Backward* find(int64_t task);
  bool open(int64_t task);
  std::unique_ptr<Backward> take(int64_t task);
  bool finish(std::unique_ptr<Backward> backward);
  bool report(CallRecorder& recorder, Backward& backward);
  // Sends a gradient on a device to be read; null where that is not to be had.
  PendingRowPtr enqueue_read(const at::Tensor& gradient);
  // Fills the event. Returns false after an error that was reported.
  bool read(const at::Tensor& gradient, int64_t batch, GradientEvent* event, int64_t* bytes);
  PyObject* record_from_python(const at::Tensor& gradient, Labels::Id label, int64_t batch);

  CallRecorder* recorder_;  // null once gradients are no longer followed; under the interpreter lock
  pybind11::object observe_;
  const Options options_;
  std::mutex mutex_;  // of the backwards
  std::vector<std::unique_ptr<Backward>> backwards_;
  std::vector<Labels::Id> labels_;  // of a tensor's gradient, by that of the tensor
  int64_t next_number_ = 0;
};

}  // namespace nanwatch
