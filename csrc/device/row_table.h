// The rows that devices write: slots in host memory that they all reach, given out in turn, and the launches that fill
// them. One for the process, as such memory is never given back; used under the interpreter lock.
//
// A kernel writes its row straight into host memory. A copy from device memory would be one more operation, and after
// an error of the device (an assertion, a bad address) there would be nothing to copy: device memory is lost then, and
// with it the frames that led to the error. Rows written before the error are in host memory.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "device/pending_row.h"

namespace nanwatch {

class RowTable {
 public:
  // Enough for 8000 calls of a layer with two weights, one input and one output: 4 MiB of host memory.
  static constexpr size_t kSlots = 1 << 15;

  // Null where there has never been a backend.
  static RowTable* instance();
  static const NanwatchBackend* backend();
  static void set_backend(const NanwatchBackend* backend);

  // Enqueues the reads of the frame on their streams, one launch for neighbours on a device; 0 or an error, and then
  // the rows that were not sent have failed. Waits where all slots hold rows that are still to come.
  int send(PendingRows* frame);

  // Waits until each row has completed or failed, once for each stream. On a stream that is being captured nobody can
  // wait: its rows stay as they are.
  void wait(const std::vector<PendingRowPtr>& rows) const;

  // Waits for all rows that any recorder has asked for.
  void drain() const { wait({in_flight_.begin(), in_flight_.end()}); }

  std::string words(int error) const;

 private:
  int allocate(int device);
  int make_room(size_t count);
  // One launch, of the reads from `begin` on; how many it had.
  int enqueue(const PendingRows& frame, size_t begin, size_t* count);

  const NanwatchBackend* backend_ = nullptr;
  NanwatchRow *slots_ = nullptr, *address_ = nullptr;  // as the host and as a device sees them
  uint64_t next_ = 1;                                  // the number of the next row, which is its stamp
  std::deque<PendingRowPtr> in_flight_;                // sent and perhaps not come, by their numbers
};

}  // namespace nanwatch
