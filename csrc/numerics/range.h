// THE idea: the range of a tensor (abs_min, abs_max, isfinite) is an unsigned integer min and max over sign-cleared
// words, and its health is that and six counts. Two small types, each {init, update, merge}, associative and
// commutative, with the default-constructed value as identity. Host and device, no torch.
#pragma once

#include "numerics/columns.h"
#include "numerics/formats.h"

namespace nanwatch {

// Range of a tensor as it is reported. `abs_min` and `abs_max` are both nan if any element is; (inf, 0, true) if empty.
struct RangeRow {
  double abs_min, abs_max;
  bool isfinite;

  // Writes kRangeColumns.
  NANWATCH_HD void write(double* out) const {
    out[column::abs_min] = abs_min;
    out[column::abs_max] = abs_max;
    out[column::isfinite] = isfinite ? 1.0 : 0.0;
  }
};

template <Format F>
struct Range {
  using Word = typename Codes<F>::Word;
  Word lo = Word(~Word(0));
  Word hi = 0;

  NANWATCH_HD void update(Word word) {
    const Word m = magnitude<F>(word);
    lo = m < lo ? m : lo;
    hi = m > hi ? m : hi;
  }

  NANWATCH_HD void merge(const Range& other) {
    lo = other.lo < lo ? other.lo : lo;
    hi = other.hi > hi ? other.hi : hi;
  }

  NANWATCH_HD bool empty() const { return lo > hi; }

  NANWATCH_HD RangeRow row() const {
    constexpr uint64_t inf_bits = 0x7ff0000000000000ull;
    if (empty()) return {double_from_bits(inf_bits), 0.0, true};
    if (is_nan<F>(hi)) return {decode<F>(hi), decode<F>(hi), false};
    return {decode<F>(lo), decode<F>(hi), is_finite<F>(hi)};
  }
};

// Counts of a tensor's health.
struct HealthCounts {
  int64_t num_nan = 0, num_posinf = 0, num_neginf = 0, num_zero = 0, num_subnormal = 0;

  NANWATCH_HD void merge(const HealthCounts& other) {
    num_nan += other.num_nan;
    num_posinf += other.num_posinf;
    num_neginf += other.num_neginf;
    num_zero += other.num_zero;
    num_subnormal += other.num_subnormal;
  }

  NANWATCH_HD HealthCounts times(int64_t n) const {
    return {num_nan * n, num_posinf * n, num_neginf * n, num_zero * n, num_subnormal * n};
  }
};

template <Format F>
struct Health : HealthCounts {
  using Word = typename Codes<F>::Word;
  static constexpr int64_t kNone = INT64_MAX;
  Range<F> range;
  Range<F> finite;
  int64_t first_nonfinite = kNone;  // position in C order

  NANWATCH_HD void update(Word word, int64_t position) {
    const Word m = magnitude<F>(word);
    range.update(word);
    if (is_finite<F>(m)) {
      finite.update(word);
      num_zero += is_zero<F>(m);
      num_subnormal += is_subnormal<F>(m);
      return;
    }
    if (position < first_nonfinite) first_nonfinite = position;
    if (is_nan<F>(m)) {
      ++num_nan;
    } else if (is_negative<F>(word)) {
      ++num_neginf;
    } else {
      ++num_posinf;
    }
  }

  NANWATCH_HD void merge(const Health& other) {
    range.merge(other.range);
    finite.merge(other.finite);
    HealthCounts::merge(other);
    if (other.first_nonfinite < first_nonfinite) first_nonfinite = other.first_nonfinite;
  }

  // Writes kHealthColumns; first_nonfinite is -1 if there is none. Counts are exact in a double up to 2^53.
  NANWATCH_HD void write(double* out) const {
    range.row().write(out);
    const RangeRow f = finite.row();
    out[column::finite_abs_min] = f.abs_min;
    out[column::finite_abs_max] = f.abs_max;
    out[column::num_nan] = double(num_nan);
    out[column::num_posinf] = double(num_posinf);
    out[column::num_neginf] = double(num_neginf);
    out[column::num_zero] = double(num_zero);
    out[column::num_subnormal] = double(num_subnormal);
    out[column::first_nonfinite] = first_nonfinite == kNone ? -1.0 : double(first_nonfinite);
  }
};

}  // namespace nanwatch
