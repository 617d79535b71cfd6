// Layout of the black box's file: sections of bytes, or of items that consist of words of 64 bits. Each word is
// declared once, for the writer and for the text in the file's first page that tells a reader the names. No PyTorch, no
// Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nanwatch::box {

#define NANWATCH_BOX_WORD(name) int64_t name;
#define NANWATCH_BOX_NAME(name) " " #name
#define NANWATCH_BOX_ITEM(Item, WORDS)                         \
  struct Item {                                                \
    static constexpr char kWords[] = WORDS(NANWATCH_BOX_NAME); \
    WORDS(NANWATCH_BOX_WORD)                                   \
  };

// The file as a whole, one item. `..._ticks` are times of `ticks()`; (ticks, time) is a pair of the same moment.
#define NANWATCH_BOX_STATE(X)                                      \
  X(pid)                                                           \
  X(begun) /* nanoseconds since 1970 */                            \
  X(begun_ticks)                                                   \
  X(time) /* of the latest sign of life */                         \
  X(ticks)                                                         \
  X(latest) /* ticks: a call began or ended, or a gradient came */ \
  X(calls)  /* how many items were ever written */                 \
  X(samples)                                                       \
  X(notes) /* how many bytes were written */                       \
  X(names)                                                         \
  X(step_ticks)     /* the latest step of an optimizer began */    \
  X(gradient_ticks) /* the latest gradient came */                 \
  X(gradient_batch)                                                \
  X(gradient_module)                                               \
  X(gradient_part)                                                 \
  X(sample_ticks)                                                  \
  X(signal_ticks)                                                  \
  X(signal)         /* the latest fatal one, 0: none */            \
  X(signal_address) /* of a fault, -1: none */                     \
  X(signal_thread)                                                 \
  X(exit_ticks)                                                    \
  X(exit)        /* Python ended: 1 + whether by an exception */   \
  X(exit_status) /* 1 + the status of exit(), 0: none yet */       \
  X(memory)      /* bytes that the process has in memory */
NANWATCH_BOX_ITEM(State, NANWATCH_BOX_STATE)

// A thread that calls modules. `depth` calls are under way in it. Free where `id` is 0.
#define NANWATCH_BOX_THREAD(X) X(id) X(depth)
NANWATCH_BOX_ITEM(Thread, NANWATCH_BOX_THREAD)

// A call under way: kStack of them for each thread, the outermost first.
#define NANWATCH_BOX_UNDER_WAY(X) X(begun) X(batch) X(module) X(recomputed)
NANWATCH_BOX_ITEM(UnderWay, NANWATCH_BOX_UNDER_WAY)

// A call that has ended. `begun` is 0 in compiled code, which tells no beginning.
#define NANWATCH_BOX_CALL(X) X(begun) X(ended) X(batch) X(module) X(raised)
NANWATCH_BOX_ITEM(Call, NANWATCH_BOX_CALL)

constexpr size_t kPage = 4096, kThreads = 64, kStack = 120, kCalls = 1 << 15;
constexpr size_t kSample = 2048, kNotes = 1 << 18, kNames = 1 << 21;
constexpr uint32_t kUnnamed = UINT32_MAX;

}  // namespace nanwatch::box
