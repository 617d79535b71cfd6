// The CPU kernels against the scalar Range and Health, on memory that ends where the tensor ends: built with the
// address and undefined-behaviour sanitizers, a read past an element that is not the tensor's own stops it.
//
//   g++ -O1 -g -fsanitize=address,undefined -Icsrc tests/native/range_fuzz/fuzz.cpp csrc/cpu/range_kernels_*.cpp
//   ./a.out 1 100000
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "cpu/range_dispatch.h"
#include "cpu/range_kernels.h"

using namespace nanwatch;

namespace {

std::mt19937_64 random_bits;

int64_t below(int64_t n) {
  return int64_t(random_bits() % uint64_t(n));
}

int64_t length() {
  static const int64_t edges[] = {1, 2, 3, 7, 8, 15, 16, 31, 32, 63, 64, 65, 127, 128, 129, 255, 256, 257};
  return below(3) == 0 ? edges[below(sizeof edges / sizeof *edges)] : 1 + below(below(20) == 0 ? 80000 : 600);
}

// Of 1 MiB and more, which are read at several places at once; `width` in bytes.
int64_t large_length(int64_t width) {
  const int64_t ends[] = {-64, -1, 0, 1, 64, below(1 << 16)};
  return ((1 + below(3)) * (int64_t(1) << 20) + ends[below(6)]) / width + below(40);
}

template <Format F>
typename Codes<F>::Word word(int kind, int64_t rarity) {
  using Word = typename Codes<F>::Word;
  const Word any = Word(random_bits());
  if (F == Format::boolean) return Word(any & 1);
  if (kind == 0) return any;                                  // every pattern, so mostly not finite for some formats
  if (kind == 1) return below(4) == 0 ? any : Word(0);        // zeros
  if (kind == 2) return below(rarity) == 0 ? any : Word(17);  // rare exceptions
  Word w = any;
  while (!is_finite<F>(magnitude<F>(w))) w = Word(random_bits());
  return w;
}

template <Format F>
bool agree(const KernelTable& table) {
  using Word = typename Codes<F>::Word;
  Plane plane{nullptr, length(), 1 + (below(2) == 0 ? below(9) : 0), below(3) == 0 ? 1 + below(4) : 1, 0};
  if (plane.columns > 2000) plane.column_stride = 1;
  const bool is_large = below(1000) == 0;
  if (is_large) plane = {nullptr, large_length(sizeof(Word)), 1, 1, 0};
  const int64_t row = (plane.columns - 1) * plane.column_stride + 1;
  plane.row_stride = row + below(4);
  const int64_t words = (plane.rows - 1) * plane.row_stride + row;
  const int64_t shift = below(3) == 0 ? below(64) : below(16) * int64_t(sizeof(Word));  // also misaligned for its word
  const size_t bytes = size_t(shift) + size_t(words) * sizeof(Word);
  const std::unique_ptr<char[]> memory(new char[bytes]);  // of this size to the byte
  const int kind = int(below(4));
  for (int64_t i = 0; i < words; ++i) {
    const Word w = word<F>(kind, is_large ? 300000 : 50);
    memcpy(memory.get() + shift + i * int64_t(sizeof(Word)), &w, sizeof w);
  }
  plane.data = memory.get() + shift;

  Health<F> expected;
  for (int64_t r = 0; r < plane.rows; ++r)
    for (int64_t c = 0; c < plane.columns; ++c) {
      Word w;
      memcpy(&w, plane.data + (r * plane.row_stride + c * plane.column_stride) * int64_t(sizeof(Word)), sizeof w);
      expected.update(w, 0);
    }
  RangeBits range;
  HealthBits health;
  table.range[int(F)](plane, &range);
  table.health[int(F)](plane, &health);
  const auto same = [](const Range<F>& a, const Range<F>& b) {
    // With a nan both ends are nan, and what is kept of the lower one does not matter.
    return a.hi == b.hi && (a.lo == b.lo || is_nan<F>(a.hi));
  };
  const bool equal = same(range.narrow<F>(), expected.range) && same(health.range.narrow<F>(), expected.range) &&
                     same(health.finite.narrow<F>(), expected.finite) && health.num_nan == expected.num_nan &&
                     health.num_posinf == expected.num_posinf && health.num_neginf == expected.num_neginf &&
                     health.num_zero == expected.num_zero && health.num_subnormal == expected.num_subnormal;
  if (!equal)
    printf("differs: %s, format %d, %" PRId64 " x %" PRId64 ", strides %" PRId64 " and %" PRId64 ", shift %" PRId64
           ", kind %d\n",
           table.name, int(F), plane.rows, plane.columns, plane.row_stride, plane.column_stride, shift, kind);
  return equal;
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? strtoull(argv[1], nullptr, 10) : 0;
  const long cases = argc > 2 ? atol(argv[2]) : 1000;
  random_bits.seed(seed);
  long bad = 0;
  for (long i = 0; i < cases; ++i)
    for (const KernelTable* table : available_kernels())
      with_format(Format(below(kNumFormats)), [&](auto tag) { bad += !agree<decltype(tag)::format>(*table); });
  printf("%ld cases on %zu instruction sets, seed %" PRIu64 ": %ld differ\n", cases, available_kernels().size(), seed,
         bad);
  return bad != 0;
}
