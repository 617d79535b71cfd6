// Counts over a plane, beside its range; as in range_loop_impl.h, in an unnamed namespace for each instruction set.
#pragma once

#include "cpu/range_loop_impl.h"

namespace nanwatch {
namespace {

// Counts. From the first block with a zero on, zeros are counted and the least magnitude is no longer searched for.
// That block is read again. Nan and inf are counted in blocks whose maximum says that there is one, which costs a
// healthy tensor nothing.
template <class S, Format F>
struct HealthLoop {
  using L = Lanes<S, F>;
  using Word = typename L::Word;
  using V = typename S::V;
  static constexpr bool counts_subnormal = Codes<F>::min_normal != 0;
  // Two chains: with five accumulators in each, four chains do not fit into the registers. 8-bit lanes count to 130 in
  // a block and cannot wrap.
  static constexpr int kAccumulators = 2;
  static constexpr int64_t kBlockVectors = 128 * kAccumulators;
  static constexpr int64_t kBlockBytes = kBlockVectors * S::bytes;

  static void one(HealthBits* out, Word word) {
    const Word m = magnitude<F>(word);
    out->range.merge({m, m});
    if (is_finite<F>(m)) {
      out->finite.merge({m, m});
      out->num_zero += is_zero<F>(m);
      out->num_subnormal += is_subnormal<F>(m);
    } else {
      out->num_nan += is_nan<F>(m);
      out->num_posinf += is_inf<F>(m) && !is_negative<F>(word);
      out->num_neginf += is_inf<F>(m) && is_negative<F>(word);
    }
  }

  static void some(HealthBits* out, const char* p, int64_t columns, int64_t stride) {
    for (; columns > 0; --columns, p += stride * L::width) one(out, load_word<Word>(p));
  }

  RangeLoop<S, F> range;
  V zero[kAccumulators];
  typename S::LessCount small[kAccumulators];

  HealthLoop() {
    for (int j = 0; j < kAccumulators; ++j) {
      zero[j] = S::template fill<L::width>(Word(0));
      small[j] = typename S::LessCount{};
    }
  }

  void take(int j, V x) { count<true>(range.take(j, x), &zero[j], &small[j]); }

  template <bool with_zeros>
  static void count(V m, V* zeros, typename S::LessCount* smalls) {
    if constexpr (with_zeros && Codes<F>::has_zero)
      *zeros = S::template count_equal<L::width>(*zeros, m, S::template fill<L::width>(Word(0)));
    if constexpr (counts_subnormal)
      *smalls = S::template count_less<L::width>(*smalls, m, S::template fill<L::width>(Codes<F>::min_normal));
  }

  // A vector of which only the first `columns` elements are the tensor's: the rest repeat the first and are not
  // counted.
  int64_t take_partial(int j, const char* p, int64_t columns) {
    take(j, S::load_partial(p, columns * L::width, S::template fill<L::width>(load_word<Word>(p))));
    return L::count - columns;
  }

  // Takes in `turns` of kAccumulators vectors one after the other, or of a line of each stream. In locals, as in
  // RangeLoop: held through `this`, the accumulators are spilled.
  template <bool with_zeros, bool of_streams>
  void take_turns(const char* p, int64_t turns) {
    constexpr int64_t places = of_streams ? kStreams : kAccumulators;
    constexpr int64_t apart = of_streams ? kStreamBytes : S::bytes, bytes = of_streams ? kLineBytes : S::bytes;
    constexpr int a = kAccumulators;
    V lo[a], hi[a], zeros[a], least[a];
    typename S::LessCount smalls[a];
    for (int j = 0; j < a; ++j) {
      lo[j] = S::template fill<L::width>(L::greatest);
      hi[j] = zeros[j] = least[j] = S::template fill<L::width>(Word(0));
      smalls[j] = typename S::LessCount{};
    }
    for (; turns > 0; --turns, p += of_streams ? bytes : places * bytes) {
#pragma GCC unroll 4
      for (int j = 0; j < places; ++j) {
        if constexpr (of_streams) __builtin_prefetch(p + j * apart + kPrefetchBytes);
#pragma GCC unroll 4
        for (int64_t at = 0; at < bytes; at += S::bytes) {
          const int i = j % a;
          const V x = S::load(p + j * apart + at);
          const V m = RangeLoop<S, F>::template step<!with_zeros, with_zeros>(x, &lo[i], &hi[i], &least[i]);
          count<with_zeros>(m, &zeros[i], &smalls[i]);
        }
      }
    }
    for (int j = 0; j < a; ++j) {
      range.lo[j] = lo[j], range.hi[j] = hi[j], range.least_signed[j] = least[j];
      zero[j] = zeros[j], small[j] = smalls[j];
    }
  }

  // One block of at most kBlockVectors vectors and a ragged end. False, and nothing was done, if zeros are to be
  // counted and are not.
  template <bool with_zeros>
  static bool block(HealthBits* out, const char* p, int64_t columns) {
    HealthLoop loop;
    const char* q = p;
    int64_t vectors = columns / L::count;
    if (const int64_t turns = vectors / kAccumulators; turns > 0) {
      loop.template take_turns<with_zeros, false>(q, turns);
      vectors %= kAccumulators;
      q += turns * kAccumulators * S::bytes;
    }
    for (int j = 0; j < vectors; ++j, q += S::bytes) loop.take(j, S::load(q));
    const int64_t rest = columns % L::count;
    const int64_t padding = rest == 0 ? 0 : loop.take_partial(1, q, rest);
    RangeBits bits;
    loop.range.finish(&bits);
    if (!is_finite<F>(Word(bits.hi))) return some(out, p, columns, 1), true;
    return loop.template finish<with_zeros>(out, bits, padding == 0 ? Word(0) : load_word<Word>(q), padding);
  }

  // One block of kBlockVectors vectors, a part of it of each stream.
  template <bool with_zeros>
  static bool block_of_streams(HealthBits* out, const char* p) {
    constexpr int64_t bytes = kBlockBytes / kStreams;
    HealthLoop loop;
    loop.template take_turns<with_zeros, true>(p, bytes / kLineBytes);
    RangeBits bits;
    loop.range.finish(&bits);
    if (is_finite<F>(Word(bits.hi))) return loop.template finish<with_zeros>(out, bits, 0, 0);
    for (int j = 0; j < kStreams; ++j) some(out, p + j * kStreamBytes, bytes / L::width, 1);
    return true;
  }

  template <bool with_zeros>
  bool finish(HealthBits* out, RangeBits bits, Word pad, int64_t padding) const {
    constexpr int w = L::width;
    if (!with_zeros && Codes<F>::has_zero && bits.lo == 0) return false;
    if (with_zeros) bits.lo = 0;
    out->range.merge(bits);
    out->finite.merge(bits);
    const Word m = magnitude<F>(pad);
    int64_t zeros = is_zero<F>(m) ? -padding : 0;
    if constexpr (Codes<F>::has_zero)
      for (int j = 0; j < kAccumulators; ++j) zeros += S::template total<w>(zero[j]);
    out->num_zero += zeros;
    if constexpr (counts_subnormal) {
      int64_t smalls = m < Codes<F>::min_normal ? -padding : 0;
      for (int j = 0; j < kAccumulators; ++j) smalls += S::template total<w>(small[j]);
      out->num_subnormal += smalls - zeros;
    }
    return true;
  }

  static void run(HealthBits* out, const char* p, int64_t columns) {
    // Loads should not cross a cache line: the first block ends at one.
    constexpr int64_t whole = kBlockVectors * L::count, streams = kChunkBytes / L::width;
    const uintptr_t misaligned = reinterpret_cast<uintptr_t>(p) % S::bytes;
    int64_t n = misaligned % L::width == 0 && misaligned != 0 ? int64_t(S::bytes - misaligned) / L::width : whole;
    // The one that has the first zero is read again: no more than was read before it.
    int64_t most = whole / 8;
    while (columns > 0) {
      if (out->finite.lo != 0 && n > most) n = most;
      if (n == whole && columns >= streams) {
        for (const char* q = p; q < p + kStreamBytes; q += kBlockBytes / kStreams)
          if (out->finite.lo == 0 || !block_of_streams<false>(out, q)) block_of_streams<true>(out, q);
        p += kChunkBytes;
        columns -= streams;
        continue;
      }
      if (n > columns) n = columns;
      if (out->finite.lo == 0 || !block<false>(out, p, n)) block<true>(out, p, n);
      p += n * L::width;
      columns -= n;
      n = whole;
      if (most < whole) most *= 2;
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
      HealthLoop<S, F>::some(out, p, plane.columns, plane.column_stride);
    }
  }
}

}  // namespace
}  // namespace nanwatch
