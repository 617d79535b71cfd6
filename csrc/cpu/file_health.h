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

// Blocks in a file: the byte where they begin, how many numbers they are, and of which kind, a format or, below 0, an
// encoding of GGUF. `width` is that of the rows of these numbers, 0 where no rows are looked at. A block of `bytes` has
// one number, and from `place` on `each` numbers that are read.
struct FileRun {
  static constexpr int64_t kQ4_0 = 2, kQ8_0 = 8;  // the numbers of encodings in GGUF
  int64_t offset, count, kind, width, bytes, place, each;
};

// Reads numbers of a file, as many at a time as fit into `size` bytes of memory, and writes the row of their health.
// Looks for rows that are all zero. False where the file ends before, at an error, for a kind that is not known, and
// where no row fits.
bool file_health_cpu(int file, const FileRun& run, char* memory, int64_t size, double* row, DeadRows* dead);

}  // namespace nanwatch
