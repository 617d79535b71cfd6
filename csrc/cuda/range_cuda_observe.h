// Rows for the recorder, made in the launch that reads a tensor: the range, and where a report needs more than that,
// the health and whether this is an additive mask. Device code, for range_cuda.cu alone.
//
// Nobody knows these tensors before they are read, and the blocks of a launch do not wait for each other. So each block
// decides by its own share. It reads the share again, from the L2 cache, if it is non-finite or may be part of a mask.
// The last block of the tensor decides what no block can decide alone. That is slow, one multiprocessor for a whole
// tensor, and rare: the zeros and subnormals of finite shares in a tensor that is non-finite elsewhere, and the first
// bad element where C order is not the order of memory.
#pragma once

#include <cuda_runtime.h>

#include "cuda/range_cuda.h"
#include "cuda/range_cuda_formats.h"

namespace nanwatch {
namespace {

// A sliced, permuted and expanded attention mask keeps four dimensions; two more for good measure.
constexpr int kObserveDims = 6;

// A mask made with a dtype's minimum in place of -inf. Not of 8 bits, where finite tensors are full of the largest
// number by saturation.
template <Format F>
constexpr bool kMasksWithLowest = Codes<F>::is_float && sizeof(typename Codes<F>::Word) > 1;

template <Format F>
__device__ constexpr typename Codes<F>::Word lowest_word() {
  using Word = typename Codes<F>::Word;
  return Word(Word(Word(1) << (8 * sizeof(Word) - 1)) | Codes<F>::max_finite);
}

struct Sighting {
  static constexpr int columns = kDeviceColumns;
  static_assert(kDeviceColumns == kNanwatchRowValues);
  DeviceRange quiet;   // of blocks that read their share once
  DeviceHealth loud;   // of those that read it again, and the zeros of shares that have nothing else
  Bits num_lowest;     // minus the largest number
  Bits num_undecided;  // blocks that left something uncounted, in case the tensor is not finite

  __device__ void merge_atomically(const Sighting& other) {
    quiet.merge_atomically(other.quiet);
    if ((other.loud.range.hi | other.loud.range.not_lo) != 0) {
      loud.merge_atomically(other.loud);
      atomicAdd(&num_lowest, other.num_lowest);
    } else if (other.loud.num_zero != 0) {
      atomicAdd(&loud.num_zero, other.loud.num_zero);
    }
    if (other.num_undecided != 0) atomicAdd(&num_undecided, other.num_undecided);
  }

  __device__ DeviceHealth health() const {
    DeviceHealth health = loud;
    health.range.merge(quiet);
    health.finite.merge(quiet);
    return health;
  }
};

// One format's part of it.
template <Format F>
struct Glance {
  Health<F> health;
  int64_t num_lowest = 0;

  __device__ void update(typename Codes<F>::Word word, int64_t position) {
    health.update(word, position);
    if (kMasksWithLowest<F> && word == lowest_word<F>()) ++num_lowest;
  }

  __device__ Sighting times(int64_t repeats) const {
    Sighting sighting = {};
    sighting.loud = DeviceHealth::from<F>(health, repeats);
    sighting.num_lowest = Bits(num_lowest * repeats);
    return sighting;
  }
};

template <Format F>
__device__ __forceinline__ void update(Glance<F>& glance, typename Codes<F>::Word word, int64_t position) {
  glance.update(word, position);
}

// A batch whose rows go to the recorder. A mask is judged by its rows, so the tensors' own dimensions are here too: in
// C order, the last one for itself.
template <class AnyBatch>
struct Observation : AnyBatch {
  static constexpr bool observes = true;
  int64_t size[AnyBatch::capacity][kObserveDims], stride[AnyBatch::capacity][kObserveDims];  // strides in bytes
  int64_t repeats[AnyBatch::capacity];  // elements of the tensor for each that is read
  uint8_t dims[AnyBatch::capacity];
  bool ordered[AnyBatch::capacity];  // whether elements are read in C order, though perhaps with gaps for repeats
  NanwatchTarget target;

  __device__ int64_t repeats_of(int tensor) const { return repeats[tensor]; }
  __device__ int64_t total(int tensor) const { return this->numel[tensor] * repeats[tensor]; }
  __device__ int64_t row_length(int tensor) const { return size[tensor][dims[tensor] - 1]; }
  __device__ int64_t column_stride(int tensor) const { return stride[tensor][dims[tensor] - 1]; }

  // The columns and rows that differ: a dimension of stride 0 repeats what is there.
  __device__ int64_t num_columns(int tensor) const { return column_stride(tensor) == 0 ? 1 : row_length(tensor); }
  __device__ int64_t num_rows(int tensor) const {
    int64_t rows = 1;
    for (int d = 0; d + 1 < dims[tensor]; ++d)
      if (stride[tensor][d] != 0) rows *= size[tensor][d];
    return rows;
  }

  // The first element of one of these rows, and its position in C order where it stands first.
  __device__ const char* row_at(int tensor, int64_t row, int64_t* position) const {
    const char* p = this->data[tensor];
    int64_t weight = row_length(tensor);
    *position = 0;
    for (int d = dims[tensor] - 2; d >= 0; weight *= size[tensor][d--]) {
      if (stride[tensor][d] == 0) continue;
      const int64_t next = row / size[tensor][d], index = row - next * size[tensor][d];
      p += index * stride[tensor][d];
      *position += index * weight;
      row = next;
    }
    return p;
  }

  // The position in C order of element `at` of a flat tensor, which is counted in memory.
  __device__ int64_t position_of(int tensor, int64_t at, int width) const {
    int64_t position = 0, weight = 1;
    for (int d = dims[tensor] - 1; d >= 0; weight *= size[tensor][d--])
      if (stride[tensor][d] != 0) position += at * width / stride[tensor][d] % size[tensor][d] * weight;
    return position;
  }
};

// ---- a block and its share ------------------------------------------------------------------------------------------

// All threads of the block; `total` is in shared memory.
template <Format F, class AnyBatch>
__device__ void read_plainly(const AnyBatch& batch, const Share& share, Sighting* total) {
  __syncthreads();  // its reader is done
  if (threadIdx.x == 0) *total = {};
  __syncthreads();
  Glance<F> glance;
  scan_plainly<typename Codes<F>::Word>(glance, batch, share);
  total->merge_atomically(glance.times(batch.repeats_of(share.tensor)));
}

// Notes what the ends of a share imply, such as a mask. True if the share has to be read again.
template <Format F, class AnyBatch>
__device__ bool is_loud(const AnyBatch& batch, const Share& share, const BlockBits& block, Sighting* total) {
  using Word = typename Codes<F>::Word;
  const Word hi = Word(block.hi), lo = Word(~Word(block.not_lo));
  if (!is_finite<F>(hi)) {
    if (batch.ordered[share.tensor]) return true;
    total->num_undecided = 1;
  } else if (kMasksWithLowest<F> && hi == Codes<F>::max_finite && (lo == 0 || lo == hi)) {
    return true;
  } else if (Codes<F>::has_zero && lo == 0 && hi == 0) {
    total->loud.num_zero = Bits((share.end - share.begin) * batch.repeats_of(share.tensor));
  } else if (is_zero<F>(lo) || is_subnormal<F>(lo)) {
    total->num_undecided = 1;
  }
  return false;
}

// ---- the last block of a tensor -------------------------------------------------------------------------------------

// Into host memory, the stamp when all else is there.
__device__ void publish(const NanwatchTarget& target, uint32_t which, const double* values, int count) {
  volatile NanwatchRow* const row = target.rows + which;
  for (int i = 0; i < count; ++i) row->values[i] = values[i];
  row->examined = count > kRangeColumns ? 1.0 : 0.0;
  __threadfence_system();
  row->stamp = target.first + which;
}

// The whole tensor in C order.
template <class AnyBatch>
__device__ void read_in_order(const AnyBatch& batch, int tensor, Format format, Sighting* all) {
  __syncthreads();  // all have seen that it is needed
  if (threadIdx.x == 0) *all = {};
  __syncthreads();
  const int64_t columns = batch.num_columns(tensor), rows = batch.num_rows(tensor);
  const int64_t step = batch.column_stride(tensor);
  // A warp for each row, or the block.
  const int abreast = columns < kThreads ? kWarps : 1, threads = kThreads / abreast;
  with_device_float(format, [&](auto tag) {
    constexpr Format F = decltype(tag)::format;
    Glance<F> glance;
    for (int64_t row = int(threadIdx.x) / threads; row < rows; row += abreast) {
      int64_t position;
      const char* const first = batch.row_at(tensor, row, &position);
#pragma unroll 4
      for (int64_t column = int(threadIdx.x) % threads; column < columns; column += threads)
        glance.update(load_word<typename Codes<F>::Word>(first + column * step), position + column);
    }
    all->merge_atomically(glance.times(batch.total(tensor) / (rows * columns)));
  });
  __syncthreads();
}

// Returns whether each row has a zero; softmax makes nan of a row without one. A thread first looks where masks have
// one: the ends and the diagonal (causal, sliding, packed, padded on either side). Their warp reads the rows where that
// fails.
template <class AnyBatch>
__device__ bool has_zero_in_each_row(const AnyBatch& batch, int tensor, Format format) {
  __shared__ int found_none;
  if (threadIdx.x == 0) found_none = 0;
  __syncthreads();
  const int64_t columns = batch.num_columns(tensor), rows = batch.num_rows(tensor);
  const int64_t step = batch.column_stride(tensor);
  const int lane = int(threadIdx.x) % kWarpThreads;
  const auto look = [&](auto any) {
    using Word = decltype(any);
    const auto is_zero_at = [&](const char* first, int64_t column) {
      return Word(load_word<Word>(first + column * step) << 1) == 0;  // without its sign
    };
    for (int64_t group = int(threadIdx.x) - lane; group < rows; group += kThreads) {
      bool open = false;
      int64_t position;
      if (group + lane < rows) {
        const char* const first = batch.row_at(tensor, group + lane, &position);
        open = !is_zero_at(first, 0) && !is_zero_at(first, columns - 1) && !is_zero_at(first, (group + lane) % columns);
      }
      for (unsigned left = __ballot_sync(kWholeWarp, open); left != 0; left &= left - 1) {
        const char* const first = batch.row_at(tensor, group + __ffs(int(left)) - 1, &position);
        bool zero = false;
        for (int64_t column = lane; !zero && column - lane < columns; column += kWarpThreads)
          zero = __any_sync(kWholeWarp, column < columns && is_zero_at(first, column));
        if (!zero && lane == 0) atomicAdd(&found_none, 1);
        if (!zero) return;
      }
    }
  };
  int width = 0;
  with_device_float(format, [&](auto tag) { width = int(sizeof(typename Codes<decltype(tag)::format>::Word)); });
  if (width == 8) look(uint64_t());
  if (width == 4) look(uint32_t());
  if (width == 2) look(uint16_t());
  if (width == 1) look(uint8_t());
  __syncthreads();
  return found_none == 0;
}

// Returns whether there is nothing but zeros and -inf, or zeros and the lowest number.
template <class AnyBatch>
__device__ bool may_be_mask(const AnyBatch& batch, int tensor, const Sighting& all) {
  const DeviceHealth& health = all.loud;
  const Bits masked = health.num_neginf != 0 ? health.num_neginf : all.num_lowest;
  return masked != 0 && health.num_zero != 0 && Bits(batch.total(tensor)) == health.num_zero + masked;
}

// Called by all threads of a block, with its findings in `total`, in shared memory. Adds them. The last block of the
// tensor does the rest and reports to the host.
template <class AnyBatch>
__device__ void deliver(const AnyBatch& batch, const Share& share, Format format, Sighting* total) {
  __shared__ bool is_last, all_finite;
  const int tensor = share.tensor;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = meet(static_cast<Cell<Sighting>*>(batch.cells) + tensor, share.chunks, *total);
    all_finite = true;
    with_device_float(format, [&](auto tag) {
      constexpr Format F = decltype(tag)::format;
      all_finite = is_finite<F>(typename Codes<F>::Word(total->health().range.hi));
    });
  }
  __syncthreads();
  if (!is_last) return;
  bool counts_memory = batch.walk[tensor] == kFlat;
  if (!all_finite && total->num_undecided != 0) {
    read_in_order(batch, tensor, format, total);
    counts_memory = false;
  }
  const bool is_mask = may_be_mask(batch, tensor, *total) && has_zero_in_each_row(batch, tensor, format);
  if (threadIdx.x != 0) return;
  double values[kNanwatchRowValues];
  if (all_finite && !is_mask) {
    write_row(total->health().range, format, values);
    return publish(batch.target, batch.row[tensor], values, kRangeColumns);
  }
  write_row(total->health(), format, values);
  if (counts_memory && total->loud.not_first != 0) {
    with_device_float(format, [&](auto tag) {
      constexpr int width = int(sizeof(typename Codes<decltype(tag)::format>::Word));
      values[column::first_nonfinite] = double(batch.position_of(tensor, int64_t(~total->loud.not_first), width));
    });
  }
  values[column::is_mask] = is_mask ? 1.0 : 0.0;
  publish(batch.target, batch.row[tensor], values, kNanwatchRowValues);
}

// The end of the kernels below. Not inlined: the loops before it keep their registers, whatever is needed here.
template <class Accumulator, class AnyBatch>
__device__ __noinline__ void conclude(const Observation<AnyBatch>& batch, const Share& share, Format format,
                                      const BlockBits& block) {
  __shared__ Sighting total;
  __shared__ bool again;
  if (threadIdx.x == 0) {
    total = {};
    total.quiet = {block.hi, block.not_lo};
    again = false;
    with_device_float(format, [&](auto tag) { again = is_loud<decltype(tag)::format>(batch, share, block, &total); });
  }
  __syncthreads();
  if (again) with_device_float(format, [&](auto tag) { read_plainly<decltype(tag)::format>(batch, share, &total); });
  deliver(batch, share, format, &total);
}

template <class Accumulator, class AnyBatch>
__device__ void conclude_plainly(const Observation<AnyBatch>& batch, const Share& share, Format format) {
  __shared__ Sighting total;
  with_device_format(format, [&](auto tag) { read_plainly<decltype(tag)::format>(batch, share, &total); });
  deliver(batch, share, format, &total);
}

}  // namespace
}  // namespace nanwatch
