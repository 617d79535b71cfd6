// CallObserver: makes the records of a module call's frame. It walks over weights, buffers, inputs and outputs, and
// decides what has to be read. The rare cases (a tensor that is not plain, a non-finite value, a container of an
// unknown type) go to the Python functions that also serve without the compiled part.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "blackbox/black_box.h"
#include "cpu/range_cpu.h"
#include "device/row_table.h"
#include "ops/tensor_view.h"
#include "recorder/frame.h"
#include "recorder/read_cache.h"
#include "recorder/record_python.h"

namespace nanwatch {

// Counts that do not depend on the machine.
struct Counters {
  int64_t calls = 0, frames = 0, tensors = 0, tensors_read = 0, bytes_read = 0, cache_hits = 0, stale_hits = 0;
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
  X(bool, output_gradients)       \
  X(bool, counts)                 \
  X(bool, fingerprints)           \
  X(bool, black_box)              \
  X(int64_t, sketches)

struct Options {
  explicit Options(pybind11::handle settings)
#define NANWATCH_READ(type, name) name(settings.attr(#name).cast<type>()),
      : NANWATCH_SETTINGS(NANWATCH_READ) waits_for_calls(settings.attr("act_at").cast<std::string>() == "module") {
  }
#undef NANWATCH_READ
#define NANWATCH_MEMBER(type, name) type name;
  NANWATCH_SETTINGS(NANWATCH_MEMBER)
#undef NANWATCH_MEMBER
  bool waits_for_calls;  // for the rows of each call that a device makes, in place of each batch's

  bool reads(Role role) const {
    return role == Role::weight ? weights : role == Role::buffer ? buffers : role == Role::input ? inputs : outputs;
  }
  // Returns whether Python makes the records of this role in this batch: those with counts, fingerprints or sketches,
  // which neither the loops here nor a device make.
  bool is_made_by_python(Role role, int64_t batch) const {
    return counts || fingerprints || (role == Role::output && sketches > 0 && batch % sketches == 0);
  }
};

struct Helpers {
  pybind11::object observe;       // (value, label, role, allow_inf, batch) -> Record
  pybind11::object leaves;        // (value, label, objects) -> [(label, leaf)]
  pybind11::object is_container;  // (type) -> bool: may `leaves` find anything inside
  pybind11::object spell_key;     // (key) -> str
  pybind11::object completed;     // (label, role, shape, dtype, values, allow_inf) -> Record
  pybind11::object plain_mask;    // the Note of a tensor that is a mask wherever it goes
};

// A watched module: its name and what is remembered of the tensors it owns.
struct Node {
  struct Slot {
    pybind11::object name;  // the parameter's, as an object
    Labels::Id label = 0;
    std::shared_ptr<WeightEntry> cached;
    uint64_t key = 0;                 // under which `cached` was found
    const PyObject* value = nullptr;  // only compared: a tensor under two names counts once
  };
  std::string name;
  Labels::Id class_name = 0;
  PyTypeObject* type = nullptr;  // borrowed and only compared: FSDP gives a module another class
  bool observed = true;
  bool is_function = false;  // that is watched like a module; see python/nanwatch/instrumentation/functions.py
  pybind11::object allow_inf = pybind11::bool_(false);  // a bool, or an Excuses; handed to Python as it is
  uint32_t box = box::kUnnamed;                         // its number in the black box
  std::vector<Slot> weights, buffers;
  std::shared_ptr<const void> compiled_call;  // its latest call in compiled code, for gradients/
};

// A call of a module in the interpreter, as it is observed.
struct ModuleCall {
  PyObject *module, *args, *kwargs, *output;
  bool is_outermost;  // of a call that watched code did not make, whose outputs are always read
};

// Between the lines of a plan. No newline: Inductor writes an operator's arguments into comments of the code that it
// makes for a GPU, as they are.
constexpr char kPlanSeparator = '\x1f';

// Calls action(role, kind, label, reason), which may return false to end it, for each value of a plan. A plan is a text
// made when a call in compiled code was traced: the class, then a line for every value of the frame:
//   role (w b i o)  kind (t tensor, n None, x no tensor, u unread)  space  label  [tab  why it is not read]
template <typename Action>
bool each_planned(std::string_view plan, const Action& action) {
  for (size_t end = plan.find(kPlanSeparator); end != std::string_view::npos;) {
    const size_t start = end + 1;
    end = plan.find(kPlanSeparator, start);
    const std::string_view line = plan.substr(start, end == std::string_view::npos ? end : end - start);
    if (line.size() < 3) continue;
    const Role role = line[0] == 'w'   ? Role::weight
                      : line[0] == 'b' ? Role::buffer
                      : line[0] == 'i' ? Role::input
                                       : Role::output;
    const size_t tab = line.find('\t');
    const std::string label(line.substr(3, tab == std::string_view::npos ? tab : tab - 3));
    if (!action(role, line[1], label,
                tab == std::string_view::npos ? std::string() : std::string(line.substr(tab + 1))))
      return false;
  }
  return true;
}

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
  // as KeyboardInterrupt.
  bool observe(Node& node, const ModuleCall& call, OpenFrame* frame);
  // The same for a call in compiled code, whose values come as `plan` says.
  bool observe_compiled(const Node& node, std::string_view plan, at::TensorList tensors, OpenFrame* frame);

  // Asks a device to read its tensor, in stream order. Returns null if the device cannot.
  PendingRowPtr enqueue_read(const at::Tensor& x);
  // Completes the pending records of a frame. A record whose row has not come is "not checked".
  bool resolve(const Node& node, OpenFrame* frame);
  pybind11::object to_python(const FrameData& frame, const RecordData& record) const;

  void forget_weights() { ++epoch_; }
  // A step has written this weight, perhaps past the version counter: forgets its range, and if `reads`, reads it here
  // and not in `batch`, the next one. A device is not asked.
  enum class Stepped : uint8_t { unknown, known, nonfinite };
  Stepped stepped(PyObject* weight, bool reads, int64_t batch);
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
  Labels& labels() { return labels_; }
  const Labels& labels() const { return labels_; }
  const pybind11::object& observe_helper() const { return helpers_.observe; }
  size_t num_weights() const { return weight_cache_.size(); }

  Counters counters;

 private:
  struct Walk;  // one walk over one value or one call
  class Attributes;
  enum class Kind : uint8_t { opaque, mapping, container };
  // Where a range is remembered: among the batch's activations, or in a cache over many batches. `moving` is for
  // tensors that are written past the version counter: they are read within the budget and not remembered.
  enum class Memory : uint8_t { activation, weight, moving, none };
  // A tensor that was recognised as a mask, and its record.
  struct Mask {
    WeightEntry tensor;
    pybind11::object record;
    Labels::Id label;
    Role role;
  };
  // A tensor that is read here, or by a device.
  struct Source {
    PyObject* object;
    const at::Tensor& x;
    View view;
    PendingRows::StreamSlot stream_slot;  // of a device's
    int64_t batch;
    OpenFrame* frame;
    // The kernels read elements that a view repeats once.
    int64_t bytes() const {
      return std::min(view.numel * int64_t(word_size(view.format)),
                      int64_t(x.unsafeGetTensorImpl()->unsafe_storage().nbytes()));
    }
    // Returns whether what the cache knows is of the kind that is asked for.
    bool is_served_by(const CacheEntry& entry) const {
      return !is_on_device() ? !entry.is_pending : entry.is_pending && entry.pending->serves(&frame->pending);
    }
    bool is_on_device() const { return stream_slot.device >= 0; }
  };

  template <typename Action>  // (PyObject* tensor, Node::Slot&) -> bool: go on
  bool each_own(Node& node, const Attributes& module, Role role, const Action& action);
  bool own_tensors(Node& node, const Attributes& module, Role role, OpenFrame* frame);
  void find_entry(uint64_t key, Node::Slot* slot);
  bool tensor(PyObject* object, Labels::Id label, Role role, const Node& node, Memory memory, Node::Slot* slot,
              OpenFrame* frame);
  bool records(Node& node, const ModuleCall& call, OpenFrame* frame);
  bool compiled_records(const Node& node, std::string_view plan, at::TensorList tensors, OpenFrame* frame);
  template <typename Make>
  bool fill_frame(const Node& node, OpenFrame* frame, const Make& make);
  template <typename Make>
  bool fill_once(const Node& node, OpenFrame* frame, const Make& make);
  bool is_readable(Source* source, Role role);
  bool find_device(Source* source);
  bool find_device(const at::Tensor& x, PendingRows* pending, View* view, PendingRows::StreamSlot* stream_slot);
  bool resolve_record(const Node& node, const PendingRow& pending, const OpenFrame& frame, RecordData* record);
  void unread(Labels::Id label, Role role, const std::string& reason, OpenFrame* frame);
  bool excuse(Labels::Id label, Role role, OpenFrame* frame);
  bool record_from_python(PyObject* value, Labels::Id label, Role role, const Node& node, OpenFrame* frame);
  bool unusual(const Source& source, const Reading& reading, const Node& node, RecordData* record);
  Reading read(const Source& source);
  Reading hit(const Source& source, const CacheEntry& entry);
  Reading range_of(const Source& source, Memory memory, Node::Slot* slot);
  Reading weight_range(const Source& source, bool moves, Node::Slot* slot);
  bool known_mask(const at::Tensor& x, Labels::Id label, Role role, OpenFrame* frame);
  void remember_mask(const at::Tensor& x, const Content& content, const RecordData& data);
  std::optional<Kind> kind_of(PyTypeObject* type);

  const Options options_;
  const bool python_makes_some_;  // of the records
  Helpers helpers_;
  Labels labels_;
  ActivationCache activations_;
  WeightCache weight_cache_;
  ReadBudget budget_;
  std::unordered_map<uint64_t, Mask> masks_;
  std::unordered_map<PyTypeObject*, Kind> kinds_;  // keys owned
  int32_t epoch_ = 0;
  int64_t first_entries_ = 0;   // of weights
  RowTable* table_ = nullptr;   // once a tensor of a device was met
  PendingRows gradient_rows_;   // empty: the memory for the next gradient
  bool devices_first_ = false;  // a device reads the host's memory too
  bool devices_off_ = false;    // their tensors are read like any that is not plain
};

}  // namespace nanwatch
