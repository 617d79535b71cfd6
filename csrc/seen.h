// What was already read. A tensor that is unchanged since is not read again.
//
// "Unchanged" is the hard part. An id or an address is no identity: a freed activation's successor gets both. So an
// entry keeps the tensor's version counter, a few bytes that all views of the tensor share, and a weak pointer to its
// storage: while it does, neither address can be given out again, and the same counter at the same version over the
// same part of the same storage means the same content. The data itself lives no longer for it, and nothing is held of
// the tensor object, which torch.utils.swap_tensors would notice.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

#include "range.h"

namespace nanwatch {

// Which part of which storage: storage, offset, dtype, and what else decides which elements belong. Contiguous tensors
// of another shape over the same elements have the same key.
inline uint64_t key_of(const at::Tensor& x) {
  const c10::TensorImpl* impl = x.unsafeGetTensorImpl();
  uint64_t hash = reinterpret_cast<uintptr_t>(impl->unsafe_storage().unsafeGetStorageImpl());
  const auto mix = [&hash](uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 29;
  };
  mix(uint64_t(x.storage_offset()) * 64 + uint64_t(x.scalar_type()));
  mix(uint64_t(x.numel()));
  if (!impl->is_contiguous()) {
    const at::IntArrayRef sizes = x.sizes(), strides = x.strides();
    for (size_t d = 0; d < sizes.size(); ++d) {
      mix(uint64_t(sizes[d]));
      mix(uint64_t(strides[d]));
    }
  }
  return hash;
}

struct Seen {
  uint64_t key = 0;
  const c10::StorageImpl* storage = nullptr;
  c10::weak_intrusive_ptr<c10::StorageImpl> hold_storage{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::VariableVersion counter;
  uint32_t version = 0;
  int64_t batch = -1;  // when it was read
  int64_t epoch = -1;  // how often weights had been declared changed by then
  RangeRow range{};

  // Tensors made in inference mode have no version counter: nothing tells when they change.
  static bool can_be_remembered(const at::Tensor& x) { return !x.is_inference(); }

  bool is_unchanged(const at::Tensor& x, uint64_t its_key) const {
    const c10::TensorImpl* impl = x.unsafeGetTensorImpl();
    const c10::VariableVersion& its_counter = impl->version_counter();
    return key == its_key && storage == impl->unsafe_storage().unsafeGetStorageImpl() && counter.enabled() &&
           identity(counter) == identity(its_counter) && version == its_counter.current_version();
  }

  void remember(const at::Tensor& x, uint64_t its_key, const RangeRow& row, int64_t at_batch, int64_t at_epoch) {
    const c10::TensorImpl* impl = x.unsafeGetTensorImpl();
    const c10::Storage& held = impl->unsafe_storage();
    if (storage != held.unsafeGetStorageImpl()) {
      storage = held.unsafeGetStorageImpl();
      hold_storage = held.getWeakStorageImpl();
    }
    counter = impl->version_counter();
    version = counter.current_version();
    key = its_key;
    batch = at_batch;
    epoch = at_epoch;
    range = row;
  }

  void forget() { epoch = -1; }
  bool is_expired() const { return storage != nullptr && hold_storage.expired(); }

 private:
  // A VariableVersion is one pointer to the counter, and gives it to nobody.
  static const void* identity(const c10::VariableVersion& version) {
    static_assert(sizeof(version) == sizeof(void*));
    const void* pointer;
    std::memcpy(&pointer, &version, sizeof pointer);
    return pointer;
  }
};

// Activations: one slot per hashed key, the newcomer takes it. Bounded, and a miss only costs a read.
class ActivationCache {
 public:
  Seen& slot(uint64_t key) { return slots_[key >> (64 - kBits)]; }
  void clear() { slots_.assign(slots_.size(), Seen()); }

 private:
  static constexpr int kBits = 10;
  std::vector<Seen> slots_ = std::vector<Seen>(size_t(1) << kBits);
};

// Weights: one entry per tensor, shared by the modules that share the tensor. Entries of freed storages are swept out
// whenever the table has doubled.
class WeightCache {
 public:
  std::shared_ptr<Seen> entry(uint64_t key) {
    if (entries_.size() > sweep_at_) sweep();
    std::shared_ptr<Seen>& found = entries_[key];
    if (!found) found = std::make_shared<Seen>();
    return found;
  }
  size_t size() const { return entries_.size(); }
  void clear() { entries_.clear(); }

 private:
  void sweep() {
    for (auto it = entries_.begin(); it != entries_.end();)
      it = it->second->is_expired() ? entries_.erase(it) : std::next(it);
    sweep_at_ = std::max<size_t>(1024, 2 * entries_.size());
  }

  std::unordered_map<uint64_t, std::shared_ptr<Seen>> entries_;
  size_t sweep_at_ = 1024;
};

}  // namespace nanwatch
