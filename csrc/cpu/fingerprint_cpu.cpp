#include "cpu/fingerprint_cpu.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/range_dispatch.h"
#include "numerics/fingerprint.h"

namespace nanwatch {
namespace {

constexpr FingerprintKeys kKeys;
// Blocks that one step reads: 16 KiB lie in L1 when the second kernel comes.
constexpr int64_t kStep = 16;
// Blocks below which a second thread costs more than it saves, as HostWalk::grain().
constexpr int64_t kGrain = 192;
constexpr int64_t kLine = 64;  // bytes
// A step that gathers whole lines of memory may have this many blocks.
constexpr int64_t kLargestStep = 4096;

// Elements of a view in C order, whatever their strides.
class OrderedElements {
 public:
  explicit OrderedElements(const ElementView& view)
      : data_(static_cast<const char*>(view.data)), width_(view.width), numel_(view.numel) {
    int64_t expected = 1;
    for (int64_t d = view.dims - 1; d >= 0; --d) {
      is_run_ &= view.sizes[d] == 1 || view.strides[d] == expected;
      expected *= view.sizes[d];
    }
    if (is_run_) return;  // the common case allocates nothing
    for (int64_t d = view.dims - 1; d >= 0; --d) {
      const int64_t size = view.sizes[d], stride = view.strides[d];
      if (size == 1) continue;
      if (!dims_.empty() && dims_.back().stride * dims_.back().size == stride)
        dims_.back().size *= size;
      else
        dims_.push_back({size, stride});
    }
    // Elements that lie together belong to different rows: a step has as many rows as a line of memory has elements.
    gathers_rows_ = dims_.size() > 1 && dims_[0].stride > 1 && dims_[1].stride < dims_[0].stride;
    if (!gathers_rows_) return;
    const int64_t rows = std::min(kLine / width_, dims_[1].size) * dims_[0].size * width_;
    step_ = std::clamp((rows + kFingerprintBlock - 1) / kFingerprintBlock, kStep, kLargestStep);
  }

  int64_t bytes() const { return numel_ * width_; }
  bool is_run() const { return is_run_; }
  const char* data() const { return data_; }
  // Blocks that are read at a time.
  int64_t step() const { return step_; }

  // Copies the bytes from `begin` on, `n` of them, both a whole number of elements.
  void copy_to(char* out, int64_t begin, int64_t n) const {
    const Dim inner = dims_[0];
    for (int64_t element = begin / width_, left = n / width_; left > 0;) {
      int64_t index = element / inner.size;
      const int64_t column = element % inner.size;
      int64_t rows = 1, offset = column * inner.stride;
      if (gathers_rows_ && column == 0)
        rows = std::clamp(dims_[1].size - index % dims_[1].size, int64_t(1), std::max(left / inner.size, int64_t(1)));
      for (size_t d = 1; d < dims_.size(); ++d) {
        offset += index % dims_[d].size * dims_[d].stride;
        index /= dims_[d].size;
      }
      const int64_t run = std::min(left, inner.size - column);
      copy_rows(out, data_ + offset * width_, rows, run);
      out += rows * run * width_;
      element += rows * run;
      left -= rows * run;
    }
  }

 private:
  struct Dim {
    int64_t size, stride;
  };

  void copy_rows(char* out, const char* p, int64_t rows, int64_t columns) const {
    if (dims_[0].stride == 1) {
      std::memcpy(out, p, size_t(columns * width_));
      return;
    }
    switch (width_) {
      case 1: return copy_tiles<1>(out, p, rows, columns);
      case 2: return copy_tiles<2>(out, p, rows, columns);
      case 4: return copy_tiles<4>(out, p, rows, columns);
      case 8: return copy_tiles<8>(out, p, rows, columns);
      default: return copy_tiles<16>(out, p, rows, columns);
    }
  }

  template <int width>
  void copy_tiles(char* out, const char* p, int64_t rows, int64_t columns) const {
    constexpr int64_t side = kLine / width;
    const int64_t stride = dims_[0].stride * width, row_stride = dims_.size() > 1 ? dims_[1].stride * width : 0;
    for (int64_t row = 0; row < rows; row += side)
      for (int64_t column = 0; column < columns; column += side)
        for (int64_t r = row; r < std::min(rows, row + side); ++r) {
          const int64_t end = std::min(columns, column + side);
          for (int64_t c = column; c < end; ++c)
            std::memcpy(out + (r * columns + c) * width, p + r * row_stride + c * stride, width);
        }
  }

  const char* data_;
  int64_t width_, numel_, step_ = kStep;
  bool is_run_ = true, gathers_rows_ = false;
  std::vector<Dim> dims_;  // fastest in C order first
};

struct Nothing {
  void merge(const Nothing&) {}
};

// The sum of the blocks; look(bytes, n, &bits) sees the same bytes, while they are in the cache. `part` says which
// blocks of a larger tensor these are.
template <typename Bits, typename Look>
uint64_t sum_of_blocks(const ElementView& view, Bits* bits, const Look& look, BlockPart part = {}) {
  const OrderedElements elements(view);
  const KernelTable& kernels = current_kernels();
  const int64_t size = elements.bytes(), blocks = (size + kFingerprintBlock - 1) / kFingerprintBlock;
  const auto read = [&](int64_t begin, int64_t end, Bits* found) {
    uint64_t sum = 0;
    alignas(64) char last[kFingerprintBlock];
    std::unique_ptr<char[]> buffer;
    if (!elements.is_run()) buffer.reset(new char[size_t(std::min(elements.step(), end - begin) * kFingerprintBlock)]);
    for (int64_t block = begin; block < end; block += elements.step()) {
      const int64_t first = block * kFingerprintBlock;
      const int64_t n = std::min(std::min(elements.step(), end - block) * kFingerprintBlock, size - first);
      if (buffer != nullptr) elements.copy_to(buffer.get(), first, n);
      const char* const p = buffer != nullptr ? buffer.get() : elements.data() + first;
      const int64_t whole = n / kFingerprintBlock, rest = n % kFingerprintBlock;
      kernels.fingerprint(p, whole, uint64_t(part.first + block), kKeys,
                          buffer != nullptr ? p + n : elements.data() + size, &sum);
      if (rest > 0) {
        std::memcpy(last, p + whole * kFingerprintBlock, size_t(rest));
        std::memset(last + rest, 0, size_t(kFingerprintBlock - rest));
        kernels.fingerprint(last, 1, uint64_t(part.first + block + whole), kKeys, last, &sum);
      }
      look(p, n, found);
    }
    return sum;
  };
  if (blocks < 2 * kGrain || part.in_this_thread) return read(0, blocks, bits);
  uint64_t total = 0;
  std::mutex mutex;
  parallel_for(blocks, std::max(kGrain, elements.step()), [&](int64_t begin, int64_t end) {
    Bits found;
    const uint64_t sum = read(begin, end, &found);
    const std::lock_guard<std::mutex> lock(mutex);
    total += sum;
    bits->merge(found);
  });
  return total;
}

}  // namespace

uint64_t fingerprint_cpu(const ElementView& view, BlockPart part) {
  Nothing nothing;
  return sum_of_blocks(view, &nothing, [](const char*, int64_t, Nothing*) {}, part);
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

uint64_t health_and_fingerprint_cpu(const View& view, BlockPart part, double* row) {
  const auto width = int64_t(word_size(view.format));
  const auto kernel = current_kernels().health[int(view.format)];
  HealthBits bits;
  const uint64_t sum = sum_of_blocks(
      {view.data, width, view.numel, view.dims, view.sizes, view.strides}, &bits,
      [=](const char* p, int64_t n, HealthBits* found) { kernel({p, n / width, 1, 1, 0}, found); }, part);
  write_health(view, bits, 1, row);
  return sum;
}

}  // namespace nanwatch
