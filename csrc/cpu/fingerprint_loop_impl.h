// The lanes of fingerprint blocks; as in range_loop_impl.h, in an unnamed namespace for each instruction set.
#pragma once

#include "numerics/fingerprint.h"

namespace nanwatch {
namespace {

// Adds whole blocks to the sum, the first of which has number `index`.
template <class S>
void fingerprint_blocks(const char* p, int64_t blocks, uint64_t index, const FingerprintKeys& keys, uint64_t* sum) {
  constexpr int vectors = 8 * kFingerprintLanes / S::bytes;
  for (; blocks > 0; --blocks, ++index) {
    typename S::V lanes[vectors];
    for (auto& lane : lanes) lane = S::template fill<8>(0);
    const char* key = reinterpret_cast<const char*>(keys.word);
    const char* const end = p + kFingerprintBlock;
    while (p < end) {
      for (auto& lane : lanes) {
        const auto words = S::load(p);
        lane = S::add64(lane, S::multiply_halves(S::bit_xor(words, S::load(key))));
        lane = S::add64(lane, S::swap64(words));
        p += S::bytes;
        key += S::bytes;
      }
    }
    alignas(64) uint64_t stored[kFingerprintLanes];
    for (int k = 0; k < vectors; ++k) S::store(reinterpret_cast<char*>(stored) + k * S::bytes, lanes[k]);
    *sum += block_fingerprint(stored, keys.lane, index);
  }
}

}  // namespace
}  // namespace nanwatch
