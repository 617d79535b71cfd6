// Gradients of one run of the autograd engine, in the order in which they came.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "recorder/call_origin.h"
#include "recorder/frame.h"
#include "gradients/recent_gradients.h"

namespace nanwatch {

enum class Part : uint8_t { output, input, weight };

// A recorded call that may get gradients.
struct GradientCall : CallOrigin {
  int64_t number = 0;         // calls are numbered as they end, so children before their parents
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
  bool has_nonfinite;
  RowData row;  // as it was read, perhaps under the label of another user; its python is owned by the Backward
  PendingRowPtr pending;  // where a device makes the range
};

// A node of the graph and which of its results, or the hook of a leaf.
struct Place {
  const void* at = nullptr;  // only compared
  uint32_t nr = 0;
  bool is_leaf = false;

  bool operator==(const Place& other) const { return at == other.at && nr == other.nr; }
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
  int64_t arrivals = 0, tensors_read = 0, bytes_read = 0, stale_hits = 0;
  int64_t nanoseconds = 0;  // spent in the hooks; only when asked for
  RecentGradients recent;   // by the number of the event

  // For gradients whose rows are still on a device: rows that should equal others.
  std::vector<std::pair<PendingRowPtr, PendingRowPtr>> pending_checks;  // (read again, what it should be)

  explicit Backward(int64_t its_task) : task(its_task) {}
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
                const Place& place, RowData row, Finite finite, PendingRowPtr pending);

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
