#include "cpu/statistics_cpu.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/host_walk.h"

namespace nanwatch {
namespace {

// Elements further from the mean than this many standard deviations count as far.
constexpr double kFar = 6;

// The mean of some elements and the sums of the powers 2 to 4 of their distances from it, in units of 2^exponent. Two
// of them are merged by the formulas of Pébay (Sandia report SAND2008-6212).
struct Moments {
  double n = 0, mean = 0, m2 = 0, m3 = 0, m4 = 0;
  int exponent = 0;

  static Moments from_sums(double n, int exponent, const double* sums) {
    const double a = sums[1] / n, s2 = sums[2], s3 = sums[3], s4 = sums[4];
    return {n,
            sums[0] + a,
            std::max(s2 - n * a * a, 0.0),
            s3 - 3 * a * s2 + 2 * n * a * a * a,
            std::max(s4 - 4 * a * s3 + 6 * a * a * s2 - 3 * n * a * a * a * a, 0.0),
            exponent};
  }

  // A number near the mean, from which distances are taken. It is 0 where that is near enough, and costs nothing.
  double pivot() const { return 16 * mean * mean * n <= m2 ? 0 : mean; }

  void merge(Moments other) {
    if (other.n == 0) return;
    if (n == 0) {
      *this = other;
      return;
    }
    if (exponent != other.exponent) {
      Moments& smaller = exponent < other.exponent ? *this : other;
      smaller.set_exponent(std::max(exponent, other.exponent));
    }
    const double a = n, b = other.n, d = other.mean - mean, both = a + b, e = d / both, p = a * b;
    m4 += other.m4 + d * e * e * e * p * (a * a - p + b * b) + 6 * e * e * (a * a * other.m2 + b * b * m2) +
          4 * e * (a * other.m3 - b * m3);
    m3 += other.m3 + d * e * e * p * (a - b) + 3 * e * (a * other.m2 - b * m2);
    m2 += other.m2 + d * e * p;
    mean += e * b;
    n = both;
  }

 private:
  void set_exponent(int larger) {
    const double f = std::ldexp(1.0, exponent - larger);
    mean *= f;
    m2 *= f * f;
    m3 *= f * f * f;
    m4 *= f * f * f * f;
    exponent = larger;
  }
};

struct Part {
  // A block of a run, for the second read.
  struct Block {
    const char* data;
    int64_t n;
    double abs_max;
  };
  RangeBits range;
  Moments moments;
  std::vector<Block> blocks;

  void merge(const Part& other) {
    range.merge(other.range);
    moments.merge(other.moments);
    blocks.insert(blocks.end(), other.blocks.begin(), other.blocks.end());
  }
};

// Calls look(block) for parts of the plane that have at most kPowerSumsBlock elements.
template <typename Look>
void each_block(const Plane& plane, int64_t width, const Look& look) {
  const int64_t columns = std::min(plane.columns, kPowerSumsBlock);
  const int64_t rows =
      columns < plane.columns ? 1 : std::max<int64_t>(kPowerSumsBlock / std::max<int64_t>(columns, 1), 1);
  for (int64_t r = 0; r < plane.rows; r += rows)
    for (int64_t c = 0; c < plane.columns; c += columns)
      look(Plane{plane.data + (r * plane.row_stride + c * plane.column_stride) * width,
                 std::min(columns, plane.columns - c), plane.column_stride, std::min(rows, plane.rows - r),
                 plane.row_stride});
}

// Units are from 2^-this to 2^this: numbers that a float has, or a double where the kernels take that.
template <Format F>
constexpr int kMaxExponent = F == Format::f64 ? 1022 : 126;

template <Format F>
void statistics(const View& view, double* row) {
  const HostWalk walk(view);
  const KernelTable& kernels = current_kernels();
  const auto power_sums = kernels.power_sums[int(F)];
  const auto beyond = kernels.beyond[int(F)];
  const bool is_run = walk.is_run();
  const Part total = reduce<Part>(walk, [=](const Plane& plane, Part* part) {
    each_block(plane, walk.width, [&](const Plane& block) {
      // The blocks before are a guess of the unit and of the pivot. It is right nearly always, and saves a read.
      const int guess = part->moments.exponent;
      double sums[5] = {part->moments.pivot()};
      RangeBits bits;
      power_sums(block, std::ldexp(1.0, -guess), sums, &bits);
      part->range.merge(bits);
      if (!part->range.narrow<F>().row().isfinite) return;  // nor are the statistics
      const double abs_max = bits.narrow<F>().row().abs_max;
      int exponent = abs_max == 0 ? guess : std::clamp(std::ilogb(abs_max), -kMaxExponent<F>, kMaxExponent<F>);
      const bool is_right = std::abs(exponent - guess) <= 20;
      if (!is_right) {
        if (std::abs(exponent) <= 20) exponent = 0;
        // No mean of this block is larger than 2 units, however large that of the block before is in them.
        sums[0] = std::clamp(std::ldexp(part->moments.mean, guess - exponent), -2.0, 2.0);
        power_sums(block, std::ldexp(1.0, -exponent), sums, nullptr);
      }
      const int64_t n = block.columns * block.rows;
      part->moments.merge(Moments::from_sums(double(n), is_right ? guess : exponent, sums));
      if (is_run) part->blocks.push_back({block.data, n, abs_max});
    });
  });
  const RangeRow ends = total.range.narrow<F>().row();
  ends.write(row);
  const Moments& m = total.moments;
  double *const mean = row + statistics_column::mean, *const rms = row + statistics_column::rms,
                *const kurtosis = row + statistics_column::kurtosis, *const far = row + statistics_column::far;
  *mean = *rms = *kurtosis = *far = std::numeric_limits<double>::quiet_NaN();
  if (!ends.isfinite || m.n == 0) return;
  const double variance = m.m2 / m.n;
  *mean = std::ldexp(m.mean, m.exponent);
  *rms = std::ldexp(std::sqrt(variance + m.mean * m.mean), m.exponent);
  if (m.m2 > 0) *kurtosis = m.m4 / m.m2 * (m.n / m.m2);
  const double limit = std::ldexp(kFar * std::sqrt(variance), m.exponent);
  const auto may_be_far = [&](double abs_max) { return abs_max + std::abs(*mean) > limit; };
  std::atomic<int64_t> count{0};
  if (m.m2 > 0 && may_be_far(ends.abs_max)) {
    if (is_run) {
      // Only the blocks that may have such an element are read again.
      parallel_for(int64_t(total.blocks.size()), 64, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          if (const Part::Block& block = total.blocks[size_t(i)]; may_be_far(block.abs_max))
            count += beyond(Plane{block.data, block.n, 1, 1, 0}, *mean, limit);
      });
    } else {
      walk.planes(0, walk.numel, [&](const Plane& plane) { count += beyond(plane, *mean, limit); });
    }
  }
  *far = double(count) / m.n;
}

}  // namespace

void statistics_cpu(const View& view, double* row) {
  with_format(view.format, [&](auto tag) { statistics<decltype(tag)::format>(view, row); });
}

}  // namespace nanwatch
