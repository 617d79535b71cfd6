// Subscriptions to the events that a recorder reports, and the time that it measures for one of them.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace nanwatch {

// Events that the recorder reports only while somebody subscribes to them, numbered as in recording/events.py. While
// there is a subscription to kOwnTime the recorder counts its nanoseconds.
enum Event : uint32_t { kBatchStart = 1, kBatchEnd = 2, kFrame = 4, kBackwardStart = 8, kOwnTime = 16 };

// Counts the subscriptions to each event. Changed under the interpreter lock, asked on any thread.
class Subscriptions {
 public:
  bool has(Event event) const { return (mask_.load(std::memory_order_relaxed) & event) != 0; }
  void add(uint32_t events, int by) {
    uint32_t mask = 0;
    for (size_t i = 0; i < counts_.size(); ++i) {
      if ((events >> i & 1u) != 0) counts_[i] += by;
      if (counts_[i] > 0) mask |= 1u << i;
    }
    mask_.store(mask, std::memory_order_relaxed);
  }

  std::atomic<int64_t> nanoseconds{0};  // spent in the recorder while there is a subscription to kOwnTime

 private:
  std::array<int, 5> counts_{};
  std::atomic<uint32_t> mask_{0};
};

// Adds the nanoseconds until its end to those of the recorder, if somebody subscribes to them.
class Stopwatch {
 public:
  explicit Stopwatch(Subscriptions& subscriptions)
      : total_(subscriptions.has(kOwnTime) ? &subscriptions.nanoseconds : nullptr),
        start_(total_ != nullptr ? now() : 0) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    if (total_ != nullptr) *total_ += now() - start_;
  }

 private:
  static int64_t now() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

  std::atomic<int64_t>* const total_;
  const int64_t start_;
};

// One subscription to some events. It does not keep the recorder alive.
class Subscription {
 public:
  Subscription(std::shared_ptr<Subscriptions> all, uint32_t events) : all_(std::move(all)), events_(events) {
    set_active(true);
  }
  bool active() const { return active_; }
  void set_active(bool active) {
    if (active == active_) return;
    active_ = active;
    all_->add(events_, active ? 1 : -1);
  }

 private:
  std::shared_ptr<Subscriptions> all_;
  uint32_t events_;
  bool active_ = false;
};

}  // namespace nanwatch
