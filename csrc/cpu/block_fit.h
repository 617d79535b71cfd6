// The error that block formats make on matrices in host memory. numerics/block_fit.py has the meaning of every number,
// and the same in plain torch for what is refused here.
#pragma once

#include <cstdint>
#include <vector>

#include "numerics/block_format.h"

namespace nanwatch {

enum class FloatWord : int64_t { float32, bfloat16, float16 };

// `batch` matrices, dense, one behind the other.
struct Matrices {
  const void* data;
  FloatWord word;
  int64_t batch, rows, columns;
};

struct FitRows {
  int64_t units = 0;
  std::vector<double> values;  // (formats, units, kFitItems); empty where the kernels refuse
};

// Refuses what plain torch has to do: CPUs without AVX2, tensors that are not finite or come near the end of float32,
// MX blocks whose scale is no normal number, rows too long for a scale of their own. `amax`: the largest magnitude of
// the tensor, for two_level.
FitRows block_fit_cpu(const Matrices& matrices, const std::vector<BlockFormat>& formats, float amax);

// The inner loops of one instruction set. Elements come in blocks of 16, filled up with zeros to a multiple of 32.
struct RoundCounts {
  int64_t saturated = 0, zeros = 0;
};

// Of every 16 elements: largest magnitude (bits) and sum of squares.
struct Granules {
  const uint32_t* amax;
  const double* signal;
};

// Of every block: what its elements are multiplied by, the inverse, and the sums of squares of them and of their
// errors.
struct BlockArrays {
  float *factor, *value;
  double *signal, *noise;
};

struct BlockSums {
  double signal, noise;
  uint32_t lowest, highest;  // bits of the inverse, blocks of zeros apart
};

struct BlockKernels {
  // Reads `n` elements: largest magnitude (bits) and sum of squares of every 16, and how many are zero. Copies them to
  // `copy` as float32, unless it is null. True where squares leave float32, which needs the second of each pair below.
  bool (*prepare)(const void* data, FloatWord word, int64_t n, float* copy, uint32_t* amax, double* signal,
                  int64_t* zeros);
  // The noise of blocks: of 32 with scales that are powers of two, of 16 with any.
  using Narrow = void (*)(const float* x, int64_t blocks, const float* factor, const float* value,
                          const RoundedElement&, double* noise, RoundCounts*);
  Narrow power, two_level[2];
  // The noise of `n` elements of a block that cannot saturate, a multiple of 16; `inverse` is that of the factor.
  using Wide = double (*)(const float* x, int64_t n, float factor, float inverse, const RoundedElement&,
                          int64_t* zeros);
  Wide factor[2], divisor[2];
  // The scales of MX and of NVFP4 blocks, by the largest element. False where one is refused; how many blocks become
  // zero, in MX none.
  bool (*powers)(const Granules&, int64_t blocks, float largest, const BlockArrays&);
  int64_t (*levels)(const Granules&, int64_t blocks, float largest, float of_tensor, const BlockArrays&);
  BlockSums (*sum_blocks)(const BlockArrays&, int64_t count);
  // The first block from `i` on with more noise than so much of its signal.
  int64_t (*next_noisy)(const BlockArrays&, int64_t i, int64_t count, double ratio);
};

#if defined(__x86_64__)
const BlockKernels& avx2_block_kernels();
const BlockKernels& avx512_block_kernels();
#endif

}  // namespace nanwatch
