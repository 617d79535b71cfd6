// The rows of a batch that was captured into a CUDA graph. A capture computes nothing: the calls leave frames without
// rows, and kernels in the graph that write the rows in each replay.
//
// A replay calls nothing here. So a kernel at the start of the batch counts the replays, in host memory that both sides
// reach. Each row has a place for each of the latest kReplays of them, stamped with the replay's number. A kernel at
// the end says which replay is complete. The host finds the rows when it polls.
#pragma once

#include <memory>
#include <vector>

#include "device/pending_row.h"

namespace nanwatch {

struct GraphRows {
  // At most this many replays may come between two polls. 448 tensors (GPT-2) take 448 KiB for them.
  static constexpr uint64_t kReplays = 8;

  const uint64_t *step = nullptr, *done = nullptr;  // as the host sees them
  uint64_t *step_address = nullptr, *done_address = nullptr;
  int device = -1;
  uint64_t capture = 0;                  // the number of the capture that made it
  std::vector<PendingRowPtr> rows = {};  // each one's slot is the first of kReplays

  uint64_t replays() const { return __atomic_load_n(done, __ATOMIC_ACQUIRE); }

  // The row of a replay, failed if a later one has written over it.
  PendingRowPtr row_of(const PendingRow& captured, uint64_t replay) const {
    const auto row = std::make_shared<PendingRow>();
    row->slot = captured.slot + replay % kReplays;
    row->stamp = replay;
    row->state = PendingRow::State::pending;
    row->device = captured.device;
    const bool is_whole = row->poll() && __atomic_load_n(&row->slot->stamp, __ATOMIC_ACQUIRE) == replay;
    if (!is_whole) {
      row->state = PendingRow::State::failed;
      row->error = kNanwatchOverwritten;
    }
    return row;
  }
};

}  // namespace nanwatch
