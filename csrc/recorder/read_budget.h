// Bytes that may be read of weights and buffers, so that no table, mask or frozen tower makes a watch slow: in the long
// run as many as were read of inputs and outputs. A tensor that is known to have changed also has kFree in each batch,
// so that small models are read whole, and kSaved from each batch in which it had to wait, so that its turn comes
// however small the inputs are. It counts bytes and no clock: two runs read the same.
#pragma once

#include <cstdint>

namespace nanwatch {

class ReadBudget {
 public:
  static constexpr int64_t kFree = 4 << 20, kSaved = 1 << 20;

  void earn(int64_t bytes) { earned_ += bytes; }

  // Where the budget is short, each tensor that has changed is read once before any is read again: in one turn. `turn`
  // is the turn in which the tensor was read last.
  bool spend(int64_t bytes, bool has_changed, int64_t* turn) {
    if (has_changed && is_short_ && *turn == turn_) return false;
    int64_t* const account = has_changed && bytes <= free_ ? &free_ : &earned_;
    if (bytes > *account) {
      if (has_changed) has_refused_ = is_short_ = true;
      return false;
    }
    *account -= bytes;
    *turn = turn_;
    return true;
  }

  void end_batch() {
    if (has_refused_) {
      earned_ += kSaved;
    } else {
      ++turn_;
      is_short_ = false;
    }
    has_refused_ = false;
    free_ = kFree;
  }

 private:
  int64_t free_ = kFree, earned_ = 0, turn_ = 0;
  bool has_refused_ = false;  // in this batch
  bool is_short_ = false;     // in this turn
};

}  // namespace nanwatch
