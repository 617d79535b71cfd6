// The lanes of fingerprint blocks; as in range_loop_impl.h, in an unnamed namespace for each instruction set.
#pragma once

#include "numerics/fingerprint.h"

namespace nanwatch {
namespace {

// The lines that are needed next, as the prefetchers of the hardware begin anew at each page. From DRAM 4 KiB ahead
// gave 39 GB/s, 8 KiB 41 and none 29, where a plain read has 37.
constexpr int64_t kFingerprintAhead = 8 << 10;

// mix64 of each word of a vector. This template stands here and not beside mix64, because a function of the baseline
// passes 32- and 64-byte vectors through memory where one compiled for AVX expects them in registers.
template <class S>
typename S::V mix_words(typename S::V x) {
  x = S::template times64<kMixFactors[0]>(S::template xor_shifted64<kMixShifts[0]>(x));
  x = S::template times64<kMixFactors[1]>(S::template xor_shifted64<kMixShifts[1]>(x));
  return S::template xor_shifted64<kMixShifts[2]>(x);
}

// Adds whole blocks to the sum, the first of which has number `index`. They lie in memory that ends at `end`.
template <class S>
void fingerprint_blocks(const char* p, int64_t blocks, uint64_t index, const FingerprintKeys& keys, const char* end,
                        uint64_t* sum) {
  constexpr int vectors = 8 * kFingerprintLanes / S::bytes;
  using V = typename S::V;
  for (; blocks > 0; --blocks, ++index) {
    if (end - p > kFingerprintAhead)
      for (int64_t line = 0; line < kFingerprintBlock; line += 64) __builtin_prefetch(p + kFingerprintAhead + line);
    // Two chains each, so that additions do not wait for one another.
    V products[2][vectors], words[2][vectors];
#pragma GCC unroll 4
    for (int k = 0; k < vectors; ++k) {
      products[0][k] = products[1][k] = words[0][k] = words[1][k] = S::template fill<8>(0);
    }
    const char* key = reinterpret_cast<const char*>(keys.word);
    for (const char* const next = p + kFingerprintBlock; p < next;) {
#pragma GCC unroll 2
      for (int chain = 0; chain < 2; ++chain) {
#pragma GCC unroll 4
        for (int k = 0; k < vectors; ++k, p += S::bytes, key += S::bytes) {
          const V word = S::load(p);
          products[chain][k] = S::add64(products[chain][k], S::multiply_halves(S::bit_xor(word, S::load(key))));
          words[chain][k] = S::add64(words[chain][k], word);
        }
      }
    }
    V digests = S::template fill<8>(0);
#pragma GCC unroll 4
    for (int k = 0; k < vectors; ++k) {
      const V neighbours = S::swap64(S::add64(words[0][k], words[1][k]));
      const V lanes = S::add64(S::add64(products[0][k], products[1][k]), neighbours);
      const V key_of_lane = S::load(reinterpret_cast<const char*>(keys.lane) + k * S::bytes);
      digests = S::add64(digests, mix_words<S>(S::bit_xor(lanes, key_of_lane)));
    }
    *sum += block_fingerprint(uint64_t(S::template total<8>(digests)), index);
  }
}

}  // namespace
}  // namespace nanwatch
