// Sums of the first four powers over a block in the first cache; as in range_loop_impl.h, in an unnamed namespace for
// each instruction set.
#pragma once

#include <type_traits>

#include "cpu/range_loop_impl.h"

namespace nanwatch {
namespace {

// The lines that are needed next, as in fingerprint_loop_impl.h.
constexpr int64_t kAheadBytes = 8 << 10;

template <typename T, int bytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(bytes)));
};

// The elements of a format as vectors of numbers: of float, or of double where float has too few bits or too few
// exponents.
template <class S, Format F>
struct Numbers {
  using Word = typename Codes<F>::Word;
  static constexpr bool is_half = F == Format::f16 || F == Format::bf16;
  using Real = std::conditional_t<is_half || F == Format::f32, float, double>;
  // Other formats are decoded one by one.
  static constexpr bool is_loaded = is_half || F == Format::f32 || F == Format::f64;
  static constexpr int count = S::bytes / sizeof(Real);
  using V = typename VectorOf<Real, S::bytes>::Type;
  using Wide = typename VectorOf<double, S::bytes>::Type;
  using Bits = typename VectorOf<uint32_t, S::bytes>::Type;
  using Halves = typename VectorOf<uint16_t, S::bytes / 2>::Type;

  static V load(const char* p) {
    if constexpr (!is_half) {
      V v;
      __builtin_memcpy(&v, p, sizeof v);
      return v;
    } else {
      if constexpr (F == Format::f16 && requires { S::widened_halves(p); }) return V(S::widened_halves(p));
      Halves halves;
      __builtin_memcpy(&halves, p, sizeof halves);
      const Bits bits = __builtin_convertvector(halves, Bits);
      if constexpr (F == Format::bf16) return V(bits << 16);
      // The exponents of the two formats differ by 112. A subnormal half gives 2^-15 + x / 2 that way, and the lesser
      // of both is x for every half. Subnormal floats on the way would be zeros after torch.set_flush_denormal(True).
      const V shifted = V(((bits & 0x7fff) << 13) + (112u << 23)), subnormal = shifted + shifted - 0x1p-14f;
      return V(Bits(subnormal < shifted ? subnormal : shifted) | ((bits & 0x8000) << 16));
    }
  }

  // The numbers as doubles, those of float in pairs: the sum of all is that of `v`.
  static Wide widened(V v) {
    if constexpr (sizeof(Real) == sizeof(double)) {
      return v;
    } else {
      typename VectorOf<Real, S::bytes / 2>::Type halves[2];
      __builtin_memcpy(halves, &v, sizeof v);
      return __builtin_convertvector(halves[0], Wide) + __builtin_convertvector(halves[1], Wide);
    }
  }

  // The vectors 0 and 1 of the next 2 * count elements, which may be in any order.
  static V next(const char* p, int j) {
    if constexpr (F == Format::bf16) {
      Bits pairs;
      __builtin_memcpy(&pairs, p, sizeof pairs);
      return V(j == 0 ? pairs << 16 : pairs & 0xffff0000u);
    } else {
      return load(p + j * count * int64_t(sizeof(Word)));
    }
  }

  static Real one(const char* p) {
    const Word word = load_word<Word>(p);
    const double m = decode<F>(magnitude<F>(word));
    return Real(is_negative<F>(word) ? -m : m);
  }
};

// Adds to sums[1] to sums[4] the powers of x * scale - pivot, for the pivot in sums[0]; and to `range` the range of x.
// `is_raw` says that the scale is 1 and the pivot 0.
template <class S, Format F, bool with_range, bool is_raw>
void add_powers(const char* p, int64_t n, double scale, double* sums, RangeBits* range) {
  using N = Numbers<S, F>;
  using L = Lanes<S, F>;
  using V = typename N::V;
  using Real = typename N::Real;
  constexpr int64_t width = sizeof(typename N::Word);
  constexpr int chains = 2;
  // A lane of float adds 8 numbers, then 8 such sums, before it is added to a double. Each of these 15 roundings costs
  // 2^-24 of the sum at most.
  constexpr int64_t step = chains * N::count, group = 8 * step, part = 8 * group;
  const Real pivot = Real(sums[0]), factor = Real(scale);
  typename N::Wide wide[4] = {};
  typename S::V lo[chains], hi[chains];
  for (int j = 0; j < chains; ++j) {
    lo[j] = S::template fill<L::width>(L::greatest);
    hi[j] = S::template fill<L::width>(typename N::Word(0));
  }
  int64_t i = 0;
  const int64_t whole = n / step * step;
  while (i < whole) {
    V sum[4] = {};
    for (const int64_t part_end = whole - i < part ? whole : i + part; i < part_end;) {
      V s[4][chains] = {};
      for (const int64_t end = part_end - i < group ? part_end : i + group; i < end; i += step) {
#pragma GCC unroll 2
        for (int j = 0; j < chains; ++j) {
          const char* const at = p + (i + j * N::count) * width;
          // Both halves of a vector of 16-bit words make a vector of numbers each.
          if constexpr (with_range)
            if (!N::is_half || j == 0) {
              __builtin_prefetch(at + kAheadBytes);
              const typename S::V m = L::magnitudes(S::load(at));
              lo[j] = L::min(lo[j], m);
              hi[j] = L::max(hi[j], m);
            }
          V d = N::next(p + i * width, j);
          if constexpr (!is_raw) d = d * factor - pivot;
          const V d2 = d * d;
          s[0][j] += d;
          s[1][j] += d2;
          s[2][j] += d2 * d;
          s[3][j] += d2 * d2;
        }
      }
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) sum[k] += s[k][0] + s[k][1];
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) wide[k] += N::widened(sum[k]);
  }
  for (int k = 0; k < 4; ++k)
    for (int lane = 0; lane < int(sizeof(wide[k]) / sizeof(double)); ++lane) sums[k + 1] += wide[k][lane];
  if constexpr (with_range) {
    range->merge(
        {S::template least<L::width>(L::min(lo[0], lo[1])), S::template greatest<L::width>(L::max(hi[0], hi[1]))});
    range_plane<S, F>(Plane{p + i * width, n - i, 1, 1, 0}, range);
  }
  for (; i < n; ++i) {
    const double d = double(N::one(p + i * width)) * scale - pivot, d2 = d * d;
    sums[1] += d;
    sums[2] += d2;
    sums[3] += d2 * d;
    sums[4] += d2 * d2;
  }
}

// Writes the sums of the powers of the distances from a pivot, whose guess stands in sums[0]. Pivot, distances and sums
// are in units of 1 / scale. `range` may be null.
template <class S, Format F>
void sum_powers(const char* p, int64_t n, double scale, double* sums, RangeBits* range) {
  using Real = typename Numbers<S, F>::Real;
  for (int turn = 0; turn < 3; ++turn) {
    sums[0] = double(Real(sums[0]));
    for (int k = 1; k <= 4; ++k) sums[k] = 0;
    if (turn == 0 && range != nullptr && scale == 1 && sums[0] == 0) {
      add_powers<S, F, true, true>(p, n, scale, sums, range);
    } else if (turn == 0 && range != nullptr) {
      add_powers<S, F, true, false>(p, n, scale, sums, range);
    } else {
      add_powers<S, F, false, false>(p, n, scale, sums, nullptr);
    }
    // Further than half a deviation from the mean, rounding the powers would cost more than the last bit of a float.
    // The second pivot is 2^-20 of the mean off at most. The third is as near as a float comes, as for equal elements.
    if (sums[1] * sums[1] <= 0.25 * double(n) * sums[2]) return;
    if (turn < 2) sums[0] += sums[1] / double(n);
  }
}

template <class S, Format F>
void power_sums(const Plane& block, double scale, double* sums, RangeBits* range) {
  using N = Numbers<S, F>;
  constexpr int64_t width = sizeof(typename N::Word);
  if constexpr (N::is_loaded)
    if (block.rows == 1 && block.column_stride == 1)
      return sum_powers<S, F>(block.data, block.columns, scale, sums, range);
  if (range != nullptr) range_plane<S, F>(block, range);
  typename N::Real values[kPowerSumsBlock];
  int64_t n = 0;
  for (int64_t r = 0; r < block.rows; ++r)
    for (int64_t c = 0; c < block.columns; ++c)
      values[n++] = N::one(block.data + (r * block.row_stride + c * block.column_stride) * width);
  constexpr Format plain = sizeof(typename N::Real) == 4 ? Format::f32 : Format::f64;
  sum_powers<S, plain>(reinterpret_cast<const char*>(values), n, scale, sums, nullptr);
}

// The largest number of the format that is not above x.
template <typename Real>
Real rounded_down(double x) {
  const Real nearest = Real(x);
  return double(nearest) > x ? Real(__builtin_nextafterf(float(nearest), -__builtin_inff())) : nearest;
}

// The number of elements that lie further than `limit` from `mean`.
template <class S, Format F>
int64_t count_beyond(const Plane& block, double mean, double limit) {
  using N = Numbers<S, F>;
  using Real = typename N::Real;
  using Hits = typename VectorOf<std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>, S::bytes>::Type;
  constexpr int64_t width = sizeof(typename N::Word);
  // An element is above a number when it is above the nearest one of its own format below that.
  const Real most = rounded_down<Real>(mean + limit), least = -rounded_down<Real>(limit - mean);
  int64_t count = 0;
  for (int64_t r = 0; r < block.rows; ++r) {
    const char* p = block.data + r * block.row_stride * width;
    int64_t c = 0;
    if constexpr (N::is_loaded) {
      Hits hits = {};
      for (; block.column_stride == 1 && c + N::count <= block.columns; c += N::count) {
        const typename N::V x = N::load(p + c * width);
        hits -= Hits(x > most) + Hits(x < least);
      }
      for (int lane = 0; lane < N::count; ++lane) count += hits[lane];
    }
    for (; c < block.columns; ++c) {
      const Real x = N::one(p + c * block.column_stride * width);
      count += x > most || x < least;
    }
  }
  return count;
}

}  // namespace
}  // namespace nanwatch
