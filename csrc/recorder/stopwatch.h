// Time spent in a scope, measured only on request.
#pragma once

#include <chrono>
#include <cstdint>

namespace nanwatch {

// Adds the nanoseconds until its end to a counter, if it is on.
class Stopwatch {
 public:
  Stopwatch(bool on, int64_t* total) : total_(on ? total : nullptr), start_(on ? now() : 0) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    if (total_ != nullptr) *total_ += now() - start_;
  }

 private:
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  int64_t* total_;
  int64_t start_;
};

}  // namespace nanwatch
