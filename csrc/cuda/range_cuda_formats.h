// Formats that are known only when a kernel runs, and rows as a range and a health write them. Device code, for
// range_cuda.cu alone.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "cuda/range_cuda_accumulators.h"

namespace nanwatch {
namespace {

// Calls fn(FormatTag<F>{}) for the run-time format, if it comes no later than `last`. with_format is its host twin; the
// format is the same for a whole block, so nothing diverges.
template <Format last = Format::i64, int I = 0, class Fn>
__device__ __forceinline__ void with_device_format(Format format, const Fn& fn) {
  if (format == Format(I)) {
    fn(FormatTag<Format(I)>{});
  } else if constexpr (I < int(last)) {
    with_device_format<last, I + 1>(format, fn);
  }
}

// The same for the floating-point formats, which come first; the others are finite.
template <class Fn>
__device__ __forceinline__ void with_device_float(Format format, const Fn& fn) {
  with_device_format<Format::f8_e8m0fnu>(format, fn);
}

// The formats that are read by the same code as F, those with its width and sign, as a set of bits.
template <Format F, int... I>
constexpr uint32_t alike(std::integer_sequence<int, I...>) {
  return ((uint32_t(sizeof(typename Codes<F>::Word) == sizeof(typename Codes<Format(I)>::Word) &&
                    Codes<F>::sign == Codes<Format(I)>::sign)
           << I) |
          ...);
}
template <Format F>
constexpr uint32_t kAlike = alike<F>(std::make_integer_sequence<int, int(Format::i64) + 1>());

// And for the first format of those that are read alike: 13 loops in place of 18.
template <int I = 0, class Fn>
__device__ __forceinline__ void with_device_layout(Format format, const Fn& fn) {
  constexpr uint32_t formats = kAlike<Format(I)>;
  if constexpr ((formats & ((1u << I) - 1)) == 0) {
    if (formats >> int(format) & 1) return fn(FormatTag<Format(I)>{});
  }
  if constexpr (I < int(Format::i64)) with_device_layout<I + 1>(format, fn);
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
