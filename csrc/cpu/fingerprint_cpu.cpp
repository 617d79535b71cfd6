#include "cpu/fingerprint_cpu.h"

#include <cstring>

#include "cpu/host_walk.h"
#include "cpu/range_dispatch.h"
#include "numerics/fingerprint.h"

namespace nanwatch {
namespace {

constexpr FingerprintKeys kKeys;
// Blocks that one step reads: 16 KiB lie in L1 when the second kernel comes.
constexpr int64_t kStep = 16;
// Blocks below which a second thread costs more than it saves, as HostWalk::grain().
constexpr int64_t kGrain = 192;

template <int width>
void copy_strided(char* out, const char* p, int64_t n, int64_t stride) {
  for (int64_t i = 0; i < n; ++i, out += width, p += stride * width) std::memcpy(out, p, width);
}

// Elements of a view in C order, whatever their strides.
class OrderedElements {
 public:
  explicit OrderedElements(const ElementView& view)
      : data_(static_cast<const char*>(view.data)), width_(view.width), numel_(view.numel) {
    for (int64_t d = view.dims - 1; d >= 0; --d) {
      const int64_t size = view.sizes[d], stride = view.strides[d];
      if (size == 1) continue;
      if (!dims_.empty() && dims_.back().stride * dims_.back().size == stride)
        dims_.back().size *= size;
      else
        dims_.push_back({size, stride});
    }
    if (dims_.empty()) dims_.push_back({1, 1});
  }

  int64_t bytes() const { return numel_ * width_; }

  // The bytes from `begin` on, `n` of them, both a whole number of elements: where they lie, or copied to `buffer`.
  const char* read(int64_t begin, int64_t n, char* buffer) const {
    if (dims_.size() == 1 && dims_[0].stride == 1) return data_ + begin;
    char* out = buffer;
    for (int64_t element = begin / width_, left = n / width_; left > 0;) {
      int64_t index = element / dims_[0].size;
      const int64_t column = element % dims_[0].size;
      int64_t offset = column * dims_[0].stride;
      for (size_t d = 1; d < dims_.size(); ++d) {
        offset += index % dims_[d].size * dims_[d].stride;
        index /= dims_[d].size;
      }
      const int64_t run = std::min(left, dims_[0].size - column);
      copy(out, data_ + offset * width_, run, dims_[0].stride);
      out += run * width_;
      element += run;
      left -= run;
    }
    return buffer;
  }

 private:
  struct Step {
    int64_t size, stride;
  };

  void copy(char* out, const char* p, int64_t n, int64_t stride) const {
    if (stride == 1) {
      std::memcpy(out, p, size_t(n * width_));
      return;
    }
    switch (width_) {
      case 1: return copy_strided<1>(out, p, n, stride);
      case 2: return copy_strided<2>(out, p, n, stride);
      case 4: return copy_strided<4>(out, p, n, stride);
      case 8: return copy_strided<8>(out, p, n, stride);
      default: return copy_strided<16>(out, p, n, stride);
    }
  }

  const char* data_;
  int64_t width_, numel_;
  std::vector<Step> dims_;  // fastest in C order first
};

// The sum of the blocks; look(bytes, n) sees the same bytes, while they are in the cache.
template <typename Bits, typename Look>
uint64_t sum_of_blocks(const ElementView& view, Bits* bits, const Look& look) {
  const OrderedElements elements(view);
  const KernelTable& kernels = current_kernels();
  const int64_t size = elements.bytes(), blocks = (size + kFingerprintBlock - 1) / kFingerprintBlock;
  uint64_t total = 0;
  std::mutex mutex;
  parallel_for(blocks, kGrain, [&](int64_t begin, int64_t end) {
    alignas(64) char buffer[kStep * kFingerprintBlock];
    uint64_t sum = 0;
    Bits part;
    for (int64_t block = begin; block < end; block += kStep) {
      const int64_t first = block * kFingerprintBlock;
      const int64_t n = std::min(std::min(kStep, end - block) * kFingerprintBlock, size - first);
      const char* p = elements.read(first, n, buffer);
      look(p, n, &part);
      const int64_t whole = n / kFingerprintBlock, rest = n % kFingerprintBlock;
      kernels.fingerprint(p, whole, uint64_t(block), kKeys, &sum);
      if (rest > 0) {
        char* const last = buffer + whole * kFingerprintBlock;
        if (p != buffer) std::memcpy(last, p + whole * kFingerprintBlock, size_t(rest));
        std::memset(last + rest, 0, size_t(kFingerprintBlock - rest));
        kernels.fingerprint(last, 1, uint64_t(block + whole), kKeys, &sum);
      }
    }
    const std::lock_guard<std::mutex> lock(mutex);
    total += sum;
    bits->merge(part);
  });
  return total;
}

struct Nothing {
  void merge(const Nothing&) {}
};

}  // namespace

uint64_t fingerprint_cpu(const ElementView& view) {
  Nothing nothing;
  return sum_of_blocks(view, &nothing, [](const char*, int64_t, Nothing*) {});
}

RangeRow range_and_fingerprint_cpu(const View& view) {
  const auto width = int64_t(word_size(view.format));
  const auto kernel = current_kernels().range[int(view.format)];
  RangeBits bits;
  const uint64_t sum =
      sum_of_blocks({view.data, width, view.numel, view.dims, view.sizes, view.strides}, &bits,
                    [=](const char* p, int64_t n, RangeBits* part) { kernel({p, n / width, 1, 1, 0}, part); });
  RangeRow row = with_format(view.format, [&](auto tag) { return bits.narrow<decltype(tag)::format>().row(); });
  row.blocks = sum;
  return row;
}

}  // namespace nanwatch
