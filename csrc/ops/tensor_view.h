// View of an at::Tensor for the reductions.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "cpu/range_cpu.h"

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

// Fills `view`; false where the storage does not hold the elements that sizes and strides name. A storage resized to
// nothing (a sharded parameter between uses) does not, and reading it would crash the process. Asks the tensor for each
// thing once, and for none through a call: this is a fifth of a watched call.
inline bool covered_view(const at::Tensor& x, Format format, View* view) {
  const c10::TensorImpl* const impl = x.unsafeGetTensorImpl();
  const at::IntArrayRef sizes = impl->sizes(), strides = impl->strides();
  const int64_t width = int64_t(word_size(format)), offset = impl->storage_offset(), numel = impl->numel();
  *view = {nullptr, format, numel, int64_t(sizes.size()), sizes.data(), strides.data()};
  if (numel == 0) return true;
  int64_t last = offset;
  if (impl->is_contiguous()) {
    last += numel - 1;
  } else {
    for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
  }
  const c10::StorageImpl* const storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr || storage->data() == nullptr || (last + 1) * width > int64_t(storage->nbytes())) return false;
  view->data = static_cast<const char*>(storage->data()) + offset * width;
  return true;
}

// An unsigned number under the lazy negative bit is the one case where the words in memory have another magnitude.
inline bool negation_changes_magnitude(const at::Tensor& x, Format format) {
  return x.is_neg() &&
         (format == Format::u8 || format == Format::u16 || format == Format::u32 || format == Format::u64);
}

}  // namespace nanwatch
