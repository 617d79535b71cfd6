// The latest gradients of one backward, to recognise one that comes again: the backward of a sum passes the same tensor
// to all its terms, such as the output of a block and that of its shortcut.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <array>
#include <vector>

#include "ops/plain_cuda.h"
#include "ops/plain_view.h"
#include "recorder/read_cache.h"

namespace nanwatch {

// Which tensor, over which memory, in which version.
struct GradientState {
  const at::TensorImpl* tensor = nullptr;
  uint64_t key = 0;
  uint32_t version = 0;
  bool has_version = false;  // without one nothing shows writes
  bool is_plain = false;     // subclasses and sparse tensors change in ways of their own, and may hold tensors

  GradientState() = default;
  explicit GradientState(const at::Tensor& x)
      : tensor(x.unsafeGetTensorImpl()), has_version(can_be_remembered(x)), is_plain(has_plain_keys(x)) {
    if (has_version) version = uint32_t(x._version());
    if (is_plain) key = key_of(x);
  }

  bool operator==(const GradientState& other) const {
    return tensor == other.tensor && version == other.version && key == other.key;
  }

 private:
  static bool has_plain_keys(const at::Tensor& x) {
    const uint64_t keys = x.key_set().raw_repr();
    return (keys & ~kPlainKeys.raw_repr()) == 0 || (keys & ~kPlainCudaKeys.raw_repr()) == 0;
  }
};

// Weak pointers say that it is the same tensor over the same memory: while they are held neither address gets a new
// owner. They keep the empty shells of what was freed, about 300 bytes for each, and no memory of elements.
class RecentGradients {
 public:
  // The number that a gradient was kept with; -1 if it is not known, or not as it is now. `shapes`: where keep() found
  // its sizes.
  int64_t find(const at::Tensor& x, const GradientState& state, const std::vector<int64_t>& shapes) const {
    const size_t at = place_of(state.tensor);
    if (at == kKept || !(kept_[at].state == state)) return -1;
    const at::IntArrayRef sizes = x.sizes();
    const bool same_shape =
        kept_[at].dims == sizes.size() && std::equal(sizes.begin(), sizes.end(), shapes.begin() + kept_[at].shape_at);
    return same_shape ? kept_[at].number : -1;
  }

  // For plain gradients that have a version.
  void keep(const at::Tensor& x, const GradientState& state, uint32_t shape_at, int64_t number) {
    size_t at = place_of(state.tensor);  // of its own, where it was written into since
    if (at == kKept) at = next_++ % kKept;
    tensors_[at] = state.tensor;
    kept_[at].hold_tensor = WeakTensor(x.getIntrusivePtr());
    kept_[at].hold_storage = state.tensor->unsafe_storage().getWeakStorageImpl();
    kept_[at].state = state;
    kept_[at].number = number;
    kept_[at].shape_at = shape_at;
    kept_[at].dims = x.sizes().size();
  }

  void clear() {
    tensors_.fill(nullptr);
    kept_.fill({});
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>;
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

  // Between two places of one gradient came at most 1 other in ResNet-50, ViT, GPT-2, Llama and mT5. In a bottleneck
  // whose shortcut is computed before the branch it is 7.
  static constexpr size_t kKept = 16;

  struct Kept {
    WeakTensor hold_tensor{c10::intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>()};
    WeakStorage hold_storage{c10::intrusive_ptr<c10::StorageImpl>()};
    GradientState state;
    int64_t number = -1;
    uint32_t shape_at = 0;
    size_t dims = 0;
  };

  size_t place_of(const at::TensorImpl* tensor) const {
    return size_t(std::find(tensors_.begin(), tensors_.end(), tensor) - tensors_.begin());
  }

  std::array<const at::TensorImpl*, kKept> tensors_{};  // of kept_, in two cache lines: they are searched each time
  std::array<Kept, kKept> kept_;
  size_t next_ = 0;
};

}  // namespace nanwatch
