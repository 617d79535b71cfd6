// The health of numbers in a file, read through a buffer that stays in the cache.
#pragma once

#include "cpu/range_cpu.h"

namespace nanwatch {

// Rows that are all zero: how many, and the numbers of the first.
struct DeadRows {
  static constexpr int64_t kFirst = 5;
  int64_t total = 0;
  std::vector<int64_t> first;
};

// Reads `count` numbers from byte `offset` of a file on, as many at a time as the buffer has, and writes the row of
// their health. Looks for dead ones among rows of `width` numbers, 0 for none, of which some fit into the buffer. False
// where the file ends before, and at an error.
bool file_health_cpu(int file, int64_t offset, int64_t count, int64_t width, const View& buffer, double* row,
                     DeadRows* dead);

}  // namespace nanwatch
