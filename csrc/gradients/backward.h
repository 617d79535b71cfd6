// Gradients of one run of the autograd engine, in the order in which they came.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/tensor_view.h"
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

// Destroy it under the interpreter lock.
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
  void add_known(const std::vector<GradientUser>& users) { add(users, latest_, GradientEvent(events.back())); }
  // The same of a gradient that was read, or sent to be read. Takes the row's python.
  void add_read(const std::vector<GradientUser>& users, const at::Tensor& gradient, const GradientPlace& place,
                GradientEvent read);

  // Under the interpreter lock: the pending rows that are still to come, and what those that have come say.
  std::vector<PendingRowPtr> pending_rows() const;
  void take_completed();

 private:
  void add(const std::vector<GradientUser>& users, const GradientPlace& place, const GradientEvent& known);

  GradientPlace latest_;
};

}  // namespace nanwatch
