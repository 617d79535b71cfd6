// Call of an operator's reference in Python (python/nanwatch/numerics/_reference.py), for tensors that a native kernel
// does not read.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace nanwatch {

// Calls the CompositeExplicitAutograd kernel of an operator. That is an alias and has no entry of its own in the
// dispatch table, but the entry for "no key at all" is filled from it and no backend's kernel can take that place.
template <class Function, class... Arguments>
decltype(auto) call_reference(const char* name, const Arguments&... arguments) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Function>().redispatch(
      c10::DispatchKeySet(), arguments...);
}

}  // namespace nanwatch
