// Counts over a plane, beside its range, and the table of all kernels of one instruction set; as in range_loop_impl.h,
// in an unnamed namespace for each.
#pragma once

#include "cpu/range_loop_impl.h"
#include "cpu/vectors_impl.h"

namespace nanwatch {
namespace {

// Zeros and subnormal numbers are counted in lanes. Nan and inf are counted in blocks whose maximum says that there is
// one, which costs a healthy tensor nothing.
template <class S, Format F>
struct HealthLoop {
  using L = Lanes<S, F>;
  using Word = typename L::Word;
  using V = typename S::V;
  static constexpr bool counts_subnormal = Codes<F>::min_normal != 0;
  // Two chains: with four accumulators in each, four chains do not fit into the registers. 8-bit lanes count to 130 in
  // a block and cannot wrap.
  static constexpr int kAccumulators = 2;
  static constexpr int64_t kBlockVectors = 128 * kAccumulators, kBlockColumns = kBlockVectors * L::count;

  V lo[kAccumulators], hi[kAccumulators], zeros[kAccumulators], smalls[kAccumulators];

  HealthLoop() {
    for (int j = 0; j < kAccumulators; ++j) {
      lo[j] = S::template fill<L::width>(L::greatest);
      hi[j] = zeros[j] = smalls[j] = S::template fill<L::width>(Word(0));
    }
  }

  static void count_each(HealthBits* out, const char* p, int64_t columns, int64_t stride) {
    Health<F> health;
    for (; columns > 0; --columns, p += stride * L::width) health.update(load_word<Word>(p), Health<F>::kNone);
    out->HealthCounts::merge(health);
    out->range.merge({health.range.lo, health.range.hi});
    out->finite.merge({health.finite.lo, health.finite.hi});
  }

  void take(int j, V x) {
    const V m = RangeLoop<S, F>::step(x, &lo[j], &hi[j]);
    if constexpr (Codes<F>::has_zero)
      zeros[j] = S::template count_equal<L::width>(zeros[j], m, S::template fill<L::width>(Word(0)));
    if constexpr (counts_subnormal)
      smalls[j] = S::template count_less<L::width>(smalls[j], m, S::template fill<L::width>(Codes<F>::min_normal));
  }

  // One block of at most kBlockVectors vectors and a ragged end, whose vector is filled up with its first element.
  static void block(HealthBits* out, const char* p, int64_t columns) {
    constexpr int w = L::width;
    HealthLoop loop;  // in locals: held through `this`, the accumulators are spilled
    const char* q = p;
    int64_t vectors = columns / L::count;
    for (; vectors >= kAccumulators; vectors -= kAccumulators, q += kAccumulators * S::bytes) {
#pragma GCC unroll 2
      for (int j = 0; j < kAccumulators; ++j) loop.take(j, S::load(q + j * S::bytes));
    }
    for (int j = 0; j < vectors; ++j, q += S::bytes) loop.take(j, S::load(q));
    const int64_t rest = columns % L::count, padding = rest == 0 ? 0 : L::count - rest;
    const Word pad = rest == 0 ? Word(0) : load_word<Word>(q);
    if (rest > 0) loop.take(1, S::load_partial(q, rest * w, S::template fill<w>(pad)));
    const RangeBits bits{S::template least<w>(L::min(loop.lo[0], loop.lo[1])),
                         S::template greatest<w>(L::max(loop.hi[0], loop.hi[1]))};
    if (!is_finite<F>(Word(bits.hi))) return count_each(out, p, columns, 1);
    out->range.merge(bits);
    out->finite.merge(bits);
    const Word m = magnitude<F>(pad);
    int64_t num_zero = is_zero<F>(m) ? -padding : 0, num_small = m < Codes<F>::min_normal ? -padding : 0;
    for (int j = 0; j < kAccumulators; ++j) {
      if constexpr (Codes<F>::has_zero) num_zero += S::template total<w>(loop.zeros[j]);
      if constexpr (counts_subnormal) num_small += S::template total<w>(loop.smalls[j]);
    }
    out->num_zero += num_zero;
    if constexpr (counts_subnormal) out->num_subnormal += num_small - num_zero;
  }

  static void run(HealthBits* out, const char* p, int64_t columns) {
    // Loads should not cross a cache line: the first block ends at one.
    const uintptr_t misaligned = reinterpret_cast<uintptr_t>(p) % S::bytes;
    int64_t n =
        misaligned % L::width == 0 && misaligned != 0 ? int64_t(S::bytes - misaligned) / L::width : kBlockColumns;
    for (; columns > 0; n = kBlockColumns) {
      if (n > columns) n = columns;
      block(out, p, n);
      p += n * L::width;
      columns -= n;
    }
  }
};

template <class S, Format F>
void health_plane(const Plane& plane, HealthBits* out) {
  constexpr int width = sizeof(typename Codes<F>::Word);
  const char* p = plane.data;
  for (int64_t r = 0; r < plane.rows; ++r, p += plane.row_stride * width) {
    if (plane.column_stride == 1) {
      HealthLoop<S, F>::run(out, p, plane.columns);
    } else {
      HealthLoop<S, F>::count_each(out, p, plane.columns, plane.column_stride);
    }
  }
}

// The table of the kernels of one instruction set, `S`.
template <class S>
constexpr KernelTable make_kernels(const char* name) {
  KernelTable table{};
  table.name = name;
#define NANWATCH_KERNELS(name, ...)                              \
  table.range[int(Format::name)] = range_plane<S, Format::name>; \
  table.health[int(Format::name)] = health_plane<S, Format::name>;
  NANWATCH_FORMATS(NANWATCH_KERNELS)
#undef NANWATCH_KERNELS
  return table;
}

}  // namespace
}  // namespace nanwatch
