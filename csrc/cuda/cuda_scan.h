// How the threads of a block read their share of a tensor into lanes. Device code, for range_cuda.cu alone.
//
// What counts is bytes in flight: an H200's 4.8 TB/s (data sheet) at 700 ns (assumed) are 3.4 MB, 26 KB on each of 132
// SMs. Two blocks of 512 threads with four loads of 16 bytes each have 64 KB on the way.
#pragma once

#include <cuda_runtime.h>

#include "cuda/cuda_lanes.h"
#include "cuda/cuda_walk.h"

namespace nanwatch {

constexpr int kThreads = 512, kWarpThreads = 32, kWarps = kThreads / kWarpThreads;
constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kInFlight = 4;  // independent loads of a thread
// Vectors that a warp reads in one step, neighbours in memory: its loads differ by constants, and DRAM pages are met
// whole.
constexpr int kWarpVectors = kWarpThreads * kInFlight;
constexpr int64_t kWarpBytes = kWarpVectors * int64_t(sizeof(Vector));

__device__ __forceinline__ int64_t misalignment(const char* p, int64_t boundary) {
  return int64_t(reinterpret_cast<uintptr_t>(p) % uintptr_t(boundary));
}

// A word at any address: memory from other libraries need not be aligned to its element, and a plain load would fault.
template <class Word>
__device__ __forceinline__ Word load_word(const char* p) {
  if (misalignment(p, sizeof(Word)) == 0) return *reinterpret_cast<const Word*>(p);
  Word word = 0;
#pragma unroll 1
  for (unsigned byte = 0; byte < sizeof(Word); ++byte)
    word = Word(word | Word(Word(static_cast<unsigned char>(p[byte])) << (8 * byte)));
  return word;
}

// Past L1, where nobody comes back to it, but not first to leave L2: the next layer reads this tensor from there.
__device__ __forceinline__ Vector load_vector(const char* p) {
#ifdef __CUDA_ARCH__
  Vector v;
  asm("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
      : "l"(__cvta_generic_to_global(p)));
  return v;
#else
  return *reinterpret_cast<const Vector*>(p);
#endif
}

// `count` elements in a row from `first` on, aligned for their own size, shared among `warps` warps; the caller is warp
// number `warp` of them. One by one up to a 16-byte boundary and from the last one on, vectors between.
template <class Word, class Lanes>
__device__ __forceinline__ void scan_run(Lanes& lanes, const char* first, int count, int warp, int warps) {
  constexpr int width = sizeof(Word), per_vector = 16 / width;
  const int lane = int(threadIdx.x) % kWarpThreads;
  const int to_boundary = int((16 - misalignment(first, 16)) % 16) / width;
  const int head = to_boundary < count ? to_boundary : count;
  const int vectors = (count - head) / per_vector;
  const int tail = head + vectors * per_vector;
  if (warp == 0) {
    if (lane < head) lanes.take_one(*reinterpret_cast<const Word*>(first + lane * width));
    if (lane < count - tail) lanes.take_one(*reinterpret_cast<const Word*>(first + (tail + lane) * width));
  }
  Vector vector[kInFlight];
  int v = warp * kWarpVectors + lane;
  const char* p = first + (int64_t(head) * width + int64_t(v) * 16);
  const int step = warps * kWarpVectors;
#pragma unroll 1
  for (; v + (kInFlight - 1) * kWarpThreads < vectors; v += step, p += step * int64_t(16)) {
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) vector[k] = load_vector(p + k * kWarpThreads * 16);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) lanes.take(vector[k]);
  }
  // Fewer than four are left to this thread, and in one step: the next begins beyond the end.
#pragma unroll
  for (int k = 0; k < kInFlight - 1; ++k)
    if (v + k * kWarpThreads < vectors) vector[k] = load_vector(p + k * kWarpThreads * 16);
#pragma unroll
  for (int k = 0; k < kInFlight - 1; ++k)
    if (v + k * kWarpThreads < vectors) lanes.take(vector[k]);
}

// Runs of neighbours: the whole of a flat share, or the rows of a walk, wherever each begins. A row is shared among as
// many warps as have a whole step of it.
template <class Word, class Lanes, class AnyBatch>
__device__ __forceinline__ void scan_runs(Lanes& lanes, const AnyBatch& batch, const Share& share) {
  const char* const data = batch.data[share.tensor];
  const int number = batch.walk[share.tensor];
  const bool flat = number == kFlat;
  const auto& walk = batch.walks[flat ? 0 : number];
  const int64_t columns = flat ? share.end : walk.size[0];
  int warps = flat ? kWarps : 1;
  while (warps < kWarps && columns * int64_t(sizeof(Word)) >= 2 * warps * kWarpBytes) warps *= 2;
  const int warp = int(threadIdx.x) / kWarpThreads;
#pragma unroll 1
  for (int64_t row = flat ? 0 : share.begin / columns + warp / warps; row * columns < share.end;
       row += kWarps / warps) {
    const int64_t begin = row * columns < share.begin ? share.begin : row * columns;
    const int64_t end = (row + 1) * columns < share.end ? (row + 1) * columns : share.end;
    uint32_t rest[1] = {uint32_t(row)};
    int64_t offset[1] = {(begin - row * columns) * int64_t(sizeof(Word))};
    if (!flat) walk.add_rows(rest, offset);
    scan_run<Word>(lanes, data + offset[0], int(end - begin), warp % warps, warps);
  }
}

// Units of one vector or one element, each found by itself.
template <class Unit, class Word, class Lanes, class AnyWalk>
__device__ __forceinline__ void scan_units(Lanes& lanes, const char* data, const AnyWalk& walk, const Share& share) {
  constexpr bool is_vector = sizeof(Unit) > sizeof(Word);
  constexpr int64_t per_unit = int64_t(sizeof(Unit) / sizeof(Word));
  const int64_t unit_stride = is_vector ? int64_t(sizeof(Unit)) : walk.stride[0];
  const uint32_t end = uint32_t(share.end / per_unit);
#pragma unroll 1
  for (uint32_t i = uint32_t(share.begin / per_unit) + threadIdx.x; i < end; i += kInFlight * kThreads) {
    uint32_t number[kInFlight];
    int64_t offset[kInFlight];
    Unit unit[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      number[k] = i + k * kThreads < end ? i + k * kThreads : i;  // a load that nobody looks at, in place of a branch
      offset[k] = 0;
    }
    walk.add_units(number, unit_stride, offset);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if constexpr (is_vector) {
        unit[k] = load_vector(data + offset[k]);
      } else {
        unit[k] = *reinterpret_cast<const Word*>(data + offset[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (i + k * kThreads >= end) break;
      if constexpr (is_vector) {
        lanes.take(unit[k]);
      } else {
        lanes.take_one(unit[k]);
      }
    }
  }
}

// A block's share of one tensor, by the way that suits it.
template <class Word, class Lanes, class AnyBatch>
__device__ __forceinline__ void scan(Lanes& lanes, const AnyBatch& batch, const Share& share) {
  const int number = batch.walk[share.tensor];
  if (number == kFlat || batch.walks[number].reading == Reading::rows) {
    scan_runs<Word>(lanes, batch, share);
  } else if (batch.walks[number].reading == Reading::vectors) {
    scan_units<Vector, Word>(lanes, batch.data[share.tensor], batch.walks[number], share);
  } else {
    scan_units<Word, Word>(lanes, batch.data[share.tensor], batch.walks[number], share);
  }
}

template <Format F>
__device__ __forceinline__ void update(Range<F>& range, typename Codes<F>::Word word, int64_t) {
  range.update(word);
}

template <Format F>
__device__ __forceinline__ void update(Health<F>& health, typename Codes<F>::Word word, int64_t position) {
  health.update(word, position);
}

// The same share one element at a time, at any address, with each one's position in C order: what the fast ways above
// must agree with, where tensors go that they do not take, and where a health that is not finite is counted.
template <class Word, class Accumulator, class AnyBatch>
__device__ __forceinline__ void scan_plainly(Accumulator& accumulator, const AnyBatch& batch, const Share& share) {
  const char* const data = batch.data[share.tensor];
  const int number = batch.walk[share.tensor];
#pragma unroll 1
  for (int64_t i = share.begin + int(threadIdx.x); i < share.end; i += kThreads) {
    if (number == kFlat) {
      update(accumulator, load_word<Word>(data + i * int64_t(sizeof(Word))), i);
    } else {
      const auto& walk = batch.walks[number];
      update(accumulator, load_word<Word>(data + walk.offset(i)), walk.position(i));
    }
  }
}

}  // namespace nanwatch
