// Block formats: how the scale of a block is made, how its elements are rounded, and the numbers that are kept of it.
// Host and device, no torch. numerics/block_reference.py has the definition of each formula.
#pragma once

#include "numerics/formats.h"

namespace nanwatch {

// How elements and the scales of their blocks are made; see numerics/block_reference.py.
enum class BlockScale : int64_t {
  power,      // of two, one for 32 elements: MX
  two_level,  // float8_e4m3fn under one for the tensor, for 16 elements: NVFP4
  factor,     // float32; a value is an element times its inverse
  divisor,    // float32; a value is an element divided by it
};

struct BlockFormat {
  BlockScale scale;
  int64_t rows, columns;  // of a block; `columns` 0: all of them
  int64_t bias, fraction_bits;
  float largest;
};

// Rows of the numbers of BlockFit, one for each format and each unit of work.
namespace fit_item {
enum Item : int {
  elements,
  saturated,
  flushed,
  lost,
  nonfinite,  // not 0: plain torch has to make the numbers, as a CUDA kernel cannot refuse before it has run
  blocks,
  flushed_blocks,
  signal,
  noise,
  lowest_scale,
  highest_scale,
  worst
};
}  // namespace fit_item
constexpr int kWorstBlocks = 5;
constexpr int kFitItems = fit_item::worst + 3 * kWorstBlocks;

// Beyond these a product might leave float32 or become subnormal: plain torch does such blocks.
constexpr float kMostOfBlock = 1e37f, kLeastOfTensor = 1e-29f;
constexpr uint32_t kMostBits = 0x7cf0bdc2;  // of kMostOfBlock

NANWATCH_HD uint32_t bits_of(float number) {
  uint32_t bits;
  memcpy(&bits, &number, sizeof bits);
  return bits;
}

NANWATCH_HD float with_bits(uint32_t bits) {
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

// A product that is rounded by itself: nvcc would make one operation of it and of the next sum.
NANWATCH_HD float rounded_product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// The format of an element, for rounding to nearest, ties to even: 1.5 x 2^k has a unit in the last place as large as
// the element's, so adding and subtracting it rounds. Below the smallest normal number the unit stays.
struct RoundedElement {
  uint32_t lowest_exponent;  // bits of the smallest normal number
  uint32_t magic;            // added to the bits of 2^e gives 1.5 x 2^e x 2^(23 - fraction_bits)
  float largest;

  static RoundedElement of(const BlockFormat& format) {
    return {uint32_t(128 - format.bias) << 23, (uint32_t(23 - format.fraction_bits) << 23) | 0x400000, format.largest};
  }

  // The nearest element, beyond the largest too.
  NANWATCH_HD float nearest(float scaled) const {
    const uint32_t exponent = bits_of(scaled) & 0x7f800000;
    const float shift = with_bits((exponent > lowest_exponent ? exponent : lowest_exponent) + magic);
    return (scaled + shift) - shift;
  }
};

// The factor of a block's elements, and its inverse. Compilers make vectors of the functions below, as they have no
// branches.
struct BlockFactor {
  float factor, value;
  int32_t refused;  // no normal number, or an element beyond kMostOfBlock
};

// Returns the factor of an MX block. `amax`: the bits of its largest magnitude; `emax`: the exponent of the format's
// largest element.
NANWATCH_HD BlockFactor power_factor(int32_t amax, int32_t emax) {
  const int32_t is_zero = -int32_t(amax == 0), code = (127 & is_zero) | (((amax >> 23) - emax) & ~is_zero);
  return {with_bits(uint32_t(254 - code) << 23), with_bits(uint32_t(code) << 23),
          int32_t(code < 1) | int32_t(amax > int32_t(kMostBits))};
}

NANWATCH_HD int32_t exponent_of(float number) {
  return int32_t(bits_of(number) >> 23) - 127;
}

// The nearest float8_e4m3fn of a number between 2^-6 and 448, ties to even.
NANWATCH_HD float as_e4m3(float number) {
  const uint32_t bits = bits_of(number);
  return with_bits((bits + 0x7ffff + (bits >> 20 & 1)) & ~uint32_t(0xfffff));
}

NANWATCH_HD float scale_of_tensor(float amax, float largest) {
  return amax / rounded_product(448, largest);
}

// `reciprocal` is that of `of_tensor`.
NANWATCH_HD BlockFactor two_level_factor(float amax, float largest, float of_tensor, float reciprocal) {
  const float wanted = amax / largest / of_tensor, raised = wanted < 0.015625f ? 0.015625f : wanted;
  const float stored = as_e4m3(raised > 448.0f ? 448.0f : raised);
  return {reciprocal / stored, rounded_product(of_tensor, stored), 0};
}

NANWATCH_HD BlockFactor float_factor(float amax, float largest) {
  constexpr double eps = 1e-12;  // _FLOAT8_EPS in block_reference.py
  const float factor = float(double(largest) / (double(amax) < eps ? eps : double(amax)));
  return {factor, 1 / factor, int32_t(!(amax <= kMostOfBlock))};
}

// The blocks with the most noise for their signal, the worst first; among equal ones the first.
struct WorstBlocks {
  double ratio[kWorstBlocks];      // 0: there is none
  double found[3 * kWorstBlocks];  // index, signal and noise of each; -1: there is none
  double likely;                   // a block with less noise than so much of its signal is none of them

  NANWATCH_HD void clear() {
    for (double& number : ratio) number = 0;
    for (double& number : found) number = -1;
    likely = 0;
  }

  NANWATCH_HD void add(double index, double signal, double noise) {
    const double share = noise / signal;
    int place = kWorstBlocks;
    for (; place > 0 && is_worse(share, index, place - 1); --place) {
      if (place == kWorstBlocks) continue;
      ratio[place] = ratio[place - 1];
      for (int i = 3 * place; i < 3 * place + 3; ++i) found[i] = found[i - 3];
    }
    if (place == kWorstBlocks) return;
    ratio[place] = share;
    found[3 * place] = index;
    found[3 * place + 1] = signal;
    found[3 * place + 2] = noise;
    likely = ratio[kWorstBlocks - 1] * (1 - 1e-14);  // a product is rounded otherwise than a quotient
  }

 private:
  NANWATCH_HD bool is_worse(double share, double index, int place) const {
    return share > ratio[place] || (share == ratio[place] && index < found[3 * place]);
  }
};

}  // namespace nanwatch
