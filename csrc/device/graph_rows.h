// The rows of a batch that was captured into a CUDA graph. Nothing is computed while a graph is captured: what the
// calls leave then are frames without rows, and kernels in the graph that write the rows in each replay.
//
// A replay is no call of anybody's here. So a kernel at the begin of the batch counts the replays, in host memory that
// both sides reach, each row has a place for each of the latest kReplays of them, stamped with its number, and a kernel
// at the end says how far they are. The host finds them when it looks.
#pragma once

#include <memory>
#include <vector>

#include "device/pending_row.h"

namespace nanwatch {

struct GraphRows {
  // So many replays may come between two looks. 448 tensors (GPT-2) take 448 KiB for them.
  static constexpr uint64_t kReplays = 8;

  const uint64_t *step = nullptr, *done = nullptr;  // as the host sees them
  uint64_t *step_address = nullptr, *done_address = nullptr;
  int device = -1;
  uint64_t capture = 0;            // the number of the capture that made it
  std::vector<LatePtr> rows = {};  // each one's slot is the first of kReplays

  uint64_t replays() const { return __atomic_load_n(done, __ATOMIC_ACQUIRE); }

  // The row of a replay, lost if a later one has written over it.
  LatePtr row_of(const LateRow& captured, uint64_t replay) const {
    const auto row = std::make_shared<LateRow>();
    row->slot = captured.slot + replay % kReplays;
    row->stamp = replay;
    row->state = LateRow::State::pending;
    row->device = captured.device;
    const bool is_whole = row->arrive() && __atomic_load_n(&row->slot->stamp, __ATOMIC_ACQUIRE) == replay;
    if (!is_whole) {
      row->state = LateRow::State::lost;
      row->error = kNanwatchOverwritten;
    }
    return row;
  }
};

}  // namespace nanwatch
