// CallRecorder: finds the batch of a call, keeps the latest frames in a ring, and calls back into Python.
#pragma once

#include <array>
#include <atomic>
#include <limits>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "blackbox/black_box.h"
#include "recorder/batch_start.h"
#include "recorder/call_observer.h"
#include "recorder/peak_magnitudes.h"

namespace nanwatch {

// Events that the recorder reports only while somebody subscribes to them, numbered as in recording/events.py.
enum Event : uint32_t { kBatchStart = 1, kBatchEnd = 2, kFrame = 4, kBackwardStart = 8 };

// Counts the subscriptions to each event. Changed under the interpreter lock, asked on any thread.
class Subscriptions {
 public:
  bool has(Event event) const { return (mask_.load(std::memory_order_relaxed) & event) != 0; }
  void add(uint32_t events, int by) {
    uint32_t mask = 0;
    for (size_t i = 0; i < counts_.size(); ++i) {
      if ((events >> i & 1u) != 0) counts_[i] += by;
      if (counts_[i] > 0) mask |= 1u << i;
    }
    mask_.store(mask, std::memory_order_relaxed);
  }

 private:
  std::array<int, 4> counts_{};
  std::atomic<uint32_t> mask_{0};
};

// One subscription to some events. It does not keep the recorder alive.
class Subscription {
 public:
  Subscription(std::shared_ptr<Subscriptions> all, uint32_t events) : all_(std::move(all)), events_(events) {
    set_active(true);
  }
  bool active() const { return active_; }
  void set_active(bool active) {
    if (active == active_) return;
    active_ = active;
    all_->add(events_, active ? 1 : -1);
  }

 private:
  std::shared_ptr<Subscriptions> all_;
  uint32_t events_;
  bool active_ = false;
};

class GradientRecorder;

class CallRecorder {
 public:
  CallRecorder(const Options& options, Helpers helpers, pybind11::object events, pybind11::object frame_type,
               pybind11::object start_type);
  ~CallRecorder();
  CallRecorder& operator=(CallRecorder&&) = delete;

  int32_t add_node(const std::string& name, pybind11::handle module, bool observed, pybind11::object allow_inf);
  // For a node that another module of this name and class gets.
  void set_allow_inf(int32_t node, pybind11::object allow_inf) {
    nodes_[size_t(node)]->allow_inf = std::move(allow_inf);
  }

  // Makes the call of a module, by `inner` as call_past_wrappers does, and records it. A new reference, or null with an
  // exception set, as in the C API.
  PyObject* run(int32_t node, PyObject* module, PyObject* inner, PyObject* args, PyObject* kwargs);

  // The same for a call in compiled code, which operators in the graph report; see call_recorder_compiled.cpp. These
  // throw error_already_set. `begin` is for a call that no watched call of the same graph has made. Its caller is then
  // kNoCaller.
  static constexpr int64_t kNoCaller = -1;
  void begin_compiled(int64_t node, std::string_view plan, at::TensorList tensors);
  void record_compiled(int64_t node, PyObject* module, int64_t caller, std::string_view plan, at::TensorList tensors);

  // For gradients/: these make frames of backwards. Functions that return a bool return false with a Python exception
  // set.
  void set_gradients(std::shared_ptr<GradientRecorder> gradients) { gradients_ = std::move(gradients); }
  GradientRecorder* gradients() const { return gradients_.get(); }
  // Calls a callback of RecorderEvents.
  bool notify(const char* method, pybind11::args arguments, pybind11::object* answer = nullptr);
  pybind11::object to_python(const FrameData& frame) const;
  pybind11::object name_of(int32_t caller) const;
  bool is_traced(int64_t batch) const;
  bool traces() const { return !traced_.empty(); }
  FrameRing& ring() { return ring_; }
  // A frame whose ranges are known goes into the ring.
  void keep(FrameData& frame);
  void add_frame(int64_t batch, int32_t node, const pybind11::list& records);  // of an optimizer's step

  // The batch, the name and the class of the module of the innermost call under way on this thread, if it is recorded;
  // else None. `add_output` gives the frame of this call one more output.
  pybind11::object call_under_way();
  // Returns the name of the module of this thread's outermost call, or None.
  pybind11::object outermost();
  void add_output(const std::string& label, pybind11::object tensor);

  // How many frames there have been, and of these the ones after the first `kept`, as far as the ring holds them.
  std::pair<int64_t, pybind11::list> frames_since(int64_t kept) const;
  std::optional<int64_t> frames_of_batch(int64_t batch) const { return ring_.frames_of(batch); }
  int64_t frames_kept() const { return ring_.pushed(); }

  // (batch, names of places that are new, values by place as float64); see peak_magnitudes.h. What was taken is gone.
  pybind11::tuple take_peaks() { return peaks_to_python(peaks_); }
  // The same of the gradients of all backwards since they were last taken; the batch is the latest of theirs.
  pybind11::tuple take_gradient_peaks() { return peaks_to_python(gradient_peaks_); }
  void add_gradient_peak(int64_t batch, int32_t node, const RecordData& record) {
    gradient_peaks_.add_gradient(batch, node, record);
  }

  // The start of this thread's batch, or None; with `keeps_starts`.
  pybind11::object start();
  // Those of the ended batches whose graphs live.
  pybind11::list ended_starts() const;
  void forget_starts();
  at::Tensor step_generator;  // the state of the CPU's random numbers when they were last forgotten
  // Keeps the start of a batch whose backward runs until `forget_starts`, as the graph may be gone before the step.
  void keep_start(std::shared_ptr<const BatchStart> start) { kept_start_ = std::move(start); }
  // How many other threads are inside a batch.
  int64_t num_other_threads() { return num_inside_ - int64_t(this_thread().is_inside); }

  // Names of the modules of which a weight was read in a call.
  std::vector<std::string> called() const;
  // Ends the backwards that an exception ended without a sign. Throws what a callback raises.
  void settle();
  // An optimizer of these parameter groups is about to step. Forgets the starts, and returns true, if the learning
  // rates and the first small gradients are finite. False where Python has to look, as for None.
  bool step_begins(pybind11::handle groups);
  // An optimizer of these lists of tensors has made a step, perhaps past the version counter. Reads the weights for the
  // next batch, within its budget, and returns whether one is not finite. All weights may have changed where no
  // optimizer holds any that is known here, as when it holds copies.
  bool stepped(const pybind11::list& groups);

  CallObserver& observer() { return observer_; }
  int64_t latest_batch() const { return latest_batch_; }

  std::array<pybind11::object*, 1> references() { return {&events_}; }  // for Python's garbage collector

  int paused = 0;  // nothing is recorded while it is not 0: 1 after pause() or stop(), and 2 for each re-run under way
  const std::shared_ptr<Subscriptions> subscriptions = std::make_shared<Subscriptions>();
  bool keeps_starts = false;
  StartSignals signals;
  // For take_peaks: those of batches from this one on, whose ends are reported.
  int64_t gathers_from = std::numeric_limits<int64_t>::max();
  bool gathers_inputs = false;          // among them
  bool gathers_gradient_peaks = false;  // for take_gradient_peaks
  // Set when weights are gathered from shards, as FSDP does: into the same storage each time, past the version counter,
  // so that writes to the shards are not seen. Then no weight's range is taken from the batch before.
  bool gathers_weights = false;

 private:
  // The calls under way on one thread, outermost first.
  struct Thread {
    uint64_t recorder;
    std::vector<int32_t> nodes = {};
    int64_t batch = 0;
    bool recomputed = false, active = false;
    bool compiled = false;   // the outermost call runs in compiled code, whose end an exception leaves out
    bool recording = false;  // Python code called from here may call a watched module: that call is not recorded
    bool is_inside = false;  // of the batch under way, which is one of a module
    std::vector<AddedOutput> added = {};          // to calls under way
    PyObject *args = nullptr, *kwargs = nullptr;  // of the outermost call under way, which keeps them alive
    pybind11::object compiled_inputs = {};        // weak references to the arguments of a compiled outermost call
    std::shared_ptr<BatchStart> start = {};       // of the batch under way
    // Frames of the batch under way, since one waits for a device: the first `num_deferred`. Those behind them keep
    // their memory for the next batch.
    std::vector<OpenFrame> deferred = {};
    size_t num_deferred = 0;
    // Ids of calls under way, by their nodes, of those in which a call has left hooks for gradients.
    std::unordered_map<int32_t, int64_t> call_ids = {};
    OpenFrame frame = {};
    std::vector<GradientCandidate> candidates = {};  // of the call that is observed
    box::Slot* slot = nullptr;                       // in the black box, for the batch under way
  };
  struct Threads;
  struct Recording;

  Thread& this_thread();
  void note_class(Node& node, PyObject* module);
  // Null in a forked child: the file is the parent's.
  box::BlackBox* live_box() const { return box_ == box::BlackBox::active() ? box_ : nullptr; }
  bool begin_batch(Thread& thread, int32_t index, PyObject* module, PyObject* args, PyObject* kwargs);
  bool start_batch(Thread& thread, int32_t index, PyObject* module, PyObject* args, PyObject* kwargs);
  bool end_batch(Thread& thread, bool completed);
  void leave_start(Thread& thread);
  void release_starts();
  bool record(Thread& thread, int32_t node, const ModuleCall& call);
  template <typename Observe>
  bool record_frame(Thread& thread, int32_t index, int32_t caller, std::shared_ptr<const void>* keep,
                    const Observe& observe);
  void follow(Thread& thread, int32_t index, int32_t caller, const std::vector<GradientCandidate>& candidates,
              std::shared_ptr<const void>* keep);
  pybind11::object named_inputs_of(const Thread& thread) const;
  bool tell(const Thread& thread, OpenFrame& frame, int32_t caller, bool is_over);
  bool take_deferred(Thread& thread);
  bool end_compiled(Thread& thread, bool completed);
  bool reports_frames(int64_t batch) const { return subscriptions->has(kFrame) || is_traced(batch); }
  pybind11::tuple peaks_to_python(PeakMagnitudes& peaks);

  CallObserver observer_;
  pybind11::object events_, frame_type_, start_type_;
  pybind11::object extra_;  // the latest answer of `on_batch_start`, while it holds
  std::vector<std::weak_ptr<BatchStart>> ended_starts_;
  std::shared_ptr<const BatchStart> kept_start_;
  int64_t num_inside_ = 0;  // threads
  FrameRing ring_;
  PeakMagnitudes peaks_, gradient_peaks_;
  box::BlackBox* const box_;                     // null: none is wanted
  std::shared_ptr<GradientRecorder> gradients_;  // null when nobody asked for gradients
  int64_t every_;
  bool has_optimizer_ = false;   // one that holds weights
  std::vector<int64_t> traced_;  // sorted
  std::vector<std::unique_ptr<Node>> nodes_;
  int64_t next_batch_ = 0, latest_batch_ = -1, next_call_id_ = 0;
  const uint64_t id_;  // never reused, unlike an address
};

// Scope of the observation of a call. Python code that runs meanwhile may call a watched module; that call is not
// recorded. The frame is left empty in any case: it is thread-local, and Python objects in it would outlive the
// interpreter.
struct CallRecorder::Recording {
  Thread& thread;
  explicit Recording(Thread* of_thread) : thread(*of_thread) { thread.recording = true; }
  Recording& operator=(Recording&&) = delete;
  ~Recording() {
    thread.recording = false;
    thread.frame.clear();
  }
};

}  // namespace nanwatch
