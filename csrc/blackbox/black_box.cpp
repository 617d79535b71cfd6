#include "blackbox/black_box.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace nanwatch::box {
namespace {

int64_t thread_id() {
  return int64_t(syscall(SYS_gettid));
}

constexpr char kMagic[] = "nanwatch black box 3\n";

std::runtime_error refused(const std::string& path, const char* what, int error) {
  return std::runtime_error("the black box " + path + " could not be " + what + ": " + std::strerror(error));
}

// Frees the place of a thread in the file when the thread ends.
struct OwnSlot {
  Slot slot;  // of a forked child the parent's
  ~OwnSlot() {
    if (slot.box != nullptr && slot.box == BlackBox::active())
      __atomic_store_n(&slot.thread->id, int64_t(0), __ATOMIC_RELEASE);
  }
};

}  // namespace

std::atomic<BlackBox*> BlackBox::active_{nullptr};

BlackBox::BlackBox(const std::string& path, bool kept) : path_(path), kept_(kept) {
  std::string text = kMagic;
#define NANWATCH_BOX_TEXT(Item, name, count, words) \
  text += #name " " + std::to_string(offsetof(File, name)) + " " + std::to_string(count) + (words) + "\n";
  NANWATCH_BOX_SECTIONS(NANWATCH_BOX_TEXT)
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) throw refused(path, "made", errno);
  // Blocks that a full disk cannot give later.
  int error = posix_fallocate(file, 0, off_t(sizeof(File)));
  void* map = MAP_FAILED;
  if (error == 0) {
    map = mmap(nullptr, sizeof(File), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map == MAP_FAILED) error = errno;
  }
  ::close(file);
  if (map == MAP_FAILED) {
    unlink(path.c_str());
    throw refused(path, "mapped", error);
  }
  file_ = static_cast<File*>(map);
  state_ = file_->state;
  begin_life();
  // Last, as a file without it is no black box yet.
  std::memcpy(file_->text, text.data(), text.size());
}

BlackBox* BlackBox::open(const std::string& path, bool kept) {
  auto* const box = new BlackBox(path, kept);
  active_ = box;
  static const int hooked = pthread_atfork(nullptr, nullptr, &BlackBox::close);
  (void)hooked;
  on_exit([](int status, void* of) { static_cast<BlackBox*>(of)->exited(status); }, box);
  return box;
}

uint32_t BlackBox::number_of(const std::string& module, const std::string& class_name) {
  std::string text = module + "\n" + class_name;
  text.resize(std::min(text.find('\0'), text.size()));  // which ends each text in the file
  if (const auto entry = numbers_.find(text); entry != numbers_.end()) return entry->second;
  // As many numbers as texts: a reader counts them.
  const auto number = uint32_t(numbers_.size());
  if (!append(file_->names, kNames, &state_->names, text + '\0')) return kUnnamed;
  numbers_.emplace(std::move(text), number);
  return number;
}

bool BlackBox::append(char* section, size_t room, int64_t* used, std::string_view text) {
  if (text.size() > room - size_t(*used)) return false;
  std::memcpy(section + *used, text.data(), text.size());
  publish(used, *used + int64_t(text.size()));
  return true;
}

void BlackBox::add_sample(std::string_view text) {
  text = text.substr(0, kSample - 1);
  char* const sample = file_->samples + size_t(state_->samples) % 2 * kSample;
  std::memcpy(sample, text.data(), text.size());
  sample[text.size()] = 0;
  state_->sample_ticks = ticks();
  publish(&state_->samples, state_->samples + 1);
}

Slot* BlackBox::slot() {
  thread_local OwnSlot thread_slot;
  if (thread_slot.slot.box == this) return &thread_slot.slot;
  for (size_t number = 0; number < kThreads; ++number) {
    Thread& thread = file_->threads[number];
    if (__atomic_load_n(&thread.id, __ATOMIC_ACQUIRE) != 0) continue;
    thread.depth = 0;
    publish(&thread.id, thread_id());
    thread_slot.slot = {this, &thread, file_->stacks + number * kStack};
    return &thread_slot.slot;
  }
  return nullptr;
}

void BlackBox::gradient_came(uint32_t module, uint32_t part, int64_t batch) {
  // Threads of autograd may come at once. Each of the four is then one of theirs.
  __atomic_store_n(&state_->gradient_module, int64_t(module), __ATOMIC_RELAXED);
  __atomic_store_n(&state_->gradient_part, int64_t(part), __ATOMIC_RELAXED);
  __atomic_store_n(&state_->gradient_batch, batch, __ATOMIC_RELAXED);
  const int64_t now = ticks();
  __atomic_store_n(&state_->latest, now, __ATOMIC_RELAXED);
  __atomic_store_n(&state_->gradient_ticks, now, __ATOMIC_RELEASE);
}

void BlackBox::begin_life() {
  state_->pid = getpid();
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

double BlackBox::pulse(int64_t memory) {
  note_time();
  state_->memory = memory;
  // A life that began anew, where the file was cut off, began after the time that was noted just now.
  if (state_->ticks <= state_->latest || state_->ticks <= state_->begun_ticks) return 0;
  const double seconds = double(state_->time - state_->begun) / 1e9;
  return seconds * double(state_->ticks - state_->latest) / double(state_->ticks - state_->begun_ticks);
}

void BlackBox::exited(int status) {
  if (active_ != this || getpid() != state_->pid) return;
  state_->exit_ticks = ticks();
  publish<int64_t>(&state_->exit_status, 1 + (status & 0xff));
  if (status == 0 && state_->exit == 1 && !kept_) unlink(path_.c_str());
}

void BlackBox::mark(int signal, const siginfo_t& info) {
  if (getpid() != state_->pid) return;
  // The field of a signal that was sent has the pid of its sender.
  state_->signal_address = info.si_code > 0 ? reinterpret_cast<int64_t>(info.si_addr) : -1;
  state_->signal_thread = thread_id();
  state_->signal_ticks = ticks();
  publish<int64_t>(&state_->signal, signal);
}

void BlackBox::leave_file() {
  mmap(file_, sizeof(File), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  begin_life();
}

namespace {

// SIGTERM and SIGHUP are how schedulers end a job.
constexpr int kFatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTERM, SIGHUP, SIGXCPU};
struct sigaction before[NSIG];

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
      // A fault comes again when the instruction does. All else is sent once more, for when this handler is left, as is
      // BUS_MCEERR_AO: memory that nobody reads just now was found broken.
      const bool is_fault =
          info->si_code > 0 && (number == SIGSEGV || (number == SIGBUS && info->si_code != BUS_MCEERR_AO) ||
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
    struct sigaction action = then;
    action.sa_sigaction = &on_signal;
    action.sa_flags = (then.sa_flags & ~SA_RESETHAND) | SA_SIGINFO | SA_ONSTACK;
    sigaction(number, &action, nullptr);
  }
}

}  // namespace nanwatch::box
