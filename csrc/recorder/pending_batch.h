// A batch whose rows are still on a device: its frames in their order, until all rows have come. Or a backward, in the
// order of both.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "blackbox/black_box.h"
#include "device/row_table.h"
#include "recorder/frame.h"
#include "recorder/gradient_tracker.h"

namespace nanwatch {

// The pending rows of an ended batch and the stream events that complete them. Immutable, as several threads may wait.
struct PendingEvents {
  std::vector<PendingRowPtr> rows;
  std::vector<StreamEvent> events;
};

struct PendingBatch {
  const void* thread;  // that makes it, only compared
  int64_t number;
  bool recomputed;
  bool is_left;  // its end was reported before its frames, or is not reported
  bool ended = false, completed = false;
  bool has_graph = false;  // gradients may flow from it
  std::deque<CallFrame> entries = {};
  FrameData given = {};                               // what it was called with, as it was at the end
  std::shared_ptr<const PendingEvents> awaited = {};  // once it has ended
  std::unique_ptr<EndedBackward> backward = {};       // then there are no frames yet, and it has ended
  pybind11::object left = {};                         // the answer of `on_backward_pending`
  box::Least least = {};

  // Called as an outermost call ends: records events behind what is awaited. Only then is it ended, as other threads
  // may look meanwhile.
  void end(const RowTable& table, bool is_completed) {
    std::vector<PendingRowPtr> rows;
    const auto await = [&rows](const FrameData& frame) {
      for (const PendingRowPtr& row : frame.pending.rows)
        if (!row->poll()) rows.push_back(row);
    };
    for (const CallFrame& entry : entries) await(entry.frame);
    await(given);
    await_rows(table, std::move(rows));
    completed = is_completed;
    ended = true;
  }
  void await_rows(const RowTable& table, std::vector<PendingRowPtr> rows) {
    std::vector<StreamEvent> events = table.record_events(rows);
    awaited = std::make_shared<const PendingEvents>(PendingEvents{std::move(rows), std::move(events)});
  }
};

}  // namespace nanwatch
