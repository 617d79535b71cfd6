// View of an at::Tensor for the reductions: its format, and whether its memory may be read through a pointer.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "numerics/formats.h"

namespace nanwatch {

// Not every dtype has a format: complex numbers go by their modulus, and what is packed below a byte is not read.
inline std::optional<Format> format_of(at::ScalarType type) {
  switch (type) {
#define NANWATCH_CASE(name, number, scalar_type, ...) \
  case at::ScalarType::scalar_type: return Format::name;
    NANWATCH_FORMATS(NANWATCH_CASE)
#undef NANWATCH_CASE
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
