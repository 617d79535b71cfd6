// The floors under every range: read the same memory once, fold it with xor, return a number. One load and one xor per
// vector is the least a function that looks at all of a tensor can do, so the time of a read over nanwatch's is the
// share of the machine's read bandwidth that nanwatch reaches. Called the way nanwatch is called (METH_O, a tensor), so
// that the price of a call from Python is in both.
//
//   read_serial(x), read_threads(x) -> int         xor of x's 64-bit words; x dense, on the CPU, 64-byte aligned
//   streams_serial(x), streams_threads(x) -> int   the same; from 16 KiB on at four places at once, the end first,
//                                                  which is the fastest read that was found
//                                                  (csrc/cpu/range_loop_impl.h)
//   isa() -> str                                   what they run on
//
// Built by torch.utils.cpp_extension.load, see bench_range.py; not part of the library.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/python_variable.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Whole 64-byte lines of an aligned buffer. Four accumulators: xor has a latency of one cycle and two can start in
// each, so two would do, and four leave room for a late load.
using ReadLines = uint64_t (*)(const char* data, int64_t lines);

// Lines of one stream. Four are a block, and the blocks are equal and of at most 1 MiB.
constexpr auto stream_lines = [](int64_t lines) { return lines / (lines / (1 << 14) + 1) / 4; };

template <bool streams>
uint64_t read_lines_portable(const char* data, int64_t lines) {
  uint64_t words[8] = {};
  const auto take = [&words](const char* p) {
    uint64_t line[8];
    std::memcpy(line, p, 64);
    for (int j = 0; j < 8; ++j) words[j] ^= line[j];
  };
  int64_t stream = stream_lines(lines), i = streams && lines >= 256 ? lines / (4 * stream) * 4 * stream : 0;
  for (int64_t block = i - 4 * stream; i > 0 && block >= 0; block -= 4 * stream)
    for (int64_t k = 0; k < stream; ++k)
      for (int j = 0; j < 4; ++j) take(data + (block + j * stream + k) * 64);
  for (; i < lines; ++i) take(data + i * 64);
  uint64_t all = 0;
  for (const uint64_t word : words) all ^= word;
  return all;
}

#if defined(__x86_64__)
template <bool streams>
__attribute__((target("avx2"))) uint64_t read_lines_avx2(const char* data, int64_t lines) {
  __m256i sum[4] = {};
  int64_t stream = stream_lines(lines), i = streams && lines >= 256 ? lines / (4 * stream) * 4 * stream : 0;
  for (int64_t block = i - 4 * stream; i > 0 && block >= 0; block -= 4 * stream)
    for (int64_t k = 0; k < stream; ++k)
      for (int j = 0; j < 4; ++j) {
        const auto* line = reinterpret_cast<const __m256i*>(data + (block + j * stream + k) * 64);
        sum[j] = _mm256_xor_si256(sum[j], _mm256_xor_si256(_mm256_load_si256(line), _mm256_load_si256(line + 1)));
      }
  for (; i + 2 <= lines; i += 2)
    for (int j = 0; j < 4; ++j)
      sum[j] = _mm256_xor_si256(sum[j], _mm256_load_si256(reinterpret_cast<const __m256i*>(data + i * 64) + j));
  alignas(32) uint64_t words[16];
  for (int j = 0; j < 4; ++j) _mm256_store_si256(reinterpret_cast<__m256i*>(words) + j, sum[j]);
  uint64_t all = read_lines_portable<false>(data + i * 64, lines - i);
  for (const uint64_t word : words) all ^= word;
  return all;
}

template <bool streams>
__attribute__((target("avx512f"))) uint64_t read_lines_avx512(const char* data, int64_t lines) {
  __m512i sum[4] = {};
  int64_t stream = stream_lines(lines), i = streams && lines >= 256 ? lines / (4 * stream) * 4 * stream : 0;
  for (int64_t block = i - 4 * stream; i > 0 && block >= 0; block -= 4 * stream)
    for (int64_t k = 0; k < stream; ++k)
      for (int j = 0; j < 4; ++j)
        sum[j] = _mm512_xor_si512(sum[j], _mm512_load_si512(data + (block + j * stream + k) * 64));
  for (; i + 8 <= lines; i += 8)
    for (int j = 0; j < 8; ++j) sum[j % 4] = _mm512_xor_si512(sum[j % 4], _mm512_load_si512(data + (i + j) * 64));
  for (; i < lines; ++i) sum[0] = _mm512_xor_si512(sum[0], _mm512_load_si512(data + i * 64));
  alignas(64) uint64_t words[8];
  _mm512_store_si512(words, _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3])));
  uint64_t all = 0;
  for (const uint64_t word : words) all ^= word;
  return all;
}
#endif

struct Isa {
  const char* name;
  ReadLines read, streams;
};

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return {"avx512", read_lines_avx512<false>, read_lines_avx512<true>};
  if (__builtin_cpu_supports("avx2")) return {"avx2", read_lines_avx2<false>, read_lines_avx2<true>};
#endif
  return {"portable", read_lines_portable<false>, read_lines_portable<true>};
}

const Isa isa = best_isa();

template <ReadLines Isa::* lines_of>
uint64_t read_bytes(const char* data, int64_t bytes) {
  const int64_t lines = bytes / 64;
  uint64_t all = (isa.*lines_of)(data, lines);
  for (int64_t at = lines * 64; at < bytes; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, size_t(bytes - at < 8 ? bytes - at : 8));
    all ^= word;
  }
  return all;
}

template <ReadLines Isa::* lines_of>
uint64_t read_bytes_threads(const char* data, int64_t bytes) {
  std::atomic<uint64_t> all{0};
  const int64_t lines = bytes / 64;
  // Grain of 64 KiB: the caller takes the faster of this and the serial read, so it need not be shy.
  at::parallel_for(0, lines, 1024, [&](int64_t begin, int64_t end) {
    all.fetch_xor((isa.*lines_of)(data + begin * 64, end - begin), std::memory_order_relaxed);
  });
  return all ^ read_bytes<lines_of>(data + lines * 64, bytes - lines * 64);
}

template <uint64_t (*Read)(const char*, int64_t)>
PyObject* read(PyObject*, PyObject* argument) {
  if (!THPVariable_Check(argument)) {
    PyErr_Format(PyExc_TypeError, "a torch.Tensor is read, not a %s", Py_TYPE(argument)->tp_name);
    return nullptr;
  }
  const at::Tensor& x = THPVariable_Unpack(argument);
  if (!x.device().is_cpu() || x.layout() != at::kStrided || !x.is_non_overlapping_and_dense()) {
    PyErr_SetString(PyExc_ValueError, "the floor reads a dense tensor on the CPU; call .contiguous() first");
    return nullptr;
  }
  const auto* data = static_cast<const char*>(x.const_data_ptr());
  if (reinterpret_cast<uintptr_t>(data) % 64 != 0) {
    PyErr_SetString(PyExc_ValueError, "the floor reads a 64-byte aligned tensor; call .clone() first");
    return nullptr;
  }
  return PyLong_FromUnsignedLongLong(Read(data, int64_t(x.nbytes())));
}

PyObject* isa_name(PyObject*, PyObject*) {
  return PyUnicode_FromString(isa.name);
}

PyMethodDef methods[] = {
    {"read_serial", read<read_bytes<&Isa::read>>, METH_O, "xor of the tensor's 64-bit words, one thread"},
    {"read_threads", read<read_bytes_threads<&Isa::read>>, METH_O, "xor of the tensor's 64-bit words, torch's threads"},
    {"streams_serial", read<read_bytes<&Isa::streams>>, METH_O, "read_serial at four places at once"},
    {"streams_threads", read<read_bytes_threads<&Isa::streams>>, METH_O, "read_threads at four places at once"},
    {"isa", isa_name, METH_NOARGS, "avx512, avx2 or portable"},
    {nullptr, nullptr, 0, nullptr},
};

#define NANWATCH_STRING_(x) #x
#define NANWATCH_STRING(x) NANWATCH_STRING_(x)
#define NANWATCH_CONCAT_(a, b) a##b
#define NANWATCH_CONCAT(a, b) NANWATCH_CONCAT_(a, b)

PyModuleDef module{PyModuleDef_HEAD_INIT, NANWATCH_STRING(TORCH_EXTENSION_NAME), nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC NANWATCH_CONCAT(PyInit_, TORCH_EXTENSION_NAME)() {
  return PyModule_Create(&module);
}
