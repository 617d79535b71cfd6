// CallObserver: makes the records of a module call's frame. It walks over weights, buffers, inputs and outputs, and
// decides what has to be read. The rare cases (a tensor that is not plain, a non-finite value, a container of an
// unknown type) go to the Python functions that also serve without the compiled part.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "blackbox/layout.h"
#include "cpu/range_cpu.h"
#include "recorder/frame.h"
#include "recorder/outside_compiler.h"
#include "ops/plain_view.h"
#include "recorder/record_python.h"
#include "device/row_table.h"
#include "recorder/read_cache.h"

namespace nanwatch {

// Counts that do not depend on the machine.
struct Counters {
  int64_t calls = 0, frames = 0, tensors = 0, tensors_read = 0, bytes_read = 0, cache_hits = 0, stale_hits = 0;
  int64_t nanoseconds = 0;  // spent here; only when asked for
};

// The members of python/nanwatch/recording/events.py's Settings that are used here.
#define NANWATCH_SETTINGS(X)      \
  X(size_t, max_frames)           \
  X(int64_t, every)               \
  X(std::vector<int64_t>, traced) \
  X(bool, weights)                \
  X(bool, buffers)                \
  X(bool, inputs)                 \
  X(bool, outputs)                \
  X(bool, verify_hits)            \
  X(bool, gradients)              \
  X(bool, counts)                 \
  X(bool, fingerprints)           \
  X(bool, black_box)              \
  X(int64_t, sketches)

struct Options {
  explicit Options(pybind11::handle settings)
#define NANWATCH_READ(type, name) name(settings.attr(#name).cast<type>()),
      : NANWATCH_SETTINGS(NANWATCH_READ) waits_for_calls(settings.attr("check").cast<std::string>() == "module") {
  }
#undef NANWATCH_READ
#define NANWATCH_MEMBER(type, name) type name;
  NANWATCH_SETTINGS(NANWATCH_MEMBER)
#undef NANWATCH_MEMBER
  bool waits_for_calls;  // for the rows of each call that a device makes, in place of each batch's

  bool reads(Role role) const {
    return role == Role::weight ? weights : role == Role::buffer ? buffers : role == Role::input ? inputs : outputs;
  }
  // Returns whether Python makes the records of this role in this batch.
  bool is_pythons(Role role, int64_t batch) const {
    return role == Role::output && sketches > 0 && batch % sketches == 0;
  }
  // A device makes ranges only, and so do the readers here: Python adds counts and fingerprints.
  bool may_be_pending() const { return !counts && !fingerprints; }
};

struct Helpers {
  pybind11::object observe;       // (value, label, role, allow_inf, batch) -> Row
  pybind11::object leaves;        // (value, label, objects) -> [(label, leaf)]
  pybind11::object is_container;  // (type) -> bool: may `leaves` find anything inside
  pybind11::object spell_key;     // (key) -> str
  pybind11::object completed;     // (label, role, shape, dtype, values, allow_inf) -> Row
  pybind11::object plain_mask;    // the Note of a tensor that is a mask wherever it goes
};

// A few objects, compared by identity; borrowed. Reused, so that a steady run allocates nothing.
class ObjectSet {
 public:
  void clear() {
    few_.clear();
    if (!many_.empty()) many_.clear();
  }
  // False if it was there.
  bool add(PyObject* object) {
    if (few_.size() < kFew) {
      if (std::find(few_.begin(), few_.end(), object) != few_.end()) return false;
      few_.push_back(object);
      return true;
    }
    if (many_.empty()) many_.insert(few_.begin(), few_.end());
    return many_.insert(object).second;
  }

 private:
  static constexpr size_t kFew = 32;
  std::vector<PyObject*> few_;
  std::unordered_set<PyObject*> many_;
};

// A watched module: its name and what is remembered of the tensors it owns.
struct Node {
  struct Slot {
    pybind11::object name;  // the parameter's, as an object
    Labels::Id label = 0;
    std::shared_ptr<WeightEntry> cached;
    uint64_t key = 0;  // under which `cached` was found
  };
  // One way this module is called in compiled code; see call_observer_compiled.cpp.
  struct Plan {
    struct Value {
      Slot slot;  // with the label
      Role role;
      char kind;
      std::string reason;
    };
    std::string text, class_name;
    std::vector<Value> values;
  };
  std::string name, class_name;
  PyTypeObject* type = nullptr;  // borrowed and only compared: FSDP gives a module another class
  bool observed = true;
  bool is_function = false;  // that is watched like a module; see python/nanwatch/instrumentation/functions.py
  pybind11::object allow_inf = pybind11::bool_(false);  // a bool, or a MaskedScores; handed to Python as it is
  uint32_t box = box::kUnnamed;                         // its number in the black box
  std::vector<Slot> weights, buffers;
  std::deque<std::shared_ptr<Plan>> plans;
  std::shared_ptr<const void> compiled_call;  // its latest call in compiled code, for gradients/
};

// Between the lines of a plan (call_observer_compiled.cpp). No newline: Inductor writes an operator's arguments into
// comments of the code that it makes for a GPU, as they are.
constexpr char kPlanSeparator = '\x1f';

class CallObserver {
 public:
  CallObserver(const Options& options, Helpers helpers);
  ~CallObserver();
  CallObserver(const CallObserver&) = delete;
  CallObserver& operator=(const CallObserver&) = delete;

  // Makes room for a module's weights and buffers before its first call. Small blocks that are made in a forward lie
  // between its activations for good and keep the allocator from joining them: 6 % more at the peak of a training of
  // GPT-2.
  void prepare(Node& node, PyObject* module);

  // Appends the records of a call to `frame`. False with a Python exception set only for what must end the call, such
  // as KeyboardInterrupt. `outermost`: of a call that watched code did not make, whose outputs are always read.
  bool observe(Node& node, PyObject* module, PyObject* args, PyObject* kwargs, PyObject* output, bool outermost,
               OpenFrame* frame);

  // The same for a call in compiled code, whose values come as `plan` says.
  bool observe_compiled(Node& node, Node::Plan& plan, at::TensorList tensors, OpenFrame* frame);
  std::shared_ptr<Node::Plan> plan_of(Node& node, std::string_view text);

  // Sends a tensor of a device to be read, in stream order; null where there is nothing to be had so.
  PendingRowPtr enqueue_read(const at::Tensor& x);
  // Gives the pending records of a frame their place in it. A record that has not completed is not read.
  bool resolve(const Node& node, OpenFrame* frame);

  // Returns whether a tensor of the host is finite, without reading it if it is unchanged since it was last read as a
  // weight. Null for one that the loops cannot read, or that has no version.
  std::optional<bool> is_finite(PyObject* object, int64_t batch);

  void forget_weights() { ++epoch_; }
  // A step has written these, perhaps past the version counter. False if none of them is known.
  bool forget_weights(const at::Tensor& x);
  // Nothing is remembered of activations from batch to batch.
  void end_batch() {
    activations_.clear();
    budget_.end_batch();
  }
  void forget_tensors() {
    activations_.clear();
    weight_cache_.clear();
    masks_.clear();
    ++epoch_;
  }
  const std::string& label_text(Labels::Id id) const { return labels_.text(id); }
  Labels& labels() { return labels_; }
  const pybind11::object& observe_helper() const { return helpers_.observe; }

  Counters counters;
  size_t num_labels() const { return labels_.size(); }
  size_t num_weights() const { return weight_cache_.size(); }

 private:
  struct Walk;  // one walk over one value or one call
  struct HostReader;
  struct DeviceReader;
  enum class Kind : uint8_t { opaque, mapping, container };
  // Where a range may be known from: a batch's activations, or a cache over many batches. `moving` is for what is
  // written past the version counter: it is read within the budget, and nothing is known of it afterwards.
  enum class Memory : uint8_t { activation, weight, moving, none };
  // A tensor that was recognised as a mask, and its record.
  struct Mask {
    WeightEntry tensor;
    pybind11::object record;
  };

  template <typename Action>  // (PyObject* tensor, Node::Slot&) -> bool: go on
  bool each_own(Node& node, PyObject* module, Role role, const Action& action);
  bool own_tensors(Node& node, PyObject* module, Role role, OpenFrame* frame);
  void find_entry(uint64_t key, Node::Slot* slot);
  bool tensor(PyObject* object, Labels::Id label, Role role, const Node& node, Memory memory, Node::Slot* slot,
              OpenFrame* frame);
  bool records(Node& node, PyObject* module, PyObject* args, PyObject* kwargs, PyObject* output, bool outermost,
               OpenFrame* frame);
  bool input_records(const Node& node, PyObject* args, PyObject* kwargs, OpenFrame* frame);
  bool compiled_records(Node& node, Node::Plan& plan, at::TensorList tensors, OpenFrame* frame);
  template <typename Make>
  bool fill_frame(const Node& node, OpenFrame* frame, const Make& make);
  template <typename Make>
  bool fill_once(const Node& node, OpenFrame* frame, const Make& make);
  bool complete(const Node& node, OpenFrame* frame);
  bool meets_device(PyObject* object);
  bool device_tensor(PyObject* object, Labels::Id label, Role role, Memory memory, Node::Slot* slot, OpenFrame* frame);
  bool resolve_record(const Node& node, const PendingRow& pending, const OpenFrame& frame, RecordData* row);
  void unread(Labels::Id label, Role role, const std::string& reason, OpenFrame* frame);
  bool excuse(Labels::Id label, Role role, OpenFrame* frame);
  bool record_from_python(PyObject* value, Labels::Id label, Role role, const Node& node, OpenFrame* frame);
  RangeRow read(const at::Tensor& x, const View& view);
  template <typename Row, typename Reader>
  Row range_of(PyObject* object, int64_t batch, Memory memory, Node::Slot* slot, Reader& reader);
  template <typename Row, typename Reader>
  Row weight_range(const at::Tensor& x, int64_t batch, bool moves, Node::Slot* slot, Reader& reader);
  bool not_read_yet(Labels::Id label, Role role, OpenFrame* frame);
  bool known_mask(const at::Tensor& x, Labels::Id label, Role role, OpenFrame* frame);
  void remember_mask(const at::Tensor& x, const Content& content, PyObject* record);
  RangeRow hit(const CacheEntry& entry, const View& view);
  std::optional<Kind> kind_of(PyTypeObject* type);

  const Options options_;
  const bool may_be_pending_, has_turns_;  // of Python's
  Helpers helpers_;
  Labels labels_;
  ActivationCache activations_;
  WeightCache weight_cache_;
  ReadBudget budget_;
  std::unordered_map<uint64_t, Mask> masks_;
  std::unordered_map<PyTypeObject*, Kind> kinds_;  // keys owned
  int32_t epoch_ = 0;
  int64_t first_entries_ = 0;  // of weights
  RowTable* table_ = nullptr;  // once a tensor of a device was met
  bool devices_off_ = false;   // their tensors are read like any that is not plain
};

}  // namespace nanwatch
