// A 64-bit fingerprint of a sequence of bytes: which bytes, and where. Host and device, no torch.
//
// The bytes are cut into blocks of 1 KiB, the last padded with zeros. A block has eight lanes: its 64-bit word i
// belongs to lane i % 8. As in XXH3 (Yann Collet), a lane adds up the products of the two halves of (word ^ key), with
// a key for each place in the block, and the words of its neighbour as they are, so that a product with 0 hides
// nothing. The mixed blocks are summed. A sum does not depend on who computes which block, and the block's number in
// the mix ties each block to its place.
//
// Guarantee: two tensors that differ in one 64-bit word have different lanes. All other collisions are a matter of
// chance, 2^-64 each. It is no cryptographic hash: who knows the keys can construct collisions.
#pragma once

#include "numerics/formats.h"

namespace nanwatch {

constexpr int64_t kFingerprintBlock = 1024;  // bytes
constexpr int kFingerprintLanes = 8;
constexpr int kFingerprintWords = int(kFingerprintBlock / 8);

// Finaliser of SplitMix64 (Steele, Lea, Flood 2014): each bit of the input changes each bit of the output.
constexpr uint64_t kMixFactors[] = {0xbf58476d1ce4e5b9u, 0x94d049bb133111ebu};
constexpr int kMixShifts[] = {30, 27, 31};

NANWATCH_HD constexpr uint64_t mix64(uint64_t x) {
  constexpr uint64_t first = kMixFactors[0], second = kMixFactors[1];
  constexpr int before = kMixShifts[0], between = kMixShifts[1], after = kMixShifts[2];
  x = (x ^ (x >> before)) * first;
  x = (x ^ (x >> between)) * second;
  return x ^ (x >> after);
}

// Output number i of SplitMix64 with the seed 0.
NANWATCH_HD constexpr uint64_t split_mix(uint64_t i) {
  return mix64((i + 1) * 0x9e3779b97f4a7c15u);
}

// The first 128 are the keys of the words, the next eight those of the lanes.
struct FingerprintKeys {
  alignas(64) uint64_t word[kFingerprintWords]{};
  alignas(64) uint64_t lane[kFingerprintLanes]{};

  constexpr FingerprintKeys() {
    for (int i = 0; i < kFingerprintWords; ++i) word[i] = split_mix(uint64_t(i));
    for (int j = 0; j < kFingerprintLanes; ++j) lane[j] = split_mix(uint64_t(kFingerprintWords + j));
  }
};

// The share of block number `index` in the sum; `digest` is the sum of mix64(lane ^ its key).
NANWATCH_HD constexpr uint64_t block_fingerprint(uint64_t digest, uint64_t index) {
  return mix64(digest ^ split_mix(index));
}

// The format (a number per dtype) and the shape.
inline uint64_t fingerprint_seal(int64_t format, int64_t dims, const int64_t* sizes) {
  // Each step hashes the one before, so that format 1 with size 2 differs from format 2 with size 1.
  uint64_t state = split_mix(uint64_t(format) ^ (uint64_t(dims) << 32));
  for (int64_t d = 0; d < dims; ++d) state = split_mix(state + uint64_t(sizes[d]));
  return state;
}

// The sum of the blocks with the seal mixed in.
inline uint64_t sealed_fingerprint(uint64_t sum, int64_t format, int64_t dims, const int64_t* sizes) {
  return mix64(sum ^ fingerprint_seal(format, dims, sizes));
}

}  // namespace nanwatch
