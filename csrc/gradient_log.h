// The gradients of what watched modules are given, give and own, as a backward makes them.
//
// A recorded call whose outputs have a graph leaves a hook at the node behind each of its tensors. The hooks live in
// the graph and die with it; they hold no tensor and no Python object, and they hand on what they are given. At a leaf,
// which outlives graphs, there is one hook for all calls. A gradient of plain memory is read without the interpreter
// lock. What came in one backward becomes frames when that backward is over; see CallRecorder::finish_backward.
#pragma once

#include <torch/csrc/autograd/function_hook.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "call_observer.h"
#include "recent_gradients.h"

namespace nanwatch {

class CallRecorder;

enum class Part : uint8_t { output, input, weight };

// A recorded call that may get gradients.
struct GradientCall {
  int64_t batch = 0, number = 0;  // calls are numbered as they end, so children before their parents
  int32_t node = 0, caller = -1;
  bool recomputed = false;
  mutable int64_t task = -1;  // the backward that last brought a gradient of its outputs; under the log's lock
};

// Whose gradient it is.
struct GradientUser {
  std::shared_ptr<const GradientCall> call;
  Part part;
  Labels::Id label;
};

struct GradientEvent {
  GradientUser user;
  int64_t arrival;  // the same for all users of one gradient
  bool is_bad;
  RowData row;  // as it was read, perhaps under the label of another user; its python is owned by the Backward
};

// A node of the graph and which of its results, or the hook of a leaf.
struct Place {
  const void* at = nullptr;  // only compared
  uint32_t nr = 0;
  bool is_leaf = false;

  bool operator==(const Place& other) const { return at == other.at && nr == other.nr; }
};

enum class Finite : uint8_t { unknown, yes, no };

// One run of the engine: what came, in the order in which it came. Destroy it under the interpreter lock.
struct Backward {
  int64_t task = -1;
  bool is_bad = false;    // something in it is not finite
  bool is_over = false;   // it ended by an exception, which tells nobody
  bool is_alone = false;  // in a process without others, whose collectives would write past the version counter
  std::vector<GradientEvent> events;
  std::vector<int64_t> shapes;
  std::vector<PyObject*> python_rows;  // owned
  int64_t arrivals = 0, tensors_read = 0, bytes_read = 0, stale_hits = 0;
  int64_t nanoseconds = 0;  // spent in the hooks; only when asked for
  RecentGradients recent;   // by the number of the event

  explicit Backward(int64_t its_task) : task(its_task) {}
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;
  ~Backward();

  // The event that has the row of a gradient that comes now, null where it has to be read.
  const GradientEvent* find(const at::Tensor& gradient, const GradientState& state, const Place& place) const;
  // Adds an event for each user; `row`: of what was known.
  void add(const std::vector<GradientUser>& users, const GradientState& state, const Place& place, const RowData& row,
           bool row_is_bad);
  // The same of what was read, and takes the row's python.
  void add_read(const std::vector<GradientUser>& users, const at::Tensor& gradient, const GradientState& state,
                const Place& place, RowData row, Finite finite);

 private:
  // Whether it came to this very place: the users there come one directly after the other.
  bool came(const GradientState& state, const Place& place) const;

  Place latest_place_;
  GradientState latest_;
};

class GradientLog : public std::enable_shared_from_this<GradientLog> {
 public:
  // `observe` as in Helpers; with `counts` it makes every row. The recorder outlives its log, or says so with `leave`.
  GradientLog(CallRecorder* recorder, pybind11::object observe, const Options& options)
      : measures_time(options.measure_time),
        recorder_(recorder),
        observe_(std::move(observe)),
        counts_(options.counts),
        verify_hits_(options.verify_hits) {}
  GradientLog(const GradientLog&) = delete;
  GradientLog& operator=(const GradientLog&) = delete;
  ~GradientLog();

  // Leaves hooks for the gradients of the tensors of a call. Without a graph behind its outputs there is none to come,
  // unless the call lies `in_compiled_code`: of such only weights are followed, and `keep` holds the call.
  void follow(const std::vector<Tap>& taps, const GradientCall& call, Labels& labels,
              std::shared_ptr<const GradientCall>* keep);

  // A gradient came at `place` of the graph. Called by the hooks, on any thread. Returns its largest magnitude, 0 where
  // that is not finite or not known.
  double arrived(const at::Tensor& gradient, const Place& place, const std::vector<GradientUser>& users);
  // Of all calls that a leaf was used in, those whose gradient comes now.
  std::vector<GradientUser> users_now(const std::vector<std::weak_ptr<const GradientCall>>& calls,
                                      const std::vector<std::pair<Part, Labels::Id>>& places);

  // The backward of this number; the next one that ended by an exception. The caller holds the interpreter lock.
  std::unique_ptr<Backward> take(int64_t task);
  std::unique_ptr<Backward> take_broken();
  // The one under way on this thread if something in it is bad; what still comes is a backward of its own.
  std::unique_ptr<Backward> take_bad();

  void over(int64_t task, bool completed);
  void spend(int64_t nanoseconds);  // on this thread's backward
  void leave() { recorder_ = nullptr; }

  // Takes this log's hook from a leaf.
  void release(const at::Tensor& leaf);

  const bool measures_time;
  std::atomic<bool> tells_start{false};
  // Whether gradients that were finite may have a sum in some leaf that is not; and how often that was looked at.
  std::atomic<bool> sums_may_overflow{false};
  std::atomic<int64_t> sums_looked_at{0};
  std::mutex mutex;

 private:
  pybind11::object recorder() const;
  Backward* find(int64_t task);
  bool open(int64_t task);
  // Fills the row; unknown with an error that was told of, and no python, where nothing could be made of it.
  Finite read(const at::Tensor& gradient, RowData* row, int64_t* bytes);
  PyObject* row_from_python(const at::Tensor& gradient, Labels::Id label);

  CallRecorder* recorder_;  // used under the interpreter lock
  pybind11::object observe_;
  const bool counts_, verify_hits_;
  std::vector<std::unique_ptr<Backward>> backwards_;
  std::vector<Labels::Id> labels_;  // of a tensor's gradient, by that of the tensor
  int64_t next_number_ = 0;
};

}  // namespace nanwatch
