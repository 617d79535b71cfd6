// Whether a Python object is a tensor whose memory can be read as it is: the one gate of every raw read.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include "range_cpu.h"
#include "tensor_view.h"

namespace nanwatch {

// A plain tensor has only these dispatch keys. Sparse, quantized, meta, fake, functorch-wrapped, zero and subclass
// tensors each carry another.
inline const c10::DispatchKeySet kPlainKeys({c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView,
                                             c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutocastCPU,
                                             c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

// Fills `view` for a plain strided CPU tensor; false for all else, which goes through the dispatcher. Active dispatch
// modes do not matter: looking at a tensor is no part of the program that they watch or rewrite.
inline bool plain_view(PyObject* object, View* view) {
  if (!THPVariable_CheckExact(object)) return false;  // not a tensor, or a subclass with a word of its own in this
  const at::Tensor& x = THPVariable_Unpack(object);
  if (!x.defined() || (x.key_set().raw_repr() & ~kPlainKeys.raw_repr()) != 0) return false;
  const std::optional<Format> format = format_of(x.scalar_type());
  if (!format.has_value() || negation_changes_magnitude(x, *format) || !storage_covers(x)) return false;
  *view = {x.const_data_ptr(), *format, x.numel(), x.dim(), x.sizes().data(), x.strides().data()};
  return true;
}

}  // namespace nanwatch
