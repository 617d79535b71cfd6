#include "blackbox/black_box.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <type_traits>

namespace nanwatch::box {
namespace {

uint32_t thread_id() {
#ifdef __linux__
  return uint32_t(syscall(SYS_gettid));
#else
  return 1;
#endif
}

constexpr char kMagic[] = "nanwatch black box 2\n";
constexpr size_t kNameHead = 8;  // of a text among the names: its kind, and its length from the fifth byte on

// The name of a type as numpy has it, such as "u4".
template <typename T>
std::string type_name() {
  const char* const kind = std::is_floating_point_v<T> ? "f" : std::is_signed_v<T> ? "i" : "u";
  return kind + std::to_string(sizeof(T));
}

// Where the sections of a file lie, and the text that says so.
struct Sections {
  char* map;
  std::string text = kMagic;
  size_t end = kPage;

  template <typename Item>
  Item* add(const char* name, size_t count, const std::string& fields = "") {
    const size_t at = end;
    text += std::string(name) + " " + std::to_string(at) + " " + std::to_string(count) + " " +
            std::to_string(sizeof(Item)) + fields + "\n";
    end += (count * sizeof(Item) + 63) / 64 * 64;
    return reinterpret_cast<Item*>(map + at);
  }
};

#define NANWATCH_BOX_FIELD(type, name) +(" " #name ":" + type_name<type>() + ":" + std::to_string(offsetof(Item, name)))
#define NANWATCH_BOX_FIELDS(Type, FIELDS)            \
  [] {                                               \
    using Item = Type;                               \
    return std::string() FIELDS(NANWATCH_BOX_FIELD); \
  }()

std::runtime_error refused(const std::string& path, const char* what, int error) {
  return std::runtime_error("the black box " + path + " could not be " + what + ": " + std::strerror(error));
}

// Frees the place of a thread in the file when the thread ends.
struct OwnSlot {
  const BlackBox* box = nullptr;  // only compared: of a forked child the parent's
  Slot slot;
  ~OwnSlot() {
    if (box != nullptr && box == BlackBox::active()) __atomic_store_n(&slot.thread->id, 0, __ATOMIC_RELEASE);
  }
};

void forked() {
  BlackBox::close();
}

}  // namespace

std::atomic<BlackBox*> BlackBox::active_{nullptr};

BlackBox::BlackBox(char* map, size_t bytes, const std::string& path, bool kept)
    : map_(map), bytes_(bytes), path_(path), kept_(kept) {
  struct Sample {
    char text[kSample];
  };
  Sections sections{map};
  state_ = new (sections.add<State>("state", 1, NANWATCH_BOX_FIELDS(State, NANWATCH_BOX_STATE))) State{};
  threads_ = sections.add<Thread>("threads", kThreads, NANWATCH_BOX_FIELDS(Thread, NANWATCH_BOX_THREAD));
  stacks_ = sections.add<UnderWay>("stacks", kThreads * kStack, NANWATCH_BOX_FIELDS(UnderWay, NANWATCH_BOX_UNDER_WAY));
  calls_ = sections.add<Call>("calls", kCalls, NANWATCH_BOX_FIELDS(Call, NANWATCH_BOX_CALL));
  samples_ = sections.add<Sample>("samples", 2)->text;
  facts_ = sections.add<char>("facts", kFacts);
  notes_ = sections.add<char>("notes", kNotes);
  names_ = sections.add<char>("names", kNames);
  num_records_ = (bytes - sections.end) / sizeof(Record);
  records_ = sections.add<Record>("records", num_records_, NANWATCH_BOX_FIELDS(Record, NANWATCH_BOX_RECORD));
  begin_life();
  // Last, as a file without it is no black box yet.
  std::memcpy(map, sections.text.data(), sections.text.size());
}

BlackBox* BlackBox::open(const std::string& path, size_t bytes, bool kept) {
#ifndef __linux__
  throw refused(path, "made", ENOTSUP);
#else
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) throw refused(path, "made", errno);
  // Blocks that a full disk cannot give later.
  int error = posix_fallocate(file, 0, off_t(bytes));
  void* map = MAP_FAILED;
  if (error == 0) {
    map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map == MAP_FAILED) error = errno;
  }
  ::close(file);
  if (map == MAP_FAILED) {
    unlink(path.c_str());
    throw refused(path, "mapped", error);
  }
  auto* const box = new BlackBox(static_cast<char*>(map), bytes, path, kept);
  active_ = box;
  static const int hooked = pthread_atfork(nullptr, nullptr, &forked);
  (void)hooked;
#ifdef __GLIBC__
  on_exit([](int status, void* of) { static_cast<BlackBox*>(of)->exited(status); }, box);
#endif
  return box;
#endif
}

uint32_t BlackBox::name(char kind, std::string_view text) {
  text = text.substr(0, UINT16_MAX);
  std::string key(1, kind);
  key += text;
  const auto found = numbers_.find(key);
  if (found != numbers_.end()) return found->second;
  char head[kNameHead] = {kind};
  const auto length = uint32_t(text.size());
  std::memcpy(head + 4, &length, sizeof(length));
  const uint64_t before = state_->names;
  if (before + kNameHead + text.size() > kNames) return kUnnamed;
  // As many numbers as texts: a reader counts them.
  const auto number = uint32_t(numbers_.size());
  append(names_, kNames, &state_->names, std::string(head, kNameHead).append(text));
  numbers_.emplace(std::move(key), number);
  return number;
}

bool BlackBox::append(char* section, size_t room, uint64_t* used, std::string_view text) {
  if (text.size() > room - *used) return false;
  std::memcpy(section + *used, text.data(), text.size());
  publish(used, *used + text.size());
  return true;
}

void BlackBox::add_sample(std::string_view text) {
  text = text.substr(0, kSample - 1);
  char* const sample = samples_ + state_->samples % 2 * kSample;
  std::memcpy(sample, text.data(), text.size());
  sample[text.size()] = 0;
  state_->sample_ticks = ticks();
  publish(&state_->samples, state_->samples + 1);
}

Slot* BlackBox::slot() {
  thread_local OwnSlot own;
  if (own.box == this) return &own.slot;
  for (size_t number = 0; number < kThreads; ++number) {
    Thread& thread = threads_[number];
    if (__atomic_load_n(&thread.id, __ATOMIC_ACQUIRE) != 0) continue;
    thread.depth = 0;
    publish(&thread.id, thread_id());
    own.slot = {&thread, stacks_ + number * kStack};
    own.box = this;
    return &own.slot;
  }
  return nullptr;
}

void BlackBox::begin_batch() {
  note_time();
  if (state_->calls > 0) take_pause(state_->ticks - state_->latest);
}

void BlackBox::gradient_came(uint32_t module, uint32_t part, int64_t batch) {
  // Threads of autograd may come at once. Each of the four is then one of theirs.
  __atomic_store_n(&state_->gradient_module, module, __ATOMIC_RELAXED);
  __atomic_store_n(&state_->gradient_part, part, __ATOMIC_RELAXED);
  __atomic_store_n(&state_->gradient_batch, batch, __ATOMIC_RELAXED);
  const uint64_t now = ticks();
  __atomic_store_n(&state_->latest, now, __ATOMIC_RELAXED);
  __atomic_store_n(&state_->gradient_ticks, now, __ATOMIC_RELEASE);
}

void BlackBox::begin_life() {
  state_->pid = uint64_t(getpid());
  note_time();
  state_->begun = state_->time;
  state_->begun_ticks = state_->latest = state_->ticks;
}

void BlackBox::note_time() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  state_->ticks = ticks();
  state_->time = int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

std::pair<double, double> BlackBox::pulse(uint64_t memory) {
  note_time();
  state_->memory = memory;
  return {double(state_->ticks - std::min(state_->ticks, state_->latest)) * per_tick(),
          double(state_->slowest) * per_tick()};
}

void BlackBox::exited(int status) {
  if (active_ != this || uint64_t(getpid()) != state_->pid) return;
  state_->exit_ticks = ticks();
  publish(&state_->exit_status, 1u + uint32_t(status & 0xff));
  if (status == 0 && state_->exit == 1 && !kept_) unlink(path_.c_str());
}

void BlackBox::mark(int signal, const siginfo_t& info) {
  if (uint64_t(getpid()) != state_->pid) return;
  state_->signal_code = info.si_code;
  state_->signal_address = reinterpret_cast<uint64_t>(info.si_addr);
  state_->signal_thread = thread_id();
  state_->signal_ticks = ticks();
  publish(&state_->signal, int32_t(signal));
}

void BlackBox::leave_file() {
  mmap(map_, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  begin_life();
}

namespace {

// SIGTERM and SIGHUP are how schedulers end a job.
constexpr int kFatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTERM, SIGHUP, SIGXCPU};
struct sigaction before[NSIG];
// BUS_MCEERR_AO, which not every system has: memory that nobody reads just now was found broken.
constexpr int kLateMemoryError = 5;

void on_signal(int number, siginfo_t* info, void* context) {
  const int error = errno;
  const struct sigaction& then = before[number];
  BlackBox* const box = BlackBox::active();
  if (box != nullptr && number == SIGBUS && box->holds(info->si_addr)) {
    box->leave_file();
  } else {
    if (box != nullptr) box->mark(number, *info);
    if ((then.sa_flags & SA_SIGINFO) != 0) {
      then.sa_sigaction(number, info, context);
    } else if (then.sa_handler == SIG_DFL) {
      // A fault comes again when the instruction does. All else is sent once more, for when this handler is left.
      const bool is_fault =
          info->si_code > 0 && (number == SIGSEGV || (number == SIGBUS && info->si_code != kLateMemoryError) ||
                                number == SIGFPE || number == SIGILL);
      sigaction(number, &then, nullptr);
      if (!is_fault) raise(number);
    } else if (then.sa_handler != SIG_IGN) {
      then.sa_handler(number);
    }
  }
  errno = error;
}

}  // namespace

void catch_signals() {
  static bool are_caught = false;
  if (std::exchange(are_caught, true)) return;
  for (const int number : kFatal) {
    struct sigaction& then = before[number];
    if (sigaction(number, nullptr, &then) != 0) continue;
    if ((then.sa_flags & SA_SIGINFO) == 0 && then.sa_handler == SIG_IGN) continue;
    struct sigaction own = then;
    own.sa_sigaction = &on_signal;
    own.sa_flags = (then.sa_flags & ~SA_RESETHAND) | SA_SIGINFO | SA_ONSTACK;
    sigaction(number, &own, nullptr);
  }
}

}  // namespace nanwatch::box
