// Formats that are known only when a kernel runs, and rows as a range and a health write them. Device code, for
// range_cuda.cu alone.
#pragma once

#include <cuda_runtime.h>

#include "cuda/range_cuda_accumulators.h"

namespace nanwatch {
namespace {

// Calls fn(FormatTag<F>{}) for the run-time format. with_format is its host twin; the format is the same for a whole
// block, so nothing diverges.
template <class Fn>
__device__ __forceinline__ void with_device_format(Format format, const Fn& fn) {
#define NANWATCH_CASE(name, ...) \
  if (format == Format::name) return fn(FormatTag<Format::name>{});
  NANWATCH_FORMATS(NANWATCH_CASE)
#undef NANWATCH_CASE
}

// The same for the floating-point formats; the others are finite.
template <class Fn>
__device__ __forceinline__ void with_device_float(Format format, const Fn& fn) {
#define NANWATCH_CASE(name, ...)                                      \
  if constexpr (Codes<Format::name>::is_float) {                      \
    if (format == Format::name) return fn(FormatTag<Format::name>{}); \
  }
  NANWATCH_FORMATS(NANWATCH_CASE)
#undef NANWATCH_CASE
}

// The formats that are read by the same code as F, those with its width and sign, as a set of bits.
static_assert(kNumFormats <= 32);
template <Format F, Format G>
constexpr uint32_t kBitIfAlike =
    uint32_t(sizeof(typename Codes<F>::Word) == sizeof(typename Codes<G>::Word) && Codes<F>::sign == Codes<G>::sign)
    << int(G);
#define NANWATCH_BIT(name, ...) | kBitIfAlike<F, Format::name>
template <Format F>
constexpr uint32_t kAlike = 0 NANWATCH_FORMATS(NANWATCH_BIT);
#undef NANWATCH_BIT

// And for the first format of those that are read alike: 13 loops in place of 18.
template <class Fn>
__device__ __forceinline__ void with_device_layout(Format format, const Fn& fn) {
#define NANWATCH_CASE(name, ...)                                                       \
  if constexpr ((kAlike<Format::name> & ((1u << int(Format::name)) - 1)) == 0) {       \
    if (kAlike<Format::name> >> int(format) & 1) return fn(FormatTag<Format::name>{}); \
  }
  NANWATCH_FORMATS(NANWATCH_CASE)
#undef NANWATCH_CASE
}

// ---- the row --------------------------------------------------------------------------------------------------------

// Range<F>::write for the run-time format. Not inlined: 18 decodings, for one thread of a launch.
__device__ __noinline__ void write_row(const DeviceRange& range, Format format, double* row) {
  with_device_format(format, [&](auto tag) { range.narrow<decltype(tag)::format>().write(row); });
}

// The columns of Health::write.
__device__ void write_row(const DeviceHealth& health, Format format, double* row) {
  write_row(health.range, format, row);
  write_row(health.finite, format,
            row + column::finite_abs_min);  // and isfinite into the next column, which is written after it
  row[column::num_nan] = double(health.num_nan);
  row[column::num_posinf] = double(health.num_posinf);
  row[column::num_neginf] = double(health.num_neginf);
  row[column::num_zero] = double(health.num_zero);
  row[column::num_subnormal] = double(health.num_subnormal);
  row[column::first_nonfinite] = health.not_first == 0 ? -1.0 : double(~health.not_first);
}

}  // namespace
}  // namespace nanwatch
