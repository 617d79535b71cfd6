// The exponents of a strided piece of host memory, and how many of its elements reach given magnitudes.
#pragma once

#include "numerics/exponents.h"
#include "cpu/range_cpu.h"

namespace nanwatch {

// Writes exponent_columns(view.format) counts.
void exponents_cpu(const View& view, int64_t* counts);

// Writes `num_codes` counts, of at most kMaxEdges codes in any order.
void edges_cpu(const View& view, const uint64_t* codes, int64_t num_codes, int64_t* counts);

}  // namespace nanwatch
