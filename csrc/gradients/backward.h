// Gradients of one run of the autograd engine, in the order in which they came.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/plain_view.h"
#include "recorder/batch_start.h"
#include "recorder/frame.h"
#include "recorder/read_cache.h"

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
  GradientUser user;
  int64_t arrival;  // the same for all users of one gradient
  bool has_nonfinite;
  RecordData row;  // as it was read, perhaps under the label of another user; its python is owned by the Backward
  PendingRowPtr pending;  // where a device makes the range
};

// A node of the graph and which of its results, or the hook of a leaf.
struct Place {
  const void* at = nullptr;  // only compared
  uint32_t nr = 0;
  bool is_leaf = false;

  bool operator==(const Place& other) const { return at == other.at && nr == other.nr; }
};

// Which tensor, over which memory, in which version.
struct GradientState {
  const at::TensorImpl* tensor = nullptr;
  uint64_t key = 0;
  uint32_t version = 0;
  bool has_version = false;  // without one nothing shows writes
  bool is_plain = false;     // subclasses and sparse tensors change in ways of their own, and may hold tensors

  GradientState() = default;
  explicit GradientState(const at::Tensor& x)
      : tensor(x.unsafeGetTensorImpl()),
        has_version(can_be_remembered(x)),
        is_plain(has_only(x, kPlainKeys) || has_only(x, kPlainCudaKeys)) {
    if (has_version) version = uint32_t(x._version());
    if (is_plain) key = Content::key_of(x);
  }

  bool operator==(const GradientState& other) const {
    return tensor == other.tensor && version == other.version && key == other.key;
  }
};

// The latest gradients of one backward, to recognise one that comes again: the backward of a sum passes the same tensor
// to all its terms, such as the output of a block and that of its shortcut.
//
// Weak pointers say that it is the same tensor over the same memory: while they are held neither address gets a new
// owner. They keep the empty shells of what was freed, about 300 bytes for each, and no memory of elements.
class RecentGradients {
 public:
  // The number that a gradient was kept with; -1 if it is not known, or not as it is now.
  int64_t find(const at::Tensor& x, const GradientState& state) const;
  // For plain gradients that have a version.
  void keep(const at::Tensor& x, const GradientState& state, int64_t number);
  void clear();

 private:
  // Between two places of one gradient came at most 1 other in ResNet-50, ViT, GPT-2, Llama and mT5. In a bottleneck
  // whose shortcut is computed before the branch it is 7.
  static constexpr size_t kKept = 16;

  struct Kept {
    c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl> tensor{
        c10::intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>()};
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
    GradientState state;
    std::vector<int64_t> sizes;
    int64_t number = -1;
  };

  size_t place_of(const at::TensorImpl* tensor) const;

  std::array<const at::TensorImpl*, kKept> tensors_{};  // of kept_, in two cache lines: they are searched each time
  std::array<Kept, kKept> kept_;
  size_t next_ = 0;
};

enum class Finite : uint8_t { unknown, yes, no };

// Destroy it under the interpreter lock.
struct Backward {
  int64_t task = -1;
  bool has_nonfinite = false;  // something in it is not finite
  bool is_over = false;        // it ended by an exception, of which the engine gives no sign
  bool is_alone = false;       // in a process without others, whose collectives would write past the version counter
  std::vector<GradientEvent> events;
  std::vector<int64_t> shapes;
  std::vector<PyObject*> python_rows;  // owned
  int64_t arrivals = 0, tensors_read = 0, bytes_read = 0;
  int64_t nanoseconds = 0;  // spent in the hooks; only when asked for
  RecentGradients recent;   // by the number of the event

  Backward(int64_t its_task, bool alone) : task(its_task), is_alone(alone) {}
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;
  ~Backward();

  // The event that has the row of a gradient that comes now, null where it has to be read.
  const GradientEvent* find(const at::Tensor& gradient, const GradientState& state, const Place& place) const;
  // Adds an event for each user, with what is known of the gradient: `known` is a copy, its user of no account.
  void add(const std::vector<GradientUser>& users, const GradientState& state, const Place& place,
           const GradientEvent& known);
  // The same of what was read, and takes the row's python, or was sent to be read.
  void add_read(const std::vector<GradientUser>& users, const at::Tensor& gradient, const GradientState& state,
                const Place& place, RecordData row, Finite finite, PendingRowPtr pending);

  // Under the interpreter lock: the pending rows that are still to come, and what those that have come say.
  std::vector<PendingRowPtr> pending_rows() const;
  void take_completed();

 private:
  // Returns whether the latest gradient came to this very place: the users of a place come one directly after the
  // other.
  bool came(const GradientState& state, const Place& place) const;

  Place latest_place_;
  GradientState latest_;
};

}  // namespace nanwatch
