// A batch whose rows are still on a device: its frames in their order, until all rows have come.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "frame.h"
#include "row_table.h"

namespace nanwatch {

struct PendingBatch {
  struct Entry {
    FrameData frame;
    int32_t caller;
  };

  const void* thread;  // that makes it, only compared
  int64_t number;
  bool recomputed;
  bool is_left;  // its end was told before its frames were, or is told to nobody
  bool ended = false, completed = false;
  std::deque<Entry> entries = {};
  FrameData given = {};               // what it was called with, as it was at the end
  std::vector<LatePtr> awaited = {};  // once it has ended: what was still to come, and the marks behind it
  std::vector<Mark> marks = {};

  // As an outermost call ends: marks what is awaited.
  void end(const RowTable& table, bool is_completed) {
    ended = true;
    completed = is_completed;
    const auto await = [this](const FrameData& frame) {
      for (const LatePtr& row : frame.late.rows)
        if (!row->arrive()) awaited.push_back(row);
    };
    for (const Entry& entry : entries) await(entry.frame);
    await(given);
    marks = table.mark(awaited);
  }
};

}  // namespace nanwatch
