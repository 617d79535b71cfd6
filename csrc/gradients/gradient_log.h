// Gradients of the inputs, outputs and weights of watched modules, as a backward makes them.
//
// A recorded call whose outputs have a graph leaves a hook at the node behind each of its tensors. The hooks live in
// the graph and die with it; they hold no tensor, and pass gradients on unchanged. At a leaf, which outlives graphs,
// there is one hook for all calls. A gradient of plain memory is read without the interpreter lock; one on a device is
// sent to be read, in stream order, and nobody waits. The gradients of one backward become frames when it is over and
// its rows have come; see GradientRecorder.
#pragma once

#include <torch/csrc/autograd/function_hook.h>

#include <memory>
#include <mutex>
#include <vector>

#include "gradients/backward.h"
#include "recorder/call_observer.h"
#include "recorder/subscriptions.h"

namespace nanwatch {

class GradientRecorder;

class GradientLog : public std::enable_shared_from_this<GradientLog> {
 public:
  // `observe` as in Helpers; with `counts` it makes every row. The owner outlives its log, or says so with `leave`.
  GradientLog(GradientRecorder* owner, std::shared_ptr<const Subscriptions> events, pybind11::object observe,
              const Options& options)
      : subscriptions(std::move(events)),
        owner_(owner),
        observe_(std::move(observe)),
        verify_hits_(options.verify_hits),
        may_be_pending_(!options.waits_for_calls && options.may_be_pending()),
        options_(options) {}
  GradientLog(const GradientLog&) = delete;
  GradientLog& operator=(const GradientLog&) = delete;
  ~GradientLog();

  // Leaves hooks for the gradients of the tensors of a call. Without a graph behind its outputs there is none to come,
  // unless the call lies `in_compiled_code`: of such only weights are followed, and `keep` holds the call.
  void follow(const std::vector<GradientCandidate>& candidates, const CallOrigin& call, Labels& labels,
              std::shared_ptr<const void>* keep);

  // A gradient came at `place` of the graph. Called by the hooks, on any thread.
  void on_gradient(const at::Tensor& gradient, const Place& place, const std::vector<GradientUser>& users);
  // Returns those of the calls that used a leaf whose gradient comes now.
  std::vector<GradientUser> users_now(const std::vector<std::weak_ptr<const GradientCall>>& calls,
                                      const std::vector<std::pair<Part, Labels::Id>>& places);

  // The backward of this number; the next one that ended by an exception. The caller holds the interpreter lock.
  std::unique_ptr<Backward> take(int64_t task);
  std::unique_ptr<Backward> take_broken();
  // Takes the backward under way on this thread if it is non-finite. Gradients that still come make a backward of
  // their own.
  std::unique_ptr<Backward> take_nonfinite();
  // The pending rows that the one under way on this thread is still waiting for.
  std::vector<PendingRowPtr> pending_rows();

  void over(int64_t task, bool completed);
  void spend(int64_t nanoseconds);  // on this thread's backward
  void leave() { owner_ = nullptr; }

  // Takes this log's hook from a leaf.
  void release(const at::Tensor& leaf);

  const std::shared_ptr<const Subscriptions> subscriptions;
  std::mutex mutex;

 private:
  pybind11::object kept_owner() const;
  Backward* find(int64_t task);
  bool open(int64_t task);
  // Sends a gradient on a device to be read; null where that is not to be had.
  PendingRowPtr enqueue_read(const at::Tensor& gradient);
  // Fills the row. After an error that was reported, the row is unknown and not Python's.
  Finite read(const at::Tensor& gradient, int64_t batch, RowData* row, int64_t* bytes);
  PyObject* row_from_python(const at::Tensor& gradient, Labels::Id label, int64_t batch);

  GradientRecorder* owner_;  // used under the interpreter lock
  pybind11::object observe_;
  const bool verify_hits_, may_be_pending_;
  const Options options_;
  std::vector<std::unique_ptr<Backward>> backwards_;
  std::vector<Labels::Id> labels_;  // of a tensor's gradient, by that of the tensor
  int64_t next_number_ = 0;
};

}  // namespace nanwatch
