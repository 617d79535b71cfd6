// csrc/cuda/cuda_lanes.h and csrc/cuda/cuda_walk.h alone, for tests over every pattern.
#define CUDART_VERSION 13000
#include "cuda/cuda_lanes.h"
#include "cuda/cuda_walk.h"

namespace {

using namespace nanwatch;

template <Format F, bool pairs>
void fold(const Vector* vectors, int64_t count, double* rows, uint32_t* counts) {
  for (int64_t i = 0; i < count; ++i) {
    HealthLanes<F, pairs> lanes(Codes<F>::min_normal);
    lanes.take(vectors[i]);
    lanes.ends.range().write(rows + 3 * i);
    counts[2 * i] = lanes.num_zero();
    counts[2 * i + 1] = lanes.num_small();
  }
}

template <Format F, bool pairs>
void fold_singly(const char* words, int64_t count, double* rows, uint32_t* counts) {
  using Word = typename Codes<F>::Word;
  for (int64_t i = 0; i < count; ++i) {
    Word word;
    memcpy(&word, words + i * int64_t(sizeof word), sizeof word);
    HealthLanes<F, pairs> lanes(Codes<F>::min_normal);
    lanes.take_one(word);
    lanes.ends.range().write(rows + 3 * i);
    counts[2 * i] = lanes.num_zero();
    counts[2 * i + 1] = lanes.num_small();
  }
}

}  // namespace

extern "C" {

// For each of `count` vectors of 16 bytes: its range's row, and how many of its elements are zero and how many lie
// below the smallest normal.
void lanes_fold(int format, int pairs, const void* vectors, int64_t count, double* rows, uint32_t* counts) {
  with_format(Format(format), [&](auto tag) {
    constexpr Format F = decltype(tag)::format;
    (pairs ? fold<F, true> : fold<F, false>)(static_cast<const Vector*>(vectors), count, rows, counts);
  });
}

// The same for each of `count` elements.
void lanes_fold_singly(int format, int pairs, const void* words, int64_t count, double* rows, uint32_t* counts) {
  with_format(Format(format), [&](auto tag) {
    constexpr Format F = decltype(tag)::format;
    (pairs ? fold_singly<F, true> : fold_singly<F, false>)(static_cast<const char*>(words), count, rows, counts);
  });
}

void lanes_divide(const uint32_t* numbers, const uint32_t* divisors, int64_t count, uint32_t* quotients) {
  for (int64_t i = 0; i < count; ++i) quotients[i] = Divider::of(divisors[i]).divide(numbers[i]);
}

}  // extern "C"
