#include "cpu/file_health.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "cpu/gguf_blocks.h"

namespace nanwatch {
namespace {

// Fills the memory. False where the file ends before, and at an error.
bool read_fully(int file, int64_t offset, char* memory, int64_t bytes) {
  while (bytes > 0) {
    const ssize_t n = pread(file, memory, size_t(bytes), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    memory += n;
    offset += n;
    bytes -= n;
  }
  return true;
}

// Numbers that lie as they are, one after the other or some in each block.
struct Numbers {
  static constexpr int64_t elements = 1;
  Format format;
  int64_t bytes, place, each;

  int64_t stride() const { return bytes / int64_t(word_size(format)); }

  void take(const char* p, int64_t n, HealthBits* bits) const {
    current_kernels().health[int(format)]({p + place, n, stride(), each, 1}, bits);
  }

  int64_t first_nonfinite(const char* p, int64_t n, const HealthBits& bits) const {
    const int64_t sizes[] = {n, each}, strides[] = {stride(), 1};
    double row[kHealthColumns];
    write_health({p + place, format, n * each, 2, sizes, strides}, bits, 1, row);
    return int64_t(row[column::first_nonfinite]) / each;
  }

  // A few numbers first: one of them is not zero in nearly every row.
  bool is_dead(const char* row, int64_t width) const {
    constexpr int64_t few = 32;
    for (const int64_t n : {std::min(few, width), width}) {
      RangeBits bits;
      current_kernels().range[int(format)]({row, n, 1, 1, 0}, &bits);
      if (bits.hi != 0) return false;
    }
    return true;
  }
};

template <class Reader>
bool read_run(const Reader& reader, int file, const FileRun& run, char* memory, int64_t size, double* row,
              DeadRows* dead) {
  const auto bytes_of = [&reader](int64_t n) { return n / Reader::elements * reader.bytes; };
  const int64_t most = size / reader.bytes * Reader::elements, width = run.width;
  const int64_t step = width > 0 ? most / width * width : most;
  if (step <= 0 || width % Reader::elements != 0) return false;
  HealthBits bits;
  int64_t first = -1, n = 0;
  for (int64_t done = 0; done < run.count; done += n) {
    n = std::min(step, run.count - done);
    if (!read_fully(file, run.offset + bytes_of(done), memory, bytes_of(n))) return false;
    const int64_t zeros = bits.num_zero;
    reader.take(memory, n, &bits);
    if (width > 0 && bits.num_zero - zeros >= width) {
      for (int64_t at = 0; at + width <= n; at += width) {
        if (!reader.is_dead(memory + bytes_of(at), width)) continue;
        if (dead->total++ < DeadRows::kFirst) dead->first.push_back((done + at) / width);
      }
    }
    if (first < 0 && bits.num_nonfinite() > 0) first = done + reader.first_nonfinite(memory, n, bits);
  }
  n = 0;
  write_health({memory, reader.format, n, 1, &n, &n}, bits, 1, row);
  row[column::first_nonfinite] = double(first);
  return true;
}

}  // namespace

bool file_health_cpu(int file, const FileRun& run, char* memory, int64_t size, double* row, DeadRows* dead) {
  const auto read = [&](const auto& reader) { return read_run(reader, file, run, memory, size, row, dead); };
  if (run.kind == -FileRun::kQ8_0) return read(Blocks<Q8_0>{});
  if (run.kind == -FileRun::kQ4_0) return read(Blocks<Q4_0>{});
  if (run.kind < 0 || run.kind >= kNumFormats) return false;
  return read(Numbers{Format(run.kind), run.bytes, run.place, run.each});
}

}  // namespace nanwatch
