// The health of numbers in a file, read through a buffer that stays in the cache.
#pragma once

#include "cpu/range_cpu.h"

namespace nanwatch {

// Reads `count` numbers from byte `offset` of a file on, as many at a time as the buffer has, and writes the row of
// their health. False where the file ends before, and at an error.
bool file_health_cpu(int file, int64_t offset, int64_t count, const View& buffer, double* row);

}  // namespace nanwatch
