// Gradients of the inputs, outputs and weights of watched modules, as a backward makes them.
//
// A recorded call whose outputs have a graph leaves a hook at the node behind each of its tensors. The hooks live in
// the graph and die with it; they hold no tensor, and pass gradients on unchanged. At a leaf, which outlives graphs,
// there is one hook for all calls. A gradient of plain memory is read without the interpreter lock; one on a device is
// sent to be read, in stream order, and nobody waits. The gradients of one backward become frames when it is over and
// its rows have come.
//
// With `output_gradients` alone, the outputs of outermost calls are followed, and a backward is kept from its first
// gradient on that is not finite, or that a device reads, or if its loss is not finite.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "ops/tensor_view.h"
#include "recorder/call_recorder.h"

namespace nanwatch {

enum class Part : uint8_t { output, input, weight };
inline constexpr const char* kParts[] = {"output", "input", "weight"};

// A recorded call that may get gradients.
struct GradientCall : CallOrigin {
  int64_t number = 0;         // calls are numbered as they end, so children before their parents
  mutable int64_t task = -1;  // the backward that last brought a gradient of its outputs; under the recorder's lock
};

// Whose gradient it is.
struct GradientUser {
  std::shared_ptr<const GradientCall> call;
  Part part;
  Labels::Id label;
};

struct GradientEvent {
  GradientUser user = {};
  int64_t arrival = 0;  // the same for all users of one gradient
  bool has_nonfinite = false;
  RecordData row;  // as it was read, perhaps under the label of another user; its python is owned by the Backward
  PendingRowPtr pending;  // where a device makes the range
};

// Where a gradient came: a node of the graph and which of its results, or the hook of a leaf. And its state there:
// which tensor, over which memory, in which version.
struct GradientPlace {
  const void* at = nullptr;  // only compared
  uint32_t nr = 0;
  const at::TensorImpl* tensor = nullptr;
  uint64_t key = 0;
  int64_t version = -1;  // without one nothing shows writes

  GradientPlace() = default;
  GradientPlace(const void* its_place, uint32_t its_nr, const at::Tensor& x)
      : at(its_place), nr(its_nr), tensor(x.unsafeGetTensorImpl()) {
    if (can_be_remembered(x)) version = int64_t(x._version());
    if (has_only(x, kPlainKeys) || has_only(x, kPlainCudaKeys)) key = Content::key_of(x);  // others may have no storage
  }
  bool operator==(const GradientPlace&) const = default;
};

// Gradients of one run of the autograd engine, in the order in which they came. Destroy it under the interpreter lock.
struct Backward {
  int64_t task;
  bool has_nonfinite = false;  // something in it is not finite
  bool is_over = false;        // it ended by an exception, of which the engine gives no sign
  std::vector<GradientEvent> events;
  std::vector<int64_t> shapes;
  std::vector<pybind11::object> python_rows;
  int64_t arrivals = 0, tensors_read = 0, bytes_read = 0;

  explicit Backward(int64_t its_task) : task(its_task) {}

  // Returns whether this is the gradient that came last: the users of a place come one directly after the other.
  bool is_known(const GradientPlace& place) const { return place.version >= 0 && place == latest_; }
  // Adds an event for each user of the gradient that came last.
  void add_known(std::span<const GradientUser> users) { add(users, latest_, GradientEvent(events.back())); }
  // The same of a gradient that was read, or sent to be read. Takes the row's python.
  void add_read(std::span<const GradientUser> users, const at::Tensor& gradient, const GradientPlace& place,
                GradientEvent read);

  // Under the interpreter lock: the pending rows that are still to come, and what those that have come say.
  std::vector<PendingRowPtr> pending_rows() const;
  void take_completed();

 private:
  void add(std::span<const GradientUser> users, const GradientPlace& place, const GradientEvent& event);

  GradientPlace latest_;
};

class GradientRecorder : public std::enable_shared_from_this<GradientRecorder> {
 public:
  // `recorder` owns this, and outlives it or calls `leave`.
  GradientRecorder(CallRecorder* recorder, const Options& options);
  GradientRecorder(const GradientRecorder&) = delete;
  GradientRecorder& operator=(const GradientRecorder&) = delete;
  ~GradientRecorder();

  // ---- for the recorder, under the interpreter lock. Those that return a bool return false with a Python error set.

  // Returns whether gradients of a call's tensors are followed; no longer after `stop`.
  bool follows(bool is_outermost) const { return recorder_ != nullptr && (options_.gradients || is_outermost); }
  // Leaves hooks for the gradients of the tensors of a call. Without a graph behind its outputs there is none to come,
  // unless the call lies in compiled code: of such only weights are followed, and `keep` holds the call.
  void follow(const std::vector<GradientCandidate>& candidates, const CallOrigin& call,
              std::shared_ptr<const void>* keep);
  bool finish_broken_backwards();
  int64_t broken_backward();  // one that an exception has ended, or -1
  // Finishes the backward under way on this thread, as far as it has come, if something in it is not finite. Gradients
  // that still come make a backward of their own.
  bool finish_nonfinite_backward();
  // Notes on the non-finite rows of these batches' backwards why they are meant.
  static void excuse(FrameRing& ring, const std::vector<int64_t>& batches, const pybind11::object& note);
  // Takes the hooks from these leaves, and follows no more gradients.
  void stop(const std::vector<at::Tensor>& leaves);
  void leave() { recorder_ = nullptr; }
  // Magnitudes of the latest finite losses in plain memory, the oldest first; with `gradients` Python reads them.
  std::vector<double> losses() const;

  // ---- for the hooks, on any thread, without the interpreter lock

  // A gradient came at a place of the graph.
  void on_gradient(const at::Tensor& gradient, const void* at, uint32_t nr, std::span<const GradientUser> users);
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
  std::atomic<int64_t> latest_task_ = -1;  // whose loss was looked at
  std::array<double, 8> losses_{};         // magnitudes of the latest finite ones
  size_t num_losses_ = 0;                  // ever
  std::vector<Labels::Id> labels_;         // of a tensor's gradient, by that of the tensor
  int64_t next_number_ = 0;
};

}  // namespace nanwatch
