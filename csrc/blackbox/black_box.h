// The black box: what the process is doing, in a file that outlives it. The file is mapped and written with plain
// stores, so a call costs no system call, and nothing is lost when the process is killed: the pages belong to the
// kernel. Used under the interpreter lock, except for what says otherwise. No PyTorch, no Python.
#pragma once

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "blackbox/layout.h"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace nanwatch::box {

inline uint64_t ticks() {
#if defined(__x86_64__)
  return __rdtsc();
#elif defined(__aarch64__)
  uint64_t now;
  asm volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
#else
  return uint64_t(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

// The place of a thread in the file.
struct Slot {
  Thread* thread = nullptr;
  UnderWay* stack = nullptr;
};

class BlackBox {
 public:
  // Makes the file, all of its blocks allocated, and writes into it from now on. Throws std::runtime_error where that
  // cannot be. A process has one at most, which stays mapped until it ends. If it ends by exit(0) and the file is not
  // `kept`, the file goes.
  static BlackBox* open(const std::string& path, size_t bytes, bool kept);
  // Null before it was opened, after `close`, and in a forked child, whose calls are not the parent's.
  static BlackBox* active() { return active_.load(std::memory_order_relaxed); }
  static void close() { active_ = nullptr; }

  // The number of a text that the file has from now on, always the same; kUnnamed once there is no more room. `kind`:
  // 'm' for a module, whose class comes after a newline, 'l' for a label, 'd' for a dtype.
  uint32_t name(char kind, std::string_view text);

  // The place of this thread. Null where more threads call modules than the file has places for.
  Slot* slot();

  void begin(Slot* slot, uint32_t module, int64_t batch, bool recomputed) {
    if (slot == nullptr) return;
    const uint32_t depth = slot->thread->depth;
    const uint64_t now = ticks();
    if (depth == 0) begin_batch();
    if (depth < kStack) slot->stack[depth] = {now, batch, module, recomputed};
    state_->latest = now;
    publish(&slot->thread->depth, depth + 1);
  }

  void end(Slot* slot, bool raised) {
    if (slot == nullptr || slot->thread->depth == 0) return;
    const uint32_t depth = slot->thread->depth - 1;
    if (depth < kStack) {
      const UnderWay& call = slot->stack[depth];
      const uint64_t now = ticks();
      if (depth == 0) take_pause(now - call.begun);
      // A recomputation ends by an exception of PyTorch's once it has all that the backward needs.
      add_call({call.begun, now, call.batch, call.module, raised && call.recomputed == 0});
    }
    publish(&slot->thread->depth, depth);
  }

  // A call of compiled code, which is known when it has ended.
  void ended(Slot* slot, uint32_t module, int64_t batch) {
    if (slot != nullptr) add_call({0, ticks(), batch, module, false});
  }

  // Returns the number of a frame, whose records follow.
  uint64_t begin_frame() { return ++state_->frames; }
  void add_record(const Record& record) {
    records_[state_->records % num_records_] = record;
    publish(&state_->records, state_->records + 1);
  }

  // Appends a text, which the file shows as a whole or not at all. False where there is no more room.
  bool add_facts(std::string_view text) { return append(facts_, kFacts, &state_->facts, text); }
  bool add_note(std::string_view text) { return append(notes_, kNotes, &state_->notes, text); }
  // Writes where Python is, in turn into two places, so that one of them is always whole.
  void add_sample(std::string_view text);

  void step_begins() { state_->step_ticks = ticks(); }
  // A gradient came: from any thread, without the interpreter lock. `part` as in gradients/backward.h.
  void gradient_came(uint32_t module, uint32_t part, int64_t batch);
  // Called about once a second: a sign of life. Returns for how many seconds no call has begun or ended, and for how
  // many at most before.
  std::pair<double, double> pulse(uint64_t memory);
  bool is_under_way() const {
    const auto is_in_call = [](const Thread& thread) { return thread.id != 0 && thread.depth > 0; };
    return std::any_of(threads_, threads_ + kThreads, is_in_call);
  }
  void exits(bool by_exception) {
    state_->exit_ticks = ticks();
    publish(&state_->exit, by_exception ? 2u : 1u);
  }
  // By exit(), after all of Python has ended.
  void exited(int status);

  // In a signal's handler.
  void mark(int signal, const siginfo_t& info);
  bool holds(const void* address) const { return address >= map_ && static_cast<const char*>(address) < map_ + bytes_; }
  // Replaces the file by plain memory, after a SIGBUS: somebody has cut the file off, or its disk failed.
  void leave_file();

 private:
  BlackBox(char* map, size_t bytes, const std::string& path, bool kept);

  template <typename T>
  static void publish(T* place, T value) {
    // All stores before are visible to who sees this one.
    __atomic_store_n(place, value, __ATOMIC_RELEASE);
  }
  void add_call(const Call& call) {
    calls_[state_->calls % kCalls] = call;
    state_->latest = call.ended;
    publish(&state_->calls, state_->calls + 1);
  }
  void begin_batch();
  void take_pause(uint64_t pause) { state_->slowest = std::max(state_->slowest, pause); }
  bool append(char* section, size_t room, uint64_t* used, std::string_view text);
  void begin_life();
  void note_time();
  double per_tick() const {
    return double(state_->time - state_->begun) / 1e9 / std::max(1.0, double(state_->ticks - state_->begun_ticks));
  }

  static std::atomic<BlackBox*> active_;

  char* const map_;
  const size_t bytes_;
  State* state_;
  Thread* threads_;
  UnderWay* stacks_;
  Call* calls_;
  char *samples_, *facts_, *notes_, *names_;
  Record* records_;
  size_t num_records_;  // in the ring
  std::unordered_map<std::string, uint32_t> numbers_;
  const std::string path_;
  const bool kept_;
};

// Marks the black box at a fatal signal, before the handler that was there. That one, the exit status and the core dump
// are as without it. Only the first call does anything.
void catch_signals();

}  // namespace nanwatch::box
