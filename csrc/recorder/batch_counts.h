// Number of frames of each of the latest batches, including those that the ring has dropped. More than one batch is
// under way where several threads call the model.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

namespace nanwatch {

class BatchCounts {
 public:
  static constexpr int64_t kForgotten = -1;

  void add(int64_t batch) {
    if (batches_[current_].number == batch || turn_to(batch)) ++batches_[current_].frames;
  }

  // kForgotten where 16 later ones have come since.
  int64_t of(int64_t batch) const {
    for (const Batch& one : batches_)
      if (one.number == batch) return one.frames;
    return batch > forgotten_ ? 0 : kForgotten;
  }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::min();
  struct Batch {
    int64_t number = kNone, frames = 0;
  };

  bool turn_to(int64_t batch) {
    const auto is_it = [batch](const Batch& one) { return one.number == batch; };
    auto found = std::find_if(batches_.begin(), batches_.end(), is_it);
    if (found == batches_.end()) {
      if (batch <= forgotten_) return false;
      found = std::min_element(batches_.begin(), batches_.end(),
                               [](const Batch& a, const Batch& b) { return a.number < b.number; });
      forgotten_ = std::max(forgotten_, found->number);
      *found = {batch, 0};
    }
    current_ = size_t(found - batches_.begin());
    return true;
  }

  std::array<Batch, 16> batches_;
  size_t current_ = 0;
  int64_t forgotten_ = kNone;
};

}  // namespace nanwatch
