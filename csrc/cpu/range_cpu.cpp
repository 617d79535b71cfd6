#include "cpu/range_cpu.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>

#include "cpu/host_walk.h"
#include "cpu/range_kernels_impl.h"

namespace nanwatch {

// The kernels with vectors of 16 bytes: SSE2 on any x86-64, NEON on any AArch64.
const KernelTable& baseline_kernels() {
  static constexpr KernelTable table = make_kernels<Vectors<16>>("baseline");
  return table;
}

namespace {

// ---- dispatch -------------------------------------------------------------------------------------------------------

// The kernels that this machine can run, the plainest first.
std::vector<const KernelTable*> available_kernels() {
  std::vector<const KernelTable*> tables{&baseline_kernels()};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(&avx2_kernels());
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    tables.push_back(&avx512_kernels());
#endif
  return tables;
}

struct Dispatch {
  std::atomic<const KernelTable*> current;
  std::string warning;

  bool set(const std::string& name) {
    for (const KernelTable* table : available_kernels()) {
      if (name != table->name) continue;
      current = table;
      return true;
    }
    return false;
  }

  Dispatch() : current(available_kernels().back()) {
    const char* const asked = std::getenv("NANWATCH_CPU");
    if (asked == nullptr || *asked == '\0' || set(asked)) return;
    warning = std::string("NANWATCH_CPU=") + asked + " is not available on this machine; accepted here:";
    for (const KernelTable* table : available_kernels()) warning += std::string(" ") + table->name;
    warning += std::string("; using ") + current.load()->name;
  }
};

Dispatch& dispatch() {
  static Dispatch instance;
  return instance;
}

const KernelTable& current_kernels() {
  return *dispatch().current.load(std::memory_order_relaxed);
}

// ---- ranges ---------------------------------------------------------------------------------------------------------

// Narrowed to the format's own word. An untouched accumulator stays empty.
template <Format F>
Range<F> narrow(const RangeBits& bits) {
  using Word = typename Codes<F>::Word;
  return bits.empty() ? Range<F>{} : Range<F>{Word(bits.lo), Word(bits.hi)};
}

// The ends of a range in each format. A table, because the cases of a switch lie on lines of the CPU's cache far apart,
// and with the walk in a function of its own the read of a small tensor runs through half as many.
constexpr auto kRows = [] {
  std::array<RangeRow (*)(const RangeBits&), kNumFormats> rows{};
#define NANWATCH_ROW(name, ...) \
  rows[int(Format::name)] = [](const RangeBits& bits) { return narrow<Format::name>(bits).row(); };
  NANWATCH_FORMATS(NANWATCH_ROW)
#undef NANWATCH_ROW
  return rows;
}();

[[gnu::noinline]] void walk_range(const View& view, RangeBits* bits) {
  *bits = reduce<RangeBits>(HostWalk(view), current_kernels().range[int(view.format)]);
}

// ---- the first that is not finite -----------------------------------------------------------------------------------

// The position in C order of the first non-finite element. Only called when there is one, and on the failure path: but
// a tensor expanded to 2^40 elements must not keep it busy, so repeats are left out (their first is the one at index 0)
// and whole rows that are finite are passed over.
int64_t first_nonfinite(const View& view) {
  const int64_t width = int64_t(word_size(view.format));
  std::vector<Dim> dims = coalesce_dims(view, true).dims;
  std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.order < b.order; });
  const Dim row = dims.front();  // the fastest in C order
  const auto is_finite = [&](const char* p, int64_t n) {
    RangeBits bits;
    current_kernels().range[int(view.format)](Plane{p, n, row.stride, 1, 0}, &bits);
    return kRows[int(view.format)](bits).isfinite;
  };
  int64_t rows = 1;
  for (size_t d = 1; d < dims.size(); ++d) rows *= dims[d].size;
  for (int64_t index = 0; index < rows; ++index) {
    const char* p = static_cast<const char*>(view.data);
    int64_t position = 0, left = index;
    for (size_t d = 1; d < dims.size(); left /= dims[d++].size) {
      p += left % dims[d].size * dims[d].stride * width;
      position += left % dims[d].size * dims[d].order;
    }
    for (int64_t i = 0, n = 1 << 14; i < row.size;) {
      n = std::min(n, row.size - i);
      if (is_finite(p + i * row.stride * width, n)) {
        i += n;
      } else if (n > 1) {
        n /= 2;
      } else {
        return position + i * row.order;
      }
    }
  }
  return HealthBits::kNone;
}

}  // namespace

RangeRow range_cpu(const View& view) {
  RangeBits bits;
  if (view.numel > 0 && view.numel < HostWalk::kSmall && HostWalk::is_contiguous(view)) {  // no walk, no second thread
    current_kernels().range[int(view.format)](Plane{static_cast<const char*>(view.data), view.numel, 1, 1, 0}, &bits);
  } else {
    walk_range(view, &bits);
  }
  return kRows[int(view.format)](bits);
}

void health_cpu(const View& view, double* row) {
  const HostWalk walk(view);
  const HealthBits bits = reduce<HealthBits>(walk, current_kernels().health[int(view.format)]);
  with_format(view.format, [&](auto tag) {
    constexpr Format F = decltype(tag)::format;
    Health<F> health;
    health.range = narrow<F>(bits.range);
    health.finite = narrow<F>(bits.finite);
    health.HealthCounts::merge(bits.times(walk.repeats));
    if (bits.num_nan + bits.num_posinf + bits.num_neginf > 0) health.first_nonfinite = first_nonfinite(view);
    health.write(row);
  });
}

std::vector<std::string> cpu_capabilities() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_kernels()) names.emplace_back(table->name);
  return names;
}

std::string cpu_capability() {
  return current_kernels().name;
}

std::string cpu_capability_warning() {
  return dispatch().warning;
}

bool set_cpu_capability(const std::string& name) {
  return dispatch().set(name);
}

}  // namespace nanwatch
