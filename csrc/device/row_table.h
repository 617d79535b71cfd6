// The rows that devices write: slots in host memory that they all reach, given out in turn, and the launches that fill
// them. One for the process, as such memory is never given back; used under the interpreter lock.
//
// A kernel writes its row straight into host memory. A copy from device memory would be one more operation, and after
// an error of the device (an assertion, a bad address) there would be nothing to copy: device memory is lost then, and
// with it the frames that led to the error. Rows written before the error are in host memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/range_cuda.h"
#include "numerics/range.h"

namespace nanwatch {

// Interface between the recorder and a device: which tensors it has, to read them in stream order, and to wait for
// that. A table of functions, so that tests can substitute a device that runs only when told; cuda_backend.cpp has the
// one for CUDA. Every function that returns an int returns 0, one of the codes of range_cuda.h, or an error of the
// device.
struct NanwatchBackend {
  // Not 0: memory that the host could read itself is this device's as well.
  int64_t takes_host_memory;
  // The device that holds a plain strided tensor (an at::Tensor, whose Python class is plain too); -1 for anything
  // else.
  int (*device_of)(const void* tensor);
  // The stream that is current there, and whether it is being captured into a graph (1 or 0).
  int (*stream)(int device, void** stream, int* capturing);
  // Host memory that every device writes at `*address`. For good.
  int (*allocate)(int device, size_t bytes, void** memory, void** address);
  // Calls nanwatch_cuda_observe on a stream that is not being captured: all of it is enqueued, or none.
  int (*observe)(const NanwatchTensor* tensors, int64_t count, NanwatchRow* rows, uint64_t first, int device,
                 void* stream);
  // Waits for all that was enqueued on the stream so far; kNanwatchCapturing, without a wait, while it is captured.
  int (*wait)(int device, void* stream);
  // Returns whether this backend can run nothing at all: then the tensors are read as they would be without it.
  int (*cannot_run)(int error);
  const char* (*error)(int code);
};

// The backend for CUDA; null in a build without CUDA. Asking for it makes no CUDA call.
#ifdef NANWATCH_CUDA
const NanwatchBackend* cuda_backend();
#else
inline const NanwatchBackend* cuda_backend() {
  return nullptr;
}
#endif

// From the run of memory that a device reads to the tensor that lies there, where that is not the run in C order.
struct Layout {
  std::vector<int64_t> sizes, strides;  // of the tensor; of its elements in the run, 0 where the tensor repeats them
  int64_t repeats;                      // elements of the tensor for each that is read

  // Turns counts and the first position of a run into those of the tensor.
  void apply(double* values) const;
};

// One tensor's row, from the walk over a call's tensors until it is in host memory. Frames and caches that need it
// share it: a tensor whose row is on the way is not read again.
struct PendingRow {
  enum class State : uint8_t {
    unsent,   // only collected, for the frame that is being made
    pending,  // enqueued
    completed,
    failed,  // it will never come
  };

  State state = State::unsent;
  int device = -1, error = 0;
  void* stream = nullptr;
  const void* collector = nullptr;  // of an unsent row: the frame
  const NanwatchRow* slot = nullptr;
  uint64_t stamp = 0;
  RangeRow range{};
  std::vector<double> columns;           // kDeviceColumns of a tensor that the device has examined
  std::unique_ptr<const Layout> layout;  // null: the run is the tensor

  // Returns whether the row has completed or failed. Takes it out of its slot then, which may be used anew.
  bool poll() {
    if (state != State::pending) return state != State::unsent;
    if (__atomic_load_n(&slot->stamp, __ATOMIC_ACQUIRE) != stamp) return false;
    const double* const row = slot->values;
    range = {row[column::abs_min], row[column::abs_max], row[column::isfinite] != 0};
    if (slot->examined != 0) [[unlikely]] {
      columns.assign(slot->values, slot->values + kDeviceColumns);
      if (layout != nullptr) layout->apply(columns.data());
    }
    state = State::completed;
    return true;
  }

  void fail(int its_error) {
    if (poll() && state == State::completed) return;
    state = State::failed;
    error = its_error;
  }

  // Returns whether a cache may give the row to the tensor in this frame. A non-finite tensor is read each time.
  bool serves(const void* frame) const {
    return state == State::pending || (state == State::unsent && collector == frame) ||
           (state == State::completed && range.isfinite);
  }
};

using PendingRowPtr = std::shared_ptr<PendingRow>;

// The pending rows of one frame, and until they are sent all that is needed to read their tensors. Reused: clearing
// keeps the capacity.
struct PendingRows {
  // A device and the stream that was current there when the frame's first tensor of it was met.
  struct StreamSlot {
    int device = -1;
    void* stream = nullptr;
    int error = 0, capturing = 0;  // whether the stream was being captured then
  };
  struct Read {
    PendingRowPtr row;
    c10::Storage storage;  // the walk may run Python code that drops the tensor
  };

  std::vector<PendingRowPtr> rows;
  std::vector<Read> reads;
  std::vector<NanwatchTensor> runs;  // of the reads
  std::vector<StreamSlot> stream_slots;

  // The stream on which the frame reads tensors of the device.
  const StreamSlot& stream_slot_of(int device, const NanwatchBackend& backend);
  // A row for the tensor, to be sent with the rest.
  const PendingRowPtr& collect(const at::Tensor& x, Format format, const StreamSlot& stream_slot);

  void clear() {
    if (rows.empty() && stream_slots.empty()) return;
    sent(0);
    rows.clear();
  }

  // Forgets the reads. Those that were not sent have failed, with this error.
  void sent(int error) {
    for (const Read& read : reads)
      if (read.row->state == PendingRow::State::unsent) read.row->fail(error);
    reads.clear();
    runs.clear();
    stream_slots.clear();
  }
};

class RowTable {
 public:
  // Enough for 8000 calls of a layer with two weights, one input and one output: 4 MiB of host memory.
  static constexpr size_t kSlots = 1 << 15;

  // Null where there has never been a backend.
  static RowTable* instance();
  static const NanwatchBackend* backend() { return installed_; }
  static const NanwatchBackend* set_backend(const NanwatchBackend* backend) {
    return std::exchange(installed_, backend);
  }

  // Enqueues the reads of the frame on their streams, one launch for neighbours on a device; 0 or an error, and then
  // the rows that were not sent have failed. Waits where all slots hold rows that are still to come.
  int send(PendingRows* frame);

  // Waits until each row has completed or failed, once for each stream. On a stream that is being captured nobody can
  // wait: its rows stay as they are.
  void wait(const std::vector<PendingRowPtr>& rows) const;

  // Waits for all rows that any recorder has asked for.
  void drain() const { wait({in_flight_.begin(), in_flight_.end()}); }

  std::string words(int error) const { return error == 0 ? "its row was not fetched" : backend_->error(error); }

 private:
  int allocate(int device);
  int make_room(size_t count);
  // One launch, of the reads from `begin` on; how many it had.
  int enqueue(const PendingRows& frame, size_t begin, size_t* count);

  static inline const NanwatchBackend* installed_ = cuda_backend();
  const NanwatchBackend* backend_ = nullptr;
  NanwatchRow *slots_ = nullptr, *address_ = nullptr;  // as the host and as a device sees them
  uint64_t next_ = 1;                                  // the number of the next row, which is its stamp
  std::deque<PendingRowPtr> in_flight_;                // sent and perhaps not come, by their numbers
};

}  // namespace nanwatch
