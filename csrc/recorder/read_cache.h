// Cache of ranges, and the budget of what is read anew. A tensor that is unchanged since it was read is not read again.
//
// "Unchanged" is the hard part. An id or an address is no identity: a freed activation's successor gets both. An entry
// therefore keeps something that tells whether the old owner of the address is still alive. Then the same version
// counter at the same version over the same part of the same storage means the same content, also in another view.
//
// - Weights live long: a weak pointer to the storage and a reference to the version counter, a few bytes each.
// - Activations come and go by the hundred, and a few bytes kept of each would lie between the blocks that the
//   allocator wants to join: 200 activations of 1 MiB then took 100 MiB more. So the cache keeps only a Python weak
//   reference of these, which lies in Python's own arenas, and only until the batch ends.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device/row_table.h"
#include "numerics/range.h"

namespace nanwatch {

// Bytes that may be read of weights and buffers, so that no table, mask or frozen tower makes a watch slow: in the long
// run as many as were read of inputs and outputs, a quarter of that for unchanged ones. One that has changed also has
// kFree in each batch, so that small models are read whole, and a batch in which it waits counts kSaved at least, so
// that its turn comes however small the inputs are. It counts bytes and no clock: two runs read the same.
class ReadBudget {
 public:
  static constexpr int64_t kFree = 4 << 20, kSaved = 1 << 20, kUnchangedPrice = 4;

  void earn(int64_t bytes) { earned_in_batch_ += bytes; }

  // Where the budget is short, each tensor that has changed is read once before any is read again: in one turn. `turn`
  // is the turn in which the tensor was read last.
  bool spend(int64_t bytes, bool has_changed, int64_t* turn) {
    if (has_changed && is_short_ && *turn == turn_) return false;
    int64_t* const account = has_changed && bytes <= free_ ? &free_ : &earned_;
    const int64_t price = has_changed ? bytes : kUnchangedPrice * bytes;
    if (price > *account) {
      if (has_changed) has_refused_ = is_short_ = true;
      return false;
    }
    *account -= price;
    *turn = turn_;
    return true;
  }

  void end_batch() {
    if (!has_refused_) ++turn_;
    is_short_ = has_refused_;
    earned_ += std::max(std::exchange(earned_in_batch_, 0), has_refused_ ? kSaved : 0);
    has_refused_ = false;
    free_ = kFree;
  }

 private:
  int64_t free_ = kFree, earned_ = 0, earned_in_batch_ = 0, turn_ = 0;
  bool has_refused_ = false;  // in this batch
  bool is_short_ = false;     // in this turn
};

// Tensors made in inference mode have no version counter: nothing tells when they change.
inline bool can_be_remembered(const at::Tensor& x) {
  return !x.is_inference();
}

// The content of a tensor: a part of a storage, and its version. Taken before the tensor is read: what another thread
// writes meanwhile then has a later version.
struct Content {
  const c10::StorageImpl* storage = nullptr;
  const void* counter = nullptr;
  uint64_t part = 0;  // offset, dtype, and what else decides which elements belong
  uint32_t version = 0;
  int32_t epoch = -1;  // how often weights had been declared changed by then; below 0 there is nothing

  Content() = default;
  // One copy of the code, because several places on the way of a call need it.
  [[gnu::noinline]] Content(const at::Tensor& x, int32_t at_epoch)
      : storage(storage_of(x)),
        counter(counter_of(x)),
        part(part_of(x)),
        version(x.unsafeGetTensorImpl()->version_counter().current_version()),
        epoch(at_epoch) {}

  bool is_over(const at::Tensor& x) const { return storage == storage_of(x) && counter == counter_of(x); }
  bool is_same_part(const Content& other) const { return storage == other.storage && part == other.part; }
  bool has_same_version(const Content& other) const {
    return epoch >= 0 && is_same_part(other) && counter == other.counter && version == other.version;
  }
  // Contiguous tensors of another shape over the same elements have the same key.
  uint64_t key() const { return (reinterpret_cast<uintptr_t>(storage) ^ part) * kOdd; }
  static uint64_t key_of(const at::Tensor& x) {
    return (reinterpret_cast<uintptr_t>(storage_of(x)) ^ part_of(x)) * kOdd;
  }

 private:
  static constexpr uint64_t kOdd = 0x9e3779b97f4a7c15ull;

  static const c10::StorageImpl* storage_of(const at::Tensor& x) {
    return x.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  }
  // A VariableVersion is one pointer to the counter, and gives it to nobody.
  static const void* counter_of(const at::Tensor& x) {
    const c10::VariableVersion& version = x.unsafeGetTensorImpl()->version_counter();
    static_assert(sizeof(version) == sizeof(void*));
    const void* pointer;
    std::memcpy(&pointer, &version, sizeof pointer);
    return pointer;
  }
  static uint64_t part_of(const at::Tensor& x) {
    const c10::TensorImpl* impl = x.unsafeGetTensorImpl();
    uint64_t part = uint64_t(impl->storage_offset()) * 64 + uint64_t(x.scalar_type());
    const auto mix = [&part](int64_t value) {
      part = (part ^ uint64_t(value)) * kOdd;
      part ^= part >> 29;
    };
    mix(impl->numel());
    if (impl->is_contiguous()) return part;
    for (const int64_t size : impl->sizes()) mix(size);
    for (const int64_t stride : impl->strides()) mix(stride);
    return part;
  }
};

// The range of a tensor; or the row in which a device will put it; or neither, where the budget had no room for it.
// Use it before the interpreter lock is released: others own the row.
struct Reading {
  RangeRow range{};
  const PendingRowPtr* pending = nullptr;
  bool is_refused = false;

  // A non-finite tensor is read each time.
  bool may_be_kept() const { return pending != nullptr || range.isfinite; }
};

// A range and the tensor content it was read from. The caches know whether its addresses are still valid. A hit on the
// host needs one line of the CPU's cache, as the lines of an entry are evicted between two calls.
struct alignas(64) CacheEntry {
  Content content;
  uint32_t batch = 0;  // when it was read; its last 32 bits
  bool is_pending = false;
  double abs_min = 0, abs_max = 0;  // finite
  PyObject* weak = nullptr;         // owned by the ActivationCache; to the tensor object that was read
  PendingRowPtr pending;            // in place of the range where a device was asked for it

  Reading reading() const { return {{abs_min, abs_max, true}, is_pending ? &pending : nullptr}; }

  void take(const Content& its_content, const Reading& reading, int64_t at_batch) {
    content = its_content;
    batch = uint32_t(at_batch);
    abs_min = reading.range.abs_min;
    abs_max = reading.range.abs_max;
    const bool was_pending = std::exchange(is_pending, reading.pending != nullptr);
    if (was_pending || is_pending) pending = is_pending ? *reading.pending : nullptr;
  }

  void forget() { content.epoch = -1; }
};
static_assert(offsetof(CacheEntry, pending) == 64);

// A few slots for each hashed key; when all are taken the newcomer takes the first. Bounded, and a miss only costs a
// read: with 4 of 2048 a batch of 300 activations has none.
class ActivationCache {
 public:
  ActivationCache() { used_.reserve(1024); }
  ActivationCache& operator=(ActivationCache&&) = delete;
  ~ActivationCache() { clear(); }

  // Returns null if the content was not read, or has changed since.
  const CacheEntry* find(const Content& content) const {
    const size_t first = first_of(content);
    for (size_t index = first; index < first + kWays; ++index) {
      const CacheEntry& entry = entries_[index];
      if (entry.weak == nullptr) return nullptr;
      if (entry.content.is_same_part(content))
        return entry.content.has_same_version(content) && is_alive(entry) ? &entry : nullptr;
    }
    return nullptr;
  }

  void remember(PyObject* object, const Content& content, const Reading& reading, int64_t batch) {
    // Before a slot is chosen: the garbage collector may run here, and others' code with it.
    PyObject* weak = PyWeakref_NewRef(object, nullptr);
    if (weak == nullptr) {
      PyErr_Clear();
      weak = Py_NewRef(Py_None);  // no weak reference: the slot stays taken and is never alive
    }
    const size_t first = first_of(content);
    size_t index = first;
    while (index < first + kWays && entries_[index].weak != nullptr && !entries_[index].content.is_same_part(content))
      ++index;
    if (index == first + kWays) index = first;
    CacheEntry& entry = entries_[index];
    if (entry.weak == nullptr) used_.push_back(uint32_t(index));
    Py_XSETREF(entry.weak, weak);
    entry.take(content, reading, batch);
  }

  void clear() {
    for (const uint32_t index : used_) Py_CLEAR(entries_[index].weak);
    used_.clear();
  }

 private:
  static constexpr int kBits = 11;
  static constexpr size_t kWays = 4;

  // Returns whether the tensor that was read lives and is still over that storage with that counter: then neither
  // address has a new owner.
  static bool is_alive(const CacheEntry& entry) {
    PyObject* read = PyWeakref_CheckRef(entry.weak) ? PyWeakref_GetObject(entry.weak) : Py_None;
    if (read == nullptr || read == Py_None) return false;
    return entry.content.is_over(THPVariable_Unpack(read));
  }
  static size_t first_of(const Content& content) { return size_t(content.key() >> (64 - kBits)); }

  std::vector<CacheEntry> entries_ = std::vector<CacheEntry>((size_t(1) << kBits) + kWays);
  std::vector<uint32_t> used_;
};

// Cached range of a weight.
struct WeightEntry {
  CacheEntry entry;
  c10::weak_intrusive_ptr<c10::StorageImpl> hold_storage{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::VariableVersion hold_counter;
  int64_t turn = -1;  // of ReadBudget, in which it was read last

  void take(const at::Tensor& x, const Content& content, const Reading& reading, int64_t batch) {
    // Another thread may have given the tensor another storage while it was read.
    if (!content.is_over(x)) return entry.forget();
    if (entry.content.storage != content.storage || !hold_counter.enabled())
      hold_storage = x.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl();
    hold_counter = x.unsafeGetTensorImpl()->version_counter();
    entry.take(content, reading, batch);
  }
  bool is_expired() const { return entry.content.storage != nullptr && hold_storage.expired(); }
};

// Weights: one entry per tensor, shared by the modules that share the tensor. Entries of freed storages are swept out
// whenever the table has doubled.
class WeightCache {
 public:
  std::shared_ptr<WeightEntry> entry(uint64_t key) {
    if (entries_.size() > sweep_at_) {
      std::erase_if(entries_, [](const auto& entry) { return entry.second->is_expired(); });
      sweep_at_ = std::max<size_t>(1024, 2 * entries_.size());
    }
    std::shared_ptr<WeightEntry>& entry = entries_[key];
    if (!entry) entry = std::make_shared<WeightEntry>();
    return entry;
  }
  std::shared_ptr<WeightEntry> find(uint64_t key) const {
    const auto entry = entries_.find(key);
    return entry == entries_.end() ? nullptr : entry->second;
  }
  size_t size() const { return entries_.size(); }
  void clear() { entries_.clear(); }

 private:
  std::unordered_map<uint64_t, std::shared_ptr<WeightEntry>> entries_;
  size_t sweep_at_ = 1024;
};

}  // namespace nanwatch
