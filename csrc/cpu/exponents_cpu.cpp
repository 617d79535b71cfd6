#include "cpu/exponents_cpu.h"

#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/host_walk.h"

namespace nanwatch {
namespace {

// ---- blocks ---------------------------------------------------------------------------------------------------------

constexpr int64_t kBlock = 2048;    // 16 KiB of 64-bit words: a second look at a block finds it in L1
constexpr int64_t kShortRow = 256;  // rows from here on are read where they lie, shorter ones gathered

template <typename Word>
Word load(const char* p) {
  Word word;
  std::memcpy(&word, p, sizeof word);  // memory from other libraries need not be aligned
  return word;
}

// Calls take(p, n) for runs of at most kBlock words that together are the plane.
template <typename Word, typename Take>
void blocks(const Plane& plane, const Take& take) {
  constexpr int64_t width = sizeof(Word);
  if (plane.column_stride == 1 && (plane.rows == 1 || plane.columns >= kShortRow)) {
    for (int64_t row = 0; row < plane.rows; ++row)
      for (int64_t i = 0; i < plane.columns; i += kBlock)
        take(plane.data + (row * plane.row_stride + i) * width, std::min(kBlock, plane.columns - i));
    return;
  }
  Word gathered[kBlock];
  int64_t n = 0;
  for (int64_t row = 0; row < plane.rows; ++row) {
    const char* p = plane.data + row * plane.row_stride * width;
    for (int64_t i = 0; i < plane.columns; ++i, p += plane.column_stride * width) {
      gathered[n++] = load<Word>(p);
      if (n == kBlock) take(reinterpret_cast<const char*>(gathered), std::exchange(n, 0));
    }
  }
  if (n > 0) take(reinterpret_cast<const char*>(gathered), n);
}

// ---- exponents ------------------------------------------------------------------------------------------------------

// Neighbours often have the same exponent, and an increment must not wait for the one before it: four tables in turn
// (eight were no faster). 32-bit counters, added up before they can overflow.
constexpr int kTables = 4;

template <int slots>
struct Tables {
  std::array<std::array<uint32_t, slots>, kTables> table{};

  // ++ of slot(word) for each of n words.
  template <typename Word, typename Slot>
  void count(const char* p, int64_t n, const Slot& slot) {
    for (; n >= kTables; n -= kTables, p += kTables * sizeof(Word))
      for (int k = 0; k < kTables; ++k) ++table[size_t(k)][slot(load<Word>(p + size_t(k) * sizeof(Word)))];
    for (int64_t k = 0; k < n; ++k) ++table[size_t(k)][slot(load<Word>(p + size_t(k) * sizeof(Word)))];
  }

  int64_t operator[](size_t slot) const {
    int64_t sum = 0;
    for (const auto& each : table) sum += each[slot];
    return sum;
  }
};

constexpr int64_t kFlushAfter = int64_t(1) << 31;  // words; what one counter may reach is 2^32 - 1

// 8-bit formats: all 256 patterns, whatever they mean.
template <Format F, typename = void>
class Counter {
 public:
  void take(const char* p, int64_t n) {
    patterns_.template count<uint8_t>(p, n, [](uint8_t word) { return word; });
  }

  void flush(Exponents<F>* total) {
    for (int pattern = 0; pattern < 256; ++pattern) total->update(uint8_t(pattern), patterns_[size_t(pattern)]);
    patterns_ = {};
  }

 private:
  Tables<256> patterns_;
};

// Integers: the width of the magnitude.
template <Format F>
class Counter<F, std::enable_if_t<!Codes<F>::is_float && sizeof(typename Codes<F>::Word) != 1>> {
  using Word = typename Codes<F>::Word;

 public:
  void take(const char* p, int64_t n) {
    widths_.template count<Word>(p, n, [](Word word) { return size_t(bit_width(magnitude<F>(word))); });
  }

  void flush(Exponents<F>* total) {
    for (int width = 0; width <= 8 * int(sizeof(Word)); ++width)
      total->count[kZeroColumn + width] += widths_[size_t(width)];
    widths_ = {};
  }

 private:
  Tables<8 * sizeof(Word) + 1> widths_;
};

// IEEE formats: the exponent field, and zeros apart from subnormals. Finding the width of a subnormal takes longer than
// all the rest (2.3 times on an EPYC), and so does telling inf from nan. So a block that has any is read once more.
template <Format F>
class Counter<F, std::enable_if_t<Codes<F>::is_float && sizeof(typename Codes<F>::Word) != 1>> {
  using C = Codes<F>;
  using Word = typename C::Word;
  static constexpr size_t kSubnormal = 1, kTop = size_t(1) << (8 * sizeof(Word) - 1 -
                                                               C::mantissa_bits);  // slots: 0 is zero, then field + 1

 public:
  void take(const char* p, int64_t n) {
    const int64_t subnormals = fields_[kSubnormal], tops = fields_[kTop];
    fields_.template count<Word>(p, n, [](Word word) {
      const Word m = magnitude<F>(word);
      return size_t(m >> C::mantissa_bits) + size_t(m != 0);
    });
    if (fields_[kSubnormal] != subnormals) take_subnormals(p, n);
    if (const int64_t num = fields_[kTop] - tops; num != 0) take_nonfinite(p, n, num);
  }

  void flush(Exponents<F>* total) {
    total->count[kZeroColumn] += fields_[0];
    for (int width = 1; width <= C::mantissa_bits; ++width) total->count[kZeroColumn + width] += widths_[size_t(width)];
    for (size_t slot = kSubnormal + 1; slot < kTop; ++slot)
      total->count[kZeroColumn + C::mantissa_bits + int(slot) - 1] += fields_[slot];
    total->count[kPosInfColumn] += num_posinf_;
    total->count[kNegInfColumn] += num_neginf_;
    total->count[kNanColumn] += num_nan_;
    *this = {};
  }

 private:
  // Width 0 collects what is no subnormal.
  void take_subnormals(const char* p, int64_t n) {
    widths_.template count<Word>(p, n, [](Word word) {
      const Word m = magnitude<F>(word);
      return size_t(bit_width(m < C::min_normal ? m : 0));
    });
  }

  void take_nonfinite(const char* p, int64_t n, int64_t num) {
    constexpr Word inf = Word(C::max_finite + 1), sign = Word(Word(1) << (8 * sizeof(Word) - 1));
    int64_t posinf = 0, neginf = 0;
    for (int64_t i = 0; i < n; ++i) {
      const Word word = load<Word>(p + size_t(i) * sizeof(Word));
      posinf += word == inf;
      neginf += word == Word(inf | sign);
    }
    num_posinf_ += posinf;
    num_neginf_ += neginf;
    num_nan_ += num - posinf - neginf;
  }

  Tables<kTop + 1> fields_;
  Tables<C::mantissa_bits + 1> widths_;
  int64_t num_posinf_ = 0, num_neginf_ = 0, num_nan_ = 0;
};

// A thread's part of the work.
template <Format F>
struct ExponentPart {
  Counter<F> counter;
  Exponents<F> total;
  int64_t pending = 0;

  void take(const char* p, int64_t n) {
    counter.take(p, n);
    pending += n;
    if (pending >= kFlushAfter) flush();
  }

  void flush() {
    counter.flush(&total);
    pending = 0;
  }

  void merge(ExponentPart& other) {
    other.flush();
    total.merge(other.total);
  }
};

// ---- edges ----------------------------------------------------------------------------------------------------------

// One code after the other over a block that lies in L1: each is a loop that the compiler turns into vectors.
template <Format F>
void take_edges(const char* p, int64_t n, const uint64_t* codes, int64_t num_codes, Edges* edges) {
  using Word = typename Codes<F>::Word;
  for (int64_t e = 0; e < num_codes; ++e) {
    if (codes[e] > uint64_t(Word(~Word(0)))) continue;  // beyond all that the word can hold
    const Word code = Word(codes[e]);
    std::conditional_t<(sizeof(Word) < 4), uint32_t, Word> num = 0;
    for (int64_t i = 0; i < n; ++i) num += order<F>(load<Word>(p + size_t(i) * sizeof(Word))) >= code;
    edges->count[e] += int64_t(num);
  }
}

}  // namespace

void exponents_cpu(const View& view, int64_t* counts) {
  with_format(view.format, [&](auto tag) {
    constexpr Format F = decltype(tag)::format;
    const HostWalk walk(view);
    auto part = reduce<ExponentPart<F>>(walk, [](const Plane& plane, ExponentPart<F>* mine) {
      blocks<typename Codes<F>::Word>(plane, [mine](const char* p, int64_t n) { mine->take(p, n); });
    });
    part.flush();
    for (int i = 0; i < ExponentSpan<F>::columns; ++i) counts[i] = part.total.count[i] * walk.repeats;
  });
}

void edges_cpu(const View& view, const uint64_t* codes, int64_t num_codes, int64_t* counts) {
  const HostWalk walk(view);
  const Edges edges = with_format(view.format, [&](auto tag) {
    constexpr Format F = decltype(tag)::format;
    return reduce<Edges>(walk, [=](const Plane& plane, Edges* mine) {
      blocks<typename Codes<F>::Word>(plane,
                                      [=](const char* p, int64_t n) { take_edges<F>(p, n, codes, num_codes, mine); });
    });
  });
  for (int64_t e = 0; e < num_codes; ++e) counts[e] = edges.count[e] * walk.repeats;
}

}  // namespace nanwatch
