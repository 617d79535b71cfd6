#include "cpu/file_health.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

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

// A few numbers first: one of them is not zero in nearly every row.
bool is_dead(const char* row, int64_t width, Format format) {
  constexpr int64_t few = 32;
  for (const int64_t n : {std::min(few, width), width}) {
    RangeBits bits;
    current_kernels().range[int(format)]({row, n, 1, 1, 0}, &bits);
    if (bits.hi != 0) return false;
  }
  return true;
}

}  // namespace

bool file_health_cpu(int file, int64_t offset, int64_t count, int64_t width, const View& buffer, double* row,
                     DeadRows* dead) {
  const auto bytes = int64_t(word_size(buffer.format));
  const auto kernel = current_kernels().health[int(buffer.format)];
  auto* const memory = static_cast<char*>(const_cast<void*>(buffer.data));
  const int64_t step = width > 0 ? buffer.numel / width * width : buffer.numel;
  HealthBits bits;
  int64_t first = -1, n = 0;
  const int64_t stride = 1;
  const View part{memory, buffer.format, 0, 1, &n, &stride};
  for (int64_t done = 0; done < count; done += n) {
    n = std::min(step, count - done);
    if (!read_fully(file, offset + done * bytes, memory, n * bytes)) return false;
    const int64_t zeros = bits.num_zero;
    kernel({memory, n, 1, 1, 0}, &bits);
    if (width > 0 && bits.num_zero - zeros >= width) {
      for (int64_t at = 0; at + width <= n; at += width) {
        if (!is_dead(memory + at * bytes, width, buffer.format)) continue;
        if (dead->total++ < DeadRows::kFirst) dead->first.push_back((done + at) / width);
      }
    }
    if (first >= 0 || bits.num_nonfinite() == 0) continue;
    write_health(part, bits, 1, row);
    first = done + int64_t(row[column::first_nonfinite]);
  }
  n = 0;
  write_health(part, bits, 1, row);
  row[column::first_nonfinite] = double(first);
  return true;
}

}  // namespace nanwatch
