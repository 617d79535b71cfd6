// Layout of the black box's file. Each item is declared once: the members of a struct, and the text in the file's first
// page that tells a reader their names, types and places. No PyTorch, no Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nanwatch::box {

// The file as a whole, one item. Times are in ticks of `ticks()`; (ticks, time) is a pair of the same moment.
#define NANWATCH_BOX_STATE(X)                                              \
  X(uint64_t, pid)                                                         \
  X(int64_t, begun) /* nanoseconds since 1970 */                           \
  X(uint64_t, begun_ticks)                                                 \
  X(int64_t, time) /* the same of the latest sign of life */               \
  X(uint64_t, ticks)                                                       \
  X(uint64_t, calls) /* how many items were ever written */                \
  X(uint64_t, facts) /* how many bytes were ever written */                \
  X(uint64_t, notes)                                                       \
  X(uint64_t, names)                                                       \
  X(uint64_t, records)                                                     \
  X(uint64_t, frames)                                                      \
  X(uint64_t, slowest)        /* ticks: the longest time without a call */ \
  X(uint64_t, latest)         /* ticks: a call began or ended */           \
  X(uint64_t, step_ticks)     /* the latest step of an optimizer began */  \
  X(uint64_t, gradient_ticks) /* the latest gradient came */               \
  X(int64_t, gradient_batch)                                               \
  X(uint32_t, gradient_module)                                             \
  X(uint32_t, gradient_part)                                               \
  X(uint64_t, signal_ticks)                                                \
  X(uint64_t, signal_address)                                              \
  X(int32_t, signal) /* the latest fatal one, 0: none */                   \
  X(int32_t, signal_code)                                                  \
  X(uint32_t, signal_thread)                                               \
  X(uint32_t, exit)        /* Python ended: 1 + whether by an exception */ \
  X(uint32_t, exit_status) /* 1 + the status of exit(), 0: none yet */     \
  X(uint32_t, killed_by)   /* the signal that the parent was told of */    \
  X(uint64_t, exit_ticks)                                                  \
  X(uint64_t, memory)  /* bytes that the process has in memory */          \
  X(uint64_t, samples) /* how many were ever written */                    \
  X(uint64_t, sample_ticks)

// A thread that calls modules. `depth` calls are under way in it. Free where `id` is 0.
#define NANWATCH_BOX_THREAD(X) \
  X(uint32_t, id)              \
  X(uint32_t, depth)

// A call under way: kStack of them for each thread, the outermost first.
#define NANWATCH_BOX_UNDER_WAY(X) \
  X(uint64_t, begun)              \
  X(int64_t, batch)               \
  X(uint32_t, module)             \
  X(uint32_t, recomputed)

// A call that has ended. `begun` is 0 in compiled code, which tells no beginning.
#define NANWATCH_BOX_CALL(X) \
  X(uint64_t, begun)         \
  X(uint64_t, ended)         \
  X(int64_t, batch)          \
  X(uint32_t, module)        \
  X(uint32_t, raised)

// A record of a frame. Those of one frame have its number and lie one after the other.
#define NANWATCH_BOX_RECORD(X) \
  X(uint64_t, frame)           \
  X(int64_t, batch)            \
  X(double, abs_min)           \
  X(double, abs_max)           \
  X(int64_t, size0)            \
  X(int64_t, size1)            \
  X(int64_t, size2)            \
  X(int64_t, size3)            \
  X(int64_t, size4)            \
  X(int64_t, size5)            \
  X(uint32_t, module)          \
  X(uint32_t, label)           \
  X(uint32_t, dtype)           \
  X(uint8_t, role)             \
  X(uint8_t, note)             \
  X(uint8_t, isfinite)         \
  X(uint8_t, dims)             \
  X(uint8_t, phase)            \
  X(uint8_t, recomputed)       \
  X(uint8_t, pending)

#define NANWATCH_BOX_MEMBER(type, name) type name;
#define NANWATCH_BOX_STRUCT(name, FIELDS) \
  struct name {                           \
    FIELDS(NANWATCH_BOX_MEMBER)           \
  }
NANWATCH_BOX_STRUCT(State, NANWATCH_BOX_STATE);
NANWATCH_BOX_STRUCT(Thread, NANWATCH_BOX_THREAD);
NANWATCH_BOX_STRUCT(UnderWay, NANWATCH_BOX_UNDER_WAY);
NANWATCH_BOX_STRUCT(Call, NANWATCH_BOX_CALL);
NANWATCH_BOX_STRUCT(Record, NANWATCH_BOX_RECORD);
#undef NANWATCH_BOX_STRUCT
#undef NANWATCH_BOX_MEMBER

constexpr size_t kPage = 4096, kThreads = 64, kStack = 120, kCalls = 1 << 15;
constexpr size_t kSample = 2048, kFacts = 1 << 16, kNotes = 1 << 18, kNames = 1 << 21;
constexpr uint8_t kMostDims = 6, kNoShape = 255;  // dims of a record whose shape is longer, or that Python has made
constexpr uint32_t kUnnamed = UINT32_MAX;

}  // namespace nanwatch::box
