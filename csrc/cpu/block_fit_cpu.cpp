// The driver of the loops over blocks: units of rows for the threads, in them segments that stay in the cache while
// each format reads them.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <cmath>
#include <limits>
#include <utility>

#include "cpu/block_fit.h"
#include "cpu/parallel.h"
#include "cpu/range_cpu.h"

namespace nanwatch {
namespace {

constexpr int64_t kUnit = 1 << 17;        // elements of a unit of work
constexpr int64_t kSegment = 4096;        // elements: 16 KiB of L1
constexpr int64_t kTallSegment = 512;     // under blocks of 128 rows: 256 KiB of L2, which are read twice
constexpr int64_t kLongestRow = 1 << 15;  // with a scale of its own: 128 KiB of L2
constexpr int64_t kTile = 128;            // rows and columns of a block with a scale in float32

const BlockKernels* block_kernels() {
#if defined(__x86_64__)
  if (&current_kernels() == &avx512_kernels()) return &avx512_block_kernels();
  if (&current_kernels() == &avx2_kernels()) return &avx2_block_kernels();
#endif
  return nullptr;
}

int64_t pieces(int64_t size, int64_t piece) {
  return (size + piece - 1) / piece;
}

// The row of one format and one unit.
class FitRow {
 public:
  explicit FitRow(double* items) : items_(items) {
    items_[fit_item::lowest_scale] = std::numeric_limits<double>::infinity();
    items_[fit_item::highest_scale] = -items_[fit_item::lowest_scale];
    worst_.clear();
    write_worst();
  }

  void add(fit_item::Item item, int64_t number) { items_[item] += double(number); }

  // Blocks from number `first` on. One of zeros shows no scale.
  void blocks(const BlockKernels& kernels, int64_t first, int64_t count, const BlockArrays& blocks) {
    const BlockSums sums = kernels.sum_blocks(blocks, count);
    add(fit_item::blocks, count);
    items_[fit_item::signal] += sums.signal;
    items_[fit_item::noise] += sums.noise;
    if (sums.highest == 0) return;
    items_[fit_item::lowest_scale] = std::min(items_[fit_item::lowest_scale], double(with_bits(sums.lowest)));
    items_[fit_item::highest_scale] = std::max(items_[fit_item::highest_scale], double(with_bits(sums.highest)));
    for (int64_t i = 0; (i = kernels.next_noisy(blocks, i, count, worst_.likely)) < count; ++i)
      worst_.add(double(first + i), blocks.signal[i], blocks.noise[i]);
    write_worst();
  }

 private:
  void write_worst() { std::copy(worst_.found, worst_.found + 3 * kWorstBlocks, items_ + fit_item::worst); }

  double* const items_;
  WorstBlocks worst_;
};

// Part of a row as the loops read it, and the numbers of each 16 elements.
struct Segment {
  const float* x;
  int64_t columns;
  Granules granules;
  int64_t zeros;
};

// A block with a scale in float32, which may lie in many segments.
struct WideBlock {
  uint32_t amax = 0;
  double signal = 0, noise = 0;
  int64_t rounded = 0, zeros = 0;

  void gather(const Segment& segment, int64_t first, int64_t columns) {
    for (int64_t i = first / 16; i < pieces(first + columns, 16); ++i) {
      amax = std::max(amax, segment.granules.amax[i]);
      signal += segment.granules.signal[i];
    }
  }
};

// Reads units for one thread.
class UnitReader {
 public:
  UnitReader(const BlockKernels& kernels, const Matrices& matrices, const std::vector<BlockFormat>& formats, float amax,
             bool is_tall, int64_t longest)
      : kernels_(kernels), matrices_(matrices), formats_(formats), of_all_(amax), is_tall_(is_tall), longest_(longest) {
    copies_ = matrices.word != FloatWord::float32 || matrices.columns % 32 != 0;
    const auto blocks = size_t(pieces(longest, 32) * 2);
    if (copies_) copy_.resize(16 * blocks);
    amax_.resize(blocks);
    factor_.resize(blocks);
    value_.resize(blocks);
    signal_.resize(blocks);
    sums_.resize(blocks);
    noise_.resize(blocks);
  }

  // Rows from `first` on, counted over all matrices. False where the kernels refuse.
  bool read(int64_t first, int64_t last, int64_t begin, int64_t end, std::vector<FitRow>* out) {
    for (; begin < end; begin += longest_) {
      const int64_t columns = std::min(longest_, end - begin);
      is_wide_ = false;
      if (is_tall_) {
        tiles_.assign(size_t(pieces(columns, kTile)), WideBlock{});
        for (int64_t row = first; row < last; ++row) {
          const Segment segment = prepare(row, begin, columns);
          for (size_t i = 0; i < tiles_.size(); ++i) {
            const int64_t at = int64_t(i) * kTile;
            tiles_[i].gather(segment, at, std::min(kTile, columns - at));
          }
        }
      }
      const bool is_prepared_once = is_tall_ && formats_.size() == 1 && !copies_;
      for (int64_t row = first; row < last; ++row) {
        Segment segment{at(row, begin), columns, {}, 0};
        if (!is_prepared_once) segment = prepare(row, begin, columns);
        for (size_t i = 0; i < formats_.size(); ++i)
          if (!read(formats_[i], segment, row, begin, &(*out)[i])) return false;
      }
      for (size_t i = 0; i < formats_.size(); ++i)
        if (formats_[i].rows > 1) finish_tiles(formats_[i], first, last, begin, columns, &(*out)[i]);
    }
    return true;
  }

 private:
  const float* at(int64_t row, int64_t column) const {
    return static_cast<const float*>(matrices_.data) + row * matrices_.columns + column;
  }

  Segment prepare(int64_t row, int64_t column, int64_t columns) {
    const int64_t place = row * matrices_.columns + column;
    const char* const p =
        static_cast<const char*>(matrices_.data) + place * (matrices_.word == FloatWord::float32 ? 4 : 2);
    Segment segment{copies_ ? copy_.data() : at(row, column), columns, {amax_.data(), signal_.data()}, 0};
    is_wide_ |= kernels_.prepare(p, matrices_.word, columns, copies_ ? copy_.data() : nullptr, amax_.data(),
                                 signal_.data(), &segment.zeros);
    zeros_ += segment.zeros;
    return segment;
  }

  bool read(const BlockFormat& format, const Segment& segment, int64_t row, int64_t begin, FitRow* out) {
    const RoundedElement element = RoundedElement::of(format);
    if (format.rows > 1) {
      bool is_known = true;
      for (size_t i = 0; i < tiles_.size(); ++i)
        is_known &= round(format, element, segment, int64_t(i) * kTile, kTile, &tiles_[i]);
      return is_known;
    }
    const int64_t width = format.columns == 0 ? segment.columns : format.columns;
    const int64_t blocks = pieces(segment.columns, width);
    const int64_t start = row * pieces(matrices_.columns, width) + begin / width;
    int64_t zeros = -segment.zeros;
    const bool is_power = format.scale == BlockScale::power;
    if (is_power || format.scale == BlockScale::two_level) {
      const BlockArrays arrays{factor_.data(), value_.data(), sums_.data(), noise_.data()};
      if (is_power) {
        if (!kernels_.powers(segment.granules, blocks, format.largest, arrays)) return false;
      } else {
        if (!(of_all_ >= kLeastOfTensor && of_all_ <= kMostOfBlock)) return false;  // nan too
        const float of_tensor = scale_of_tensor(of_all_, format.largest);
        out->add(fit_item::flushed_blocks,
                 kernels_.levels(segment.granules, blocks, format.largest, of_tensor, arrays));
      }
      RoundCounts counts;
      const auto kernel = is_power ? kernels_.power : kernels_.two_level[is_wide_];
      kernel(segment.x, blocks, arrays.factor, arrays.value, element, arrays.noise, &counts);
      out->blocks(kernels_, start, blocks, arrays);
      out->add(fit_item::saturated, counts.saturated);
      zeros += counts.zeros - (blocks * width - segment.columns);
    } else {
      for (int64_t i = 0; i < blocks; ++i) {
        WideBlock block;
        const int64_t columns = std::min(width, segment.columns - i * width);
        block.gather(segment, i * width, columns);
        if (!round(format, element, segment, i * width, width, &block)) return false;
        finish(format, block, start + i, out);
        zeros += block.zeros - (block.rounded - columns);
      }
    }
    out->add(fit_item::flushed, zeros);
    out->add(fit_item::elements, segment.columns - segment.zeros);
    return true;
  }

  // Rounds the part of a block that lies in a segment.
  bool round(const BlockFormat& format, const RoundedElement& element, const Segment& segment, int64_t first,
             int64_t width, WideBlock* block) {
    const int64_t count = pieces(std::min(width, segment.columns - first), 16) * 16;
    const BlockFactor by = float_factor(with_bits(block->amax), format.largest);
    const auto kernel = (format.scale == BlockScale::divisor ? kernels_.divisor : kernels_.factor)[is_wide_];
    block->noise += kernel(segment.x + first, count, by.factor, by.value, element, &block->zeros);
    block->rounded += count;
    return by.refused == 0;
  }

  void finish(const BlockFormat& format, const WideBlock& block, int64_t index, FitRow* out) {
    BlockFactor by = float_factor(with_bits(block.amax), format.largest);
    double signal = block.signal, noise = block.noise;
    out->blocks(kernels_, index, 1, {&by.factor, &by.value, &signal, &noise});
    out->add(fit_item::flushed_blocks, block.amax != 0 && block.zeros == block.rounded);
  }

  void finish_tiles(const BlockFormat& format, int64_t first, int64_t last, int64_t begin, int64_t columns,
                    FitRow* out) {
    const int64_t band = first / matrices_.rows * pieces(matrices_.rows, kTile) + first % matrices_.rows / kTile;
    const int64_t start = band * pieces(matrices_.columns, kTile) + begin / kTile;
    int64_t rounded = 0, zeros = 0;
    for (size_t i = 0; i < tiles_.size(); ++i) {
      finish(format, tiles_[i], start + int64_t(i), out);
      rounded += tiles_[i].rounded;
      zeros += tiles_[i].zeros;
    }
    // Each row was counted when the largest magnitudes were gathered, and again unless the loops read it in place.
    const bool is_prepared_once = formats_.size() == 1 && !copies_;
    const int64_t there = std::exchange(zeros_, 0) / (is_prepared_once ? 1 : 2), read = (last - first) * columns;
    out->add(fit_item::flushed, zeros - (rounded - read) - there);
    out->add(fit_item::elements, read - there);
  }

  const BlockKernels& kernels_;
  const Matrices& matrices_;
  const std::vector<BlockFormat>& formats_;
  const float of_all_;  // the largest magnitude of the tensor
  const bool is_tall_;
  const int64_t longest_;
  bool copies_;
  bool is_wide_ = false;  // since `begin`: some squares leave float32
  int64_t zeros_ = 0;     // that were prepared since tiles were finished
  std::vector<float> copy_, factor_, value_;
  std::vector<uint32_t> amax_;
  std::vector<double> signal_, sums_, noise_;
  std::vector<WideBlock> tiles_;
};

}  // namespace

FitRows block_fit_cpu(const Matrices& matrices, const std::vector<BlockFormat>& formats, float amax) {
  FitRows found;
  const BlockKernels* const kernels = block_kernels();
  const int64_t rows = matrices.batch * matrices.rows, columns = matrices.columns;
  const auto any = [&](auto is) { return std::any_of(formats.begin(), formats.end(), is); };
  const bool is_tall = any([](const BlockFormat& format) { return format.rows > 1; });
  const bool has_rows = any([](const BlockFormat& format) { return format.columns == 0; });
  if (kernels == nullptr || rows * columns == 0 || formats.empty() || (has_rows && columns > kLongestRow)) return found;

  const bool is_tall_alone = is_tall && formats.size() == 1;
  const int64_t longest = std::min(has_rows ? columns : is_tall_alone ? kTallSegment : kSegment, columns);
  // Long rows are shared among threads where no scale is that of a row.
  const int64_t breadth = has_rows || columns <= kUnit ? columns : kUnit;
  const int64_t height = is_tall ? kTile : std::max<int64_t>(1, kUnit / columns);
  const int64_t bands = is_tall ? matrices.batch * pieces(matrices.rows, kTile) : pieces(rows, height);
  const int64_t across = pieces(columns, breadth), units = bands * across;
  found.values.assign(formats.size() * size_t(units * kFitItems), 0.0);
  std::atomic<bool> is_known = true;
  parallel_for(units, pieces(kUnit, height * breadth), [&](int64_t begin, int64_t end) {
    UnitReader reader(*kernels, matrices, formats, amax, is_tall, longest);
    for (int64_t unit = begin; unit < end && is_known; ++unit) {
      std::vector<FitRow> out;
      for (size_t i = 0; i < formats.size(); ++i)
        out.emplace_back(found.values.data() + (int64_t(i) * units + unit) * kFitItems);
      const int64_t band = unit / across, column = unit % across * breadth;
      int64_t first = band * height, last = std::min(first + height, rows);
      if (is_tall) {
        const int64_t in_matrix = pieces(matrices.rows, kTile), matrix = band / in_matrix * matrices.rows;
        first = matrix + band % in_matrix * kTile;
        last = std::min(first + kTile, matrix + matrices.rows);
      }
      if (!reader.read(first, last, column, std::min(column + breadth, columns), &out)) is_known = false;
    }
  });
  if (!is_known) found.values.clear();
  found.units = units;
  return found;
}

}  // namespace nanwatch
