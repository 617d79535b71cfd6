// The frames of a batch that was captured into a CUDA graph; each of its replays becomes a batch of its own.
#pragma once

#include <deque>
#include <memory>

#include "device/graph_rows.h"
#include "recorder/frame.h"

namespace nanwatch {

struct CapturedBatch {
  std::shared_ptr<GraphRows> graph;
  std::deque<CallFrame> entries = {};
  FrameData given = {};  // what the batch was called with
  uint64_t seen = 0;     // replays that were reported

  // Gives a frame the rows of a replay.
  void fill(FrameData* frame, uint64_t replay) const {
    for (PendingRowPtr& row : frame->pending.rows)
      if (row->graph != nullptr) row = graph->row_of(*row, replay);
  }
};

}  // namespace nanwatch
