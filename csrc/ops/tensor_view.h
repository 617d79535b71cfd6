// View of an at::Tensor for the reductions, and the gate of every raw read: may its memory be read as it is? What the
// operators' kernels do not read, the reference in Python serves (python/nanwatch/numerics/_reference.py).
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <optional>
#include <vector>

#include "cpu/range_cpu.h"

namespace nanwatch {

// Not every dtype has a format: complex numbers go by their modulus, and what is packed below a byte is not read.
// A table, because the cases of a switch lie on a line of the CPU's cache each.
inline std::optional<Format> format_of(at::ScalarType type) {
#define NANWATCH_NUMBER(name, number, scalar_type, ...) numbers[size_t(at::ScalarType::scalar_type)] = number;
  static constexpr auto table = [] {
    std::array<int8_t, size_t(at::ScalarType::NumOptions)> numbers{};
    numbers.fill(-1);
    NANWATCH_FORMATS(NANWATCH_NUMBER)
    return numbers;
  }();
#undef NANWATCH_NUMBER
  const int8_t number = size_t(type) < table.size() ? table[size_t(type)] : int8_t(-1);
  return number < 0 ? std::nullopt : std::optional<Format>(Format(number));
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

// ---- plain tensors ----

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

// Calls action(key, item) for the items of a dictionary, or of null, until it returns false. Returns whether it did
// not.
template <typename Action>
bool each_item(PyObject* dict, const Action& action) {
  PyObject *key, *item;
  Py_ssize_t position = 0;
  while (dict != nullptr && PyDict_Next(dict, &position, &key, &item))
    if (!action(key, item)) return false;
  return true;
}

// ---- as one run of memory, which is all that the CUDA kernel reads ----

// The tensor without what it repeats: each dimension of stride 0 cut to its first index.
inline at::Tensor without_repeats(const at::Tensor& x) {
  std::vector<int64_t> sizes = x.sizes().vec();
  for (size_t d = 0; d < sizes.size(); ++d)
    if (x.strides()[d] == 0 && sizes[d] > 1) sizes[d] = 1;
  return x.as_strided(sizes, x.strides());
}

// Returns whether the elements lie without gaps, in whatever order, each on its boundary.
inline bool is_dense(const at::Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % x.itemsize() == 0 &&
         (x.is_contiguous() || x.is_non_overlapping_and_dense());
}

// `x` itself where it is dense, else a copy of what it does not repeat. A dispatch mode of the user does not see the
// copy.
inline at::Tensor dense(const at::Tensor& x) {
  if (is_dense(x)) return x;
  const bool is_aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % x.itemsize() == 0;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  const at::Tensor distinct = without_repeats(x);
  return is_aligned && distinct.is_non_overlapping_and_dense() ? distinct
                                                               : distinct.clone(at::MemoryFormat::Contiguous);
}

// ---- for operators ----

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
