// Gate of every raw read: is a Python object a tensor whose memory can be read as it is?
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <vector>

#include "cpu/range_cpu.h"
#include "ops/tensor_view.h"

namespace nanwatch {

// A plain tensor has only these dispatch keys. Sparse, quantized, meta, fake, functorch-wrapped, zero and subclass
// tensors each carry another.
inline const c10::DispatchKeySet kPlainKeys({c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView,
                                             c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutocastCPU,
                                             c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

// The same keys on CUDA.
inline const c10::DispatchKeySet kPlainCudaKeys({c10::DispatchKey::CUDA, c10::DispatchKey::ADInplaceOrView,
                                                 c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCUDA,
                                                 c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

inline bool has_only(const at::Tensor& x, c10::DispatchKeySet keys) {
  return (x.key_set().raw_repr() & ~keys.raw_repr()) == 0;
}

// Returns whether it is a plain strided CUDA tensor.
inline bool is_plain_cuda(const at::Tensor& x) {
  return x.defined() && x.is_cuda() && has_only(x, kPlainCudaKeys);
}

// Fills `view` for a plain strided CPU tensor; false for all else, which goes through the dispatcher. Active dispatch
// modes do not matter: reading a tensor is no part of the program that they observe.
inline bool plain_view(const at::Tensor& x, View* view) {
  if (!x.defined() || !has_only(x, kPlainKeys)) return false;
  const std::optional<Format> format = format_of(x.scalar_type());
  return format.has_value() && !negation_changes_magnitude(x, *format) && covered_view(x, *format, view);
}

inline bool plain_view(PyObject* object, View* view) {
  // No tensor, or a subclass with a word of its own in this.
  return THPVariable_CheckExact(object) && plain_view(THPVariable_Unpack(object), view);
}

// Reading without the interpreter lock pays once the read is longer than taking the lock again.
constexpr int64_t kReleaseLockBytes = 1 << 20;

// Calls read(view), without the interpreter lock if that takes long. Meanwhile another thread may give the tensor other
// sizes or another storage: what the view refers to is kept or copied.
template <typename Read>
auto read_released(const at::Tensor& x, View view, int64_t bytes, const Read& read) {
  if (bytes < kReleaseLockBytes) return read(view);
  const c10::Storage storage = x.storage();
  const std::vector<int64_t> sizes(view.sizes, view.sizes + view.dims);
  const std::vector<int64_t> strides(view.strides, view.strides + view.dims);
  view.sizes = sizes.data();
  view.strides = strides.data();
  const pybind11::gil_scoped_release release;
  return read(view);
}

// By its class alone: asking the object for its `__class__` may run user code, and its answer does not make the
// object's memory a tensor's.
inline bool is_tensor(PyObject* object) {
  return THPVariable_CheckExact(object) ||
         PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

}  // namespace nanwatch
