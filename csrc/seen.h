// What was already read. A tensor that is unchanged since is not read again.
//
// "The same tensor" is the hard part. An id or an address is not one: a freed activation's successor gets both. So an
// entry holds weak pointers to the tensor and to its storage: while it does, neither address can be given out again,
// and equal pointers mean the same object. What lives longer is a few hundred bytes of bookkeeping, never the data.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include "range.h"

namespace nanwatch {

struct Seen {
  const c10::TensorImpl* tensor = nullptr;
  const c10::StorageImpl* storage = nullptr;
  c10::weak_intrusive_ptr<c10::TensorImpl> hold_tensor{c10::intrusive_ptr<c10::TensorImpl>()};
  c10::weak_intrusive_ptr<c10::StorageImpl> hold_storage{c10::intrusive_ptr<c10::StorageImpl>()};
  uint32_t version = 0;
  uint64_t layout = 0;
  int64_t batch = -1;  // when it was read
  int64_t epoch = -1;  // how often weights had been declared changed by then
  RangeRow range{};

  // Tensors made in inference mode have no version counter: nothing tells when they change.
  static bool can_be_remembered(const at::Tensor& x) { return !x.is_inference(); }

  bool is_unchanged(const at::Tensor& x) const {
    const c10::TensorImpl* impl = x.unsafeGetTensorImpl();
    return tensor == impl && storage == impl->unsafe_storage().unsafeGetStorageImpl() &&
           version == impl->version_counter().current_version() && layout == layout_of(x);
  }

  void remember(const at::Tensor& x, const RangeRow& row, int64_t at_batch, int64_t at_epoch) {
    const c10::Storage& held = x.unsafeGetTensorImpl()->unsafe_storage();
    if (tensor != x.unsafeGetTensorImpl()) {
      tensor = x.unsafeGetTensorImpl();
      hold_tensor = x.getIntrusivePtr();
    }
    if (storage != held.unsafeGetStorageImpl()) {
      storage = held.unsafeGetStorageImpl();
      hold_storage = c10::weak_intrusive_ptr<c10::StorageImpl>(held.getWeakStorageImpl());
    }
    version = x.unsafeGetTensorImpl()->version_counter().current_version();
    layout = layout_of(x);
    batch = at_batch;
    epoch = at_epoch;
    range = row;
  }

  bool is_expired() const { return hold_tensor.expired(); }

  // Everything that decides which elements of the storage are the tensor's: offset, dtype, sizes, strides.
  static uint64_t layout_of(const at::Tensor& x) {
    uint64_t hash = uint64_t(x.storage_offset()) * 31 + uint64_t(x.scalar_type());
    const at::IntArrayRef sizes = x.sizes(), strides = x.strides();
    for (size_t d = 0; d < sizes.size(); ++d) {
      hash = (hash ^ uint64_t(sizes[d])) * 0x9e3779b97f4a7c15ull;
      hash = (hash ^ (hash >> 29) ^ uint64_t(strides[d])) * 0xbf58476d1ce4e5b9ull;
    }
    return hash ^ (hash >> 32);
  }
};

// Activations: one slot per hashed address, the newcomer takes it. Bounded, and a miss only costs a read.
class ActivationCache {
 public:
  Seen& slot(const at::Tensor& x) {
    const auto address = reinterpret_cast<uintptr_t>(x.unsafeGetTensorImpl());
    return slots_[(uint64_t(address) * 0x9e3779b97f4a7c15ull) >> (64 - kBits)];
  }
  void clear() { slots_.assign(slots_.size(), Seen()); }

 private:
  static constexpr int kBits = 10;
  std::vector<Seen> slots_ = std::vector<Seen>(size_t(1) << kBits);
};

// Weights: one entry per tensor, shared by the modules that share the tensor. Entries of dead tensors are swept out
// whenever the table has doubled.
class WeightCache {
 public:
  std::shared_ptr<Seen> entry(const at::Tensor& x) {
    std::shared_ptr<Seen>& found = entries_[x.unsafeGetTensorImpl()];
    if (!found) {
      found = std::make_shared<Seen>();
      if (entries_.size() > sweep_at_) {
        for (auto it = entries_.begin(); it != entries_.end();)
          it = it->second->tensor != nullptr && it->second->is_expired() ? entries_.erase(it) : std::next(it);
        sweep_at_ = std::max<size_t>(1024, 2 * entries_.size());
        return entries_[x.unsafeGetTensorImpl()];
      }
    }
    return found;
  }
  size_t size() const { return entries_.size(); }
  void clear() { entries_.clear(); }

 private:
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<Seen>> entries_;
  size_t sweep_at_ = 1024;
};

}  // namespace nanwatch
