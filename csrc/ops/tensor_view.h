// View of an at::Tensor for the reductions: its format, and whether its memory may be read through a pointer.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "numerics/formats.h"

namespace nanwatch {

// Not every dtype has a format: complex numbers go by their modulus, and what is packed below a byte is not read.
inline std::optional<Format> format_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return Format::f64;
    case at::kFloat: return Format::f32;
    case at::kHalf: return Format::f16;
    case at::kBFloat16: return Format::bf16;
    case at::kFloat8_e4m3fn: return Format::f8_e4m3fn;
    case at::kFloat8_e5m2: return Format::f8_e5m2;
    case at::kFloat8_e4m3fnuz: return Format::f8_e4m3fnuz;
    case at::kFloat8_e5m2fnuz: return Format::f8_e5m2fnuz;
    case at::kFloat8_e8m0fnu: return Format::f8_e8m0fnu;
    case at::kBool: return Format::boolean;
    case at::kByte: return Format::u8;
    case at::kChar: return Format::i8;
    case at::kUInt16: return Format::u16;
    case at::kShort: return Format::i16;
    case at::kUInt32: return Format::u32;
    case at::kInt: return Format::i32;
    case at::kUInt64: return Format::u64;
    case at::kLong: return Format::i64;
    default: return std::nullopt;
  }
}

// Returns whether the storage really holds the elements that sizes and strides name. A storage resized to nothing (a
// sharded parameter between uses) does not, and reading it would crash the process.
inline bool storage_covers(const at::Tensor& x) {
  const int64_t numel = x.numel();
  if (numel == 0) return true;
  int64_t last = x.storage_offset();
  if (x.unsafeGetTensorImpl()->is_contiguous()) {
    last += numel - 1;
  } else {
    const at::IntArrayRef sizes = x.sizes(), strides = x.strides();
    for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
  }
  const c10::Storage& storage = x.unsafeGetTensorImpl()->unsafe_storage();
  return storage && storage.data() != nullptr && size_t(last + 1) * x.itemsize() <= storage.nbytes();
}

// An unsigned number under the lazy negative bit is the one case where the words in memory have another magnitude.
inline bool negation_changes_magnitude(const at::Tensor& x, Format format) {
  return x.is_neg() &&
         (format == Format::u8 || format == Format::u16 || format == Format::u32 || format == Format::u64);
}

}  // namespace nanwatch
