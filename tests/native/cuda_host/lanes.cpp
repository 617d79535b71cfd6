// csrc/cuda/cuda_lanes.h alone, for tests over every pattern.
#include "cuda/cuda_lanes.h"

namespace {

using namespace nanwatch;

template <Format F>
void fold(const Vector* vectors, int64_t count, double* rows) {
  for (int64_t i = 0; i < count; ++i) {
    RangeLanes<F> lanes;
    lanes.take(vectors[i]);
    lanes.range().row().write(rows + 3 * i);
  }
}

}  // namespace

extern "C" {

// The range's row of each of `count` vectors of 16 bytes.
void lanes_fold(int format, const void* vectors, int64_t count, double* rows) {
  with_format(Format(format),
              [&](auto tag) { fold<decltype(tag)::format>(static_cast<const Vector*>(vectors), count, rows); });
}

}  // extern "C"
