// The table of the kernels of one instruction set, `S`. In an unnamed namespace, for the target of the including file.
#pragma once

#include "cpu/fingerprint_loop_impl.h"
#include "cpu/health_loop_impl.h"
#include "cpu/power_sums_impl.h"

namespace nanwatch {
namespace {

template <class S>
constexpr KernelTable make_kernels(const char* name) {
  // The index is the format's number.
#define NANWATCH_ALL(kernel)                                                                           \
  {                                                                                                    \
    kernel<S, Format::f64>, kernel<S, Format::f32>, kernel<S, Format::f16>, kernel<S, Format::bf16>,   \
        kernel<S, Format::f8_e4m3fn>, kernel<S, Format::f8_e5m2>, kernel<S, Format::f8_e4m3fnuz>,      \
        kernel<S, Format::f8_e5m2fnuz>, kernel<S, Format::f8_e8m0fnu>, kernel<S, Format::boolean>,     \
        kernel<S, Format::u8>, kernel<S, Format::i8>, kernel<S, Format::u16>, kernel<S, Format::i16>,  \
        kernel<S, Format::u32>, kernel<S, Format::i32>, kernel<S, Format::u64>, kernel<S, Format::i64> \
  }
  return KernelTable{name,
                     NANWATCH_ALL(range_plane),
                     NANWATCH_ALL(health_plane),
                     NANWATCH_ALL(power_sums),
                     NANWATCH_ALL(count_beyond),
                     fingerprint_blocks<S>};
#undef NANWATCH_ALL
}

}  // namespace
}  // namespace nanwatch
