// The reduction over a plane, written once over a vector type `S` (see range_kernels_*.cpp) and instantiated per
// instruction set. Everything sits in an unnamed namespace: each including file compiles for its own target, and the
// linker must never pick one file's copy for another's.
#pragma once

#include "cpu/range_cpu.h"

namespace nanwatch {
namespace {

// A tensor from 16 KiB on is read as four streams: the hardware's prefetchers begin anew at each page of 4 KiB, and
// meanwhile the other three run on. From 64 KiB to 2 MiB that is 1.3 to 1.7 times faster, beyond 1.1 times.
constexpr int64_t kStreams = 4, kStreamedBytes = 16 << 10, kMostChunkBytes = 1 << 20;

// Each stream prefetches the line after the next. Loads that wait for a line fill the queue of the vector units before
// the requests to memory are used up, and a prefetch does not wait in that queue. That is 5 % faster where part of the
// tensor lies in the third cache, and as fast elsewhere; from 4 lines on it is slower there.
constexpr int64_t kLineBytes = 64, kPrefetchBytes = 2 * kLineBytes;

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
  // No magnitude has the sign bit: then a set that compares 64 bits as signed only needs not flip it first.
  static constexpr bool is_signed64 = width == 8 && Codes<F>::sign == Sign::cleared;
  static constexpr Word greatest = is_signed64 ? Word(~sign_bit) : Word(~Word(0));

  static V min(V a, V b) { return S::template min<width, is_signed64>(a, b); }
  static V max(V a, V b) { return S::template max<width, is_signed64>(a, b); }

  static V magnitudes(V x) {
    if constexpr (Codes<F>::sign == Sign::cleared) {
      return x & S::template fill<width>(Word(~sign_bit));
    } else if constexpr (Codes<F>::sign == Sign::fnuz_nan) {
      // The sign bit alone is nan, which stays above all numbers.
      x = load_once(x);
      const V nan = S::template fill<width>(sign_bit);
      return x == nan ? x : x & S::template fill<width>(Word(~sign_bit));
    } else if constexpr (Codes<F>::sign == Sign::twos) {
      return S::template abs<width>(x);
    } else {
      return load_once(x);
    }
  }

  // A vector that two operations take: each of them would load it.
  static V load_once(V x) {
#if defined(__x86_64__)
    __asm__("" : "+v"(x));
#endif
    return x;
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
  static_assert(kAccumulators == kStreams);
  V lo[kAccumulators], hi[kAccumulators];

  // Unrolled, or the compiler leaves the arrays in memory: 17 ns of a call that takes 60.
  RangeLoop() {
#pragma GCC unroll 4
    for (int j = 0; j < kAccumulators; ++j) {
      lo[j] = S::template fill<L::width>(L::greatest);
      hi[j] = S::template fill<L::width>(Word(0));
    }
  }

  V take(int j, V x) { return step(x, &lo[j], &hi[j]); }

  // Takes in `x` and returns its magnitudes.
  static V step(V x, V* lo, V* hi) {
    const V m = L::magnitudes(x);
    *lo = L::min(*lo, m);
    *hi = L::max(*hi, m);
    return m;
  }

  void run(const char* p, int64_t columns) {
    const int64_t bytes = columns * L::width;
    // For rows a page apart this takes two thirds of the time of a masked load, or of a whole vector.
    if constexpr (requires { S::load_halves(p, p); })
      if (bytes >= S::bytes / 2 && bytes <= S::bytes) return void(take(0, S::load_halves(p, p + bytes - S::bytes / 2)));
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
    constexpr int64_t step = kAccumulators * S::bytes;
    if (last - p >= 8 * step) {  // 2 KiB: below, one chain is as fast as four
      RangeLoop fast = *this;
      // Equal chunks, so that no large rest is left to one stream. The last first: of a tensor that was just written
      // the end is still in the cache, and what reads it next finds its beginning there. That saves 3 to 9 % here.
      const int64_t bytes_left = last - p;
      const int64_t chunks = bytes_left < kStreamedBytes ? 0 : (bytes_left + kMostChunkBytes - 1) / kMostChunkBytes;
      const int64_t stream = chunks == 0 ? 0 : bytes_left / chunks / (kStreams * kLineBytes) * kLineBytes;
      const char* const rest = p + chunks * kStreams * stream;
      for (const char* chunk = rest; chunk != p;) {
        chunk -= kStreams * stream;
        for (int64_t line = 0; line < stream; line += kLineBytes) {
#pragma GCC unroll 4
          for (int j = 0; j < kStreams; ++j) {
            const char* const q = chunk + j * stream + line;
            __builtin_prefetch(q + kPrefetchBytes);
#pragma GCC unroll 4
            for (int64_t at = 0; at < kLineBytes; at += S::bytes) fast.take(j, S::load(q + at));
          }
        }
      }
      p = rest;
      for (int64_t count = (last - p + S::bytes) / step; count > 0; --count, p += step) {
#pragma GCC unroll 4
        for (int j = 0; j < kAccumulators; ++j) fast.take(j, S::load(p + j * S::bytes));
      }
      *this = fast;
    }
    for (; p < last; p += S::bytes) take(1, S::load(p));
    take(2, S::load(last));
  }

  // True if a vector spans two of every `stride` elements or more: then whole vectors are read, and the lanes between
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
    lo[1] = L::min(lo[1], S::template fill<L::width>(range.lo));
    hi[1] = L::max(hi[1], S::template fill<L::width>(range.hi));
  }

  void finish(RangeBits* out) const {
    const V l = L::min(L::min(lo[0], lo[1]), L::min(lo[2], lo[3]));
    const V h = L::max(L::max(hi[0], hi[1]), L::max(hi[2], hi[3]));
    out->merge({S::template least<L::width>(l), S::template greatest<L::width>(h)});
  }
};

template <class S, Format F>
void range_plane(const Plane& plane, RangeBits* out) {
  constexpr int width = sizeof(typename Codes<F>::Word);
  using Loop = RangeLoop<S, F>;
  Loop loop;
  const int64_t stride = plane.column_stride;
  const auto each_row = [&plane](const auto& run) {
    const char* p = plane.data;
    // No prefetcher of the hardware's crosses a page, and a narrow row leaves it no time to begin. Rows no wider than a
    // vector come so fast one after the other that the loads themselves run ahead.
    const int64_t ahead = plane.columns * plane.column_stride * width <= S::bytes ? 0 : 16 * plane.row_stride * width;
    for (int64_t r = 0; r < plane.rows; ++r, p += plane.row_stride * width) {
      if (ahead != 0) __builtin_prefetch(p + ahead);
      run(p);
    }
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

}  // namespace
}  // namespace nanwatch
