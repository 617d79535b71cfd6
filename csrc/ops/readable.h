// A tensor as the operators' kernels take it, and the reference in Python (python/nanwatch/numerics/_reference.py) for
// what they do not read.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "cpu/range_cpu.h"
#include "ops/tensor_view.h"

namespace nanwatch {

// Calls the CompositeExplicitAutograd kernel of an operator. That is an alias and has no entry of its own in the
// dispatch table, but the entry for "no key at all" is filled from it and no backend's kernel can take that place.
template <class Function, class... Arguments>
decltype(auto) call_reference(const char* name, const Arguments&... arguments) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Function>().redispatch(
      c10::DispatchKeySet(), arguments...);
}

// The tensor's memory, where the kernels can read its words in place. Nothing where the reference serves it: complex
// numbers, and dtypes that it refuses in words of its own. Conjugate and negative views do not come here, see `define`
// in python/nanwatch/numerics/_extension.py.
inline std::optional<View> readable(const at::Tensor& x, const char* op) {
  const std::optional<Format> format = format_of(x.scalar_type());
  if (!format.has_value()) return std::nullopt;
  View view;
  TORCH_CHECK_VALUE(covered_view(x, *format, &view), "nanwatch.", op, ": the tensor's storage holds ",
                    x.storage().nbytes(), " bytes, fewer than its shape ", x.sizes(), " and strides ", x.strides(),
                    " need; it was freed or resized.");
  return view;
}

inline at::Tensor reference(const char* op, const at::Tensor& x) {
  return call_reference<at::Tensor(const at::Tensor&)>(op, x);
}

}  // namespace nanwatch
