// The black box: what the process is doing, in a file that outlives it. The file is mapped and written with plain
// stores, so a call costs no system call, and nothing is lost when the process is killed: the pages belong to the
// kernel. Used under the interpreter lock, except for what says otherwise. No PyTorch, no Python.
#pragma once

#include <signal.h>

#include <atomic>
#include <chrono>
#include <string>
#include <string_view>
#include <unordered_map>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace nanwatch::box {

// ---- layout of the file: sections of bytes, or of items that consist of words of 64 bits. Each word is declared once,
// for the writer and for the text in the file's first page that tells a reader the names. ----

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
  X(backward_ticks) /* the latest backward was over */             \
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

// The sections, behind a page of text that says where they lie.
#define NANWATCH_BOX_SECTIONS(X)                             \
  X(State, state, 1, State::kWords)                          \
  X(Thread, threads, kThreads, Thread::kWords)               \
  X(UnderWay, stacks, (kThreads * kStack), UnderWay::kWords) \
  X(Call, calls, kCalls, Call::kWords)                       \
  X(char, samples, 2 * kSample, "")                          \
  X(char, notes, kNotes, "")                                 \
  X(char, names, kNames, "")
#define NANWATCH_BOX_SECTION(Item, name, count, words) Item name[count];
struct File {
  char text[kPage];
  NANWATCH_BOX_SECTIONS(NANWATCH_BOX_SECTION)
};

// ---- the writer ----

inline int64_t ticks() {
#if defined(__x86_64__)
  return int64_t(__rdtsc());
#elif defined(__aarch64__)
  int64_t now;
  asm volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
#else
  return int64_t(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

class BlackBox;

// The place of a thread in the file.
struct Slot {
  BlackBox* box = nullptr;
  Thread* thread = nullptr;
  UnderWay* stack = nullptr;
};

class BlackBox {
 public:
  // Makes the file, all of its blocks allocated, and writes into it from now on. Throws std::runtime_error where that
  // cannot be. A process has one at most, which stays mapped until it ends. If it ends by exit(0) and the file is not
  // `kept`, the file goes.
  static BlackBox* open(const std::string& path, bool kept);
  // Null before it was opened, after `close`, and in a forked child, whose calls are not the parent's.
  static BlackBox* active() { return active_.load(std::memory_order_relaxed); }
  static void close() { active_ = nullptr; }

  // The number of a module and its class, which the file has from now on; kUnnamed once there is no more room.
  uint32_t number_of(const std::string& module, const std::string& class_name);

  // The place of this thread. Null where more threads call modules than the file has places for.
  Slot* slot();

  // Calls of the thread that has this place, which may be null, or the parent's in a forked child.
  static void begin(Slot* slot, uint32_t module, int64_t batch, bool recomputed) {
    if (!is_live(slot)) [[likely]]
      return;
    const int64_t depth = slot->thread->depth, now = ticks();
    if (depth == 0) slot->box->note_time();
    if (depth < int64_t(kStack)) slot->stack[depth] = {now, batch, module, recomputed};
    slot->box->state_->latest = now;
    publish(&slot->thread->depth, depth + 1);
  }
  static void end(Slot* slot, bool raised) {
    if (!is_live(slot) || slot->thread->depth == 0) [[likely]]
      return;
    const int64_t depth = slot->thread->depth - 1;
    if (depth < int64_t(kStack)) {
      const UnderWay& call = slot->stack[depth];
      // A recomputation ends by an exception of PyTorch's once it has all that the backward needs.
      slot->box->add_call({call.begun, ticks(), call.batch, call.module, raised && call.recomputed == 0});
    }
    publish(&slot->thread->depth, depth);
  }
  // A call of compiled code, which is known when it has ended.
  static void ended(Slot* slot, uint32_t module, int64_t batch) {
    if (is_live(slot)) slot->box->add_call({0, ticks(), batch, module, false});
  }

  // Appends a text, which the file shows as a whole or not at all. False where there is no more room.
  bool add_note(std::string_view text) { return append(file_->notes, kNotes, &state_->notes, text); }
  // Writes where Python is, in turn into two places, so that one of them is always whole.
  void add_sample(std::string_view text);

  void step_begins() { state_->step_ticks = ticks(); }
  void backward_ends() { state_->backward_ticks = ticks(); }
  // A gradient came: from any thread, without the interpreter lock. `part` as in gradients/gradient_recorder.h.
  void gradient_came(uint32_t module, uint32_t part, int64_t batch);
  // Called about once a second: a sign of life. Returns for how many seconds no call has begun or ended.
  double pulse(int64_t memory);
  void exits(bool by_exception) {
    state_->exit_ticks = ticks();
    publish<int64_t>(&state_->exit, by_exception ? 2 : 1);
  }
  // By exit(), after all of Python has ended.
  void exited(int status);

  // In a signal's handler.
  void mark(int signal, const siginfo_t& info);
  bool holds(const void* address) const { return address >= file_ && address < file_ + 1; }
  // Replaces the file by plain memory, after a SIGBUS: somebody has cut the file off, or its disk failed.
  void leave_file();

 private:
  BlackBox(const std::string& path, bool kept);

  template <typename T>
  static void publish(T* place, T value) {
    // All stores before are visible to who sees this one.
    __atomic_store_n(place, value, __ATOMIC_RELEASE);
  }
  static bool is_live(const Slot* slot) { return slot != nullptr && slot->box == active(); }
  void add_call(const Call& call) {
    file_->calls[size_t(state_->calls) % kCalls] = call;
    state_->latest = call.ended;
    publish(&state_->calls, state_->calls + 1);
  }
  bool append(char* section, size_t room, int64_t* used, std::string_view text);
  void begin_life();
  void note_time();

  static std::atomic<BlackBox*> active_;

  File* file_;
  State* state_;
  std::unordered_map<std::string, uint32_t> numbers_;
  const std::string path_;
  const bool kept_;
};

// Marks the black box at a fatal signal, before the handler that was there. That one, the exit status and the core dump
// are as without it. Only the first call does anything.
void catch_signals();

}  // namespace nanwatch::box
