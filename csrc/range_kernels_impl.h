// The reduction over a plane, written once over a vector type `S` (see simd_*.h) and instantiated per instruction set.
// Everything sits in an unnamed namespace: each including file compiles for its own target, and the linker must never
// pick one file's copy for another's.
#pragma once

#include "range_kernels.h"

namespace nanwatch {
namespace {

template <typename Word>
Word load_word(const char* p) {
  Word w;  // storage may be misaligned for its own word (numpy.frombuffer at an odd offset)
  __builtin_memcpy(&w, p, sizeof w);
  return w;
}

template <class S, Format F>
struct Lanes {
  using Word = typename Codes<F>::Word;
  using V = typename S::V;
  static constexpr int width = sizeof(Word);
  static constexpr int count = S::bytes / width;
  static constexpr Word sign_bit = Word(Word(1) << (8 * width - 1));

  static V magnitudes(V x) {
    if constexpr (Codes<F>::sign == Sign::cleared) {
      return S::bit_and(x, S::template fill<width>(Word(~sign_bit)));
    } else if constexpr (Codes<F>::sign == Sign::fnuz_nan) {
      const V sign = S::template fill<width>(sign_bit);
      return S::template select_equal<width>(x, sign, x, S::bit_and(x, S::template fill<width>(Word(~sign_bit))));
    } else if constexpr (Codes<F>::sign == Sign::twos) {
      return S::template abs<width>(x);
    } else {
      return x;
    }
  }
};

// Min and max of magnitudes. Both are idempotent, so a ragged end is read by a vector that overlaps what was read
// already, and a run shorter than a vector is padded with its own first element: no scalar loop, no identity to blend.
template <class S, Format F>
struct RangeLoop {
  using L = Lanes<S, F>;
  using Word = typename L::Word;
  using V = typename S::V;
  static constexpr int kAccumulators = 4;  // min and max have 1 to 3 cycles of latency; four chains hide them
  V lo[kAccumulators], hi[kAccumulators];

  RangeLoop() {
    for (int j = 0; j < kAccumulators; ++j) {
      lo[j] = S::template fill<L::width>(Word(~Word(0)));
      hi[j] = S::template fill<L::width>(Word(0));
    }
  }

  void take(int j, V x) {
    const V m = L::magnitudes(x);
    lo[j] = S::template min<L::width>(lo[j], m);
    hi[j] = S::template max<L::width>(hi[j], m);
  }

  void run(const char* p, int64_t columns) {
    const int64_t bytes = columns * L::width;
    if (bytes < S::bytes) {
      if (bytes > 0) take(0, S::load_partial(p, bytes, S::template fill<L::width>(load_word<Word>(p))));
      return;
    }
    const char* const last = p + bytes - S::bytes;
    // Loads that cross a 64-byte line cost 4 to 13 %: read one vector where the run starts, then from the boundary on.
    take(0, S::load(p));
    const uintptr_t misaligned = reinterpret_cast<uintptr_t>(p) % S::bytes;
    p += misaligned % L::width == 0 ? S::bytes - misaligned : S::bytes;
    // The accumulators are copied to locals: held through `this`, the compiler spills them on every step.
    V l0 = lo[0], l1 = lo[1], l2 = lo[2], l3 = lo[3], h0 = hi[0], h1 = hi[1], h2 = hi[2], h3 = hi[3];
    for (; p + (kAccumulators - 1) * S::bytes <= last; p += kAccumulators * S::bytes) {
      const V m0 = L::magnitudes(S::load(p)), m1 = L::magnitudes(S::load(p + S::bytes));
      const V m2 = L::magnitudes(S::load(p + 2 * S::bytes)), m3 = L::magnitudes(S::load(p + 3 * S::bytes));
      l0 = S::template min<L::width>(l0, m0);
      h0 = S::template max<L::width>(h0, m0);
      l1 = S::template min<L::width>(l1, m1);
      h1 = S::template max<L::width>(h1, m1);
      l2 = S::template min<L::width>(l2, m2);
      h2 = S::template max<L::width>(h2, m2);
      l3 = S::template min<L::width>(l3, m3);
      h3 = S::template max<L::width>(h3, m3);
    }
    lo[0] = l0, lo[1] = l1, lo[2] = l2, lo[3] = l3, hi[0] = h0, hi[1] = h1, hi[2] = h2, hi[3] = h3;
    for (; p < last; p += S::bytes) take(1, S::load(p));
    take(2, S::load(last));
  }

  // Whether a vector spans two of every `stride` elements or more: then whole vectors are read and the lanes between
  // are overwritten with an element that counts. Wider strides go one by one.
  static bool vectors_pay(int64_t stride) { return stride <= L::count / 2; }

  // The lanes of a vector that count.
  static V lanes_of(int64_t stride) {
    alignas(64) Word pattern[L::count];
    for (int k = 0; k < L::count; ++k) pattern[k] = k % stride == 0 ? Word(~Word(0)) : Word(0);
    return S::load(reinterpret_cast<const char*>(pattern));
  }

  void run_lanes(const char* p, int64_t columns, int64_t stride, V lanes) {
    const V first = S::template fill<L::width>(load_word<Word>(p));
    const int64_t per_vector = L::count / stride;
    // Stop while a whole vector still lies inside the run: what is behind its last element is not ours to read.
    for (; (columns - 1) * stride + 1 >= L::count; columns -= per_vector, p += per_vector * stride * L::width)
      take(0, S::select(lanes, S::load(p), first));
    if (columns > 0)
      take(1, S::select(lanes, S::load_partial(p, ((columns - 1) * stride + 1) * L::width, first), first));
  }

  void run_singly(const char* p, int64_t columns, int64_t stride) {
    Range<F> range;
    for (; columns > 0; --columns, p += stride * L::width) range.update(load_word<Word>(p));
    lo[1] = S::template min<L::width>(lo[1], S::template fill<L::width>(range.lo));
    hi[1] = S::template max<L::width>(hi[1], S::template fill<L::width>(range.hi));
  }

  void finish(RangeBits* out) const {
    alignas(64) Word l[L::count], h[L::count];
    S::store(
        l, S::template min<L::width>(S::template min<L::width>(lo[0], lo[1]), S::template min<L::width>(lo[2], lo[3])));
    S::store(
        h, S::template max<L::width>(S::template max<L::width>(hi[0], hi[1]), S::template max<L::width>(hi[2], hi[3])));
    RangeBits bits{l[0], h[0]};
    for (int k = 1; k < L::count; ++k) bits.merge({l[k], h[k]});
    out->merge(bits);
  }
};

template <class S, Format F>
void range_plane(const Plane& plane, RangeBits* out) {
  constexpr int width = sizeof(typename Codes<F>::Word);
  if (plane.rows == 0 || plane.columns == 0) return;
  using Loop = RangeLoop<S, F>;
  Loop loop;
  const int64_t stride = plane.column_stride;
  const auto each_row = [&plane](const auto& run) {
    const char* p = plane.data;
    for (int64_t r = 0; r < plane.rows; ++r, p += plane.row_stride * width) run(p);
  };
  if (stride == 1) {
    each_row([&](const char* p) { loop.run(p, plane.columns); });
  } else if (Loop::vectors_pay(stride)) {
    const typename S::V lanes = Loop::lanes_of(stride);
    each_row([&](const char* p) { loop.run_lanes(p, plane.columns, stride, lanes); });
  } else {
    each_row([&](const char* p) { loop.run_singly(p, plane.columns, stride); });
  }
  loop.finish(out);
}

// Counts. Zeros and subnormals are counted in every vector (a lazy count of zeros doubles the time on the output of a
// ReLU); nan and inf only in blocks whose maximum says that there is one, which costs a healthy tensor nothing.
template <class S, Format F>
struct HealthLoop {
  using L = Lanes<S, F>;
  using Word = typename L::Word;
  using V = typename S::V;
  static constexpr bool counts_subnormal = Codes<F>::min_normal != 0;
  // Vectors in a block: with four counters per kind, 8-bit lanes count at most 128 and cannot wrap.
  static constexpr int kAccumulators = 4;
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

  // `vectors` is a multiple of four and at most kBlockVectors.
  static void block(HealthBits* out, const char* p, int64_t vectors) {
    V lo[kAccumulators], hi[kAccumulators], zero[kAccumulators], small[kAccumulators];
    for (int j = 0; j < kAccumulators; ++j) {
      lo[j] = S::template fill<L::width>(Word(~Word(0)));
      hi[j] = zero[j] = small[j] = S::template fill<L::width>(Word(0));
    }
    const V min_normal = S::template fill<L::width>(Codes<F>::min_normal);
    const V none = S::template fill<L::width>(Word(0));
    const char* q = p;
    for (int64_t i = 0; i < vectors; i += kAccumulators, q += kAccumulators * S::bytes) {
#pragma GCC unroll 4
      for (int j = 0; j < kAccumulators; ++j) {
        const V m = L::magnitudes(S::load(q + j * S::bytes));
        lo[j] = S::template min<L::width>(lo[j], m);
        hi[j] = S::template max<L::width>(hi[j], m);
        if constexpr (Codes<F>::has_zero) zero[j] = S::template count_equal<L::width>(zero[j], m, none);
        if constexpr (counts_subnormal) small[j] = S::template count_less<L::width>(small[j], m, min_normal);
      }
    }
    RangeBits range;
    int64_t zeros = 0, smalls = 0;
    alignas(64) Word l[L::count], h[L::count], z[L::count], s[L::count];
    for (int j = 0; j < kAccumulators; ++j) {
      S::store(l, lo[j]), S::store(h, hi[j]), S::store(z, zero[j]), S::store(s, small[j]);
      for (int k = 0; k < L::count; ++k) {
        range.merge({l[k], h[k]});
        zeros += z[k];
        smalls += s[k];
      }
    }
    if (!is_finite<F>(Word(range.hi))) return some(out, p, vectors * L::count, 1);
    out->range.merge(range);
    out->finite.merge(range);
    out->num_zero += zeros;
    if constexpr (counts_subnormal) out->num_subnormal += smalls - zeros;
  }

  static void run(HealthBits* out, const char* p, int64_t columns) {
    const uintptr_t misaligned = reinterpret_cast<uintptr_t>(p) % S::bytes;
    if (misaligned != 0 && misaligned % L::width == 0) {
      const int64_t head = int64_t(S::bytes - misaligned) / L::width;
      const int64_t n = head < columns ? head : columns;
      some(out, p, n, 1);
      p += n * L::width;
      columns -= n;
    }
    int64_t vectors = columns / L::count / kAccumulators * kAccumulators;
    columns -= vectors * L::count;
    while (vectors > 0) {
      const int64_t n = vectors < kBlockVectors ? vectors : kBlockVectors;
      block(out, p, n);
      p += n * S::bytes;
      vectors -= n;
    }
    some(out, p, columns, 1);
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

template <class S>
constexpr KernelTable make_kernels(const char* name) {
  // The index is the format's number.
#define NANWATCH_ALL(kernel)                                                                           \
  {                                                                                                    \
    kernel<S, Format::f64>, kernel<S, Format::f32>, kernel<S, Format::f16>, kernel<S, Format::bf16>,   \
        kernel<S, Format::f8_e4m3fn>, kernel<S, Format::f8_e5m2>, kernel<S, Format::f8_e4m3fnuz>,      \
        kernel<S, Format::f8_e5m2fnuz>, kernel<S, Format::f8_e8m0fnu>, kernel<S, Format::boolean>,     \
        kernel<S, Format::u8>, kernel<S, Format::i8>, kernel<S, Format::u16>, kernel<S, Format::i16>,  \
        kernel<S, Format::u32>, kernel<S, Format::i32>, kernel<S, Format::u64>, kernel<S, Format::i64> \
  }
  return KernelTable{name, NANWATCH_ALL(range_plane), NANWATCH_ALL(health_plane)};
#undef NANWATCH_ALL
}

}  // namespace
}  // namespace nanwatch
