// A sampler of one thread: a timer sends it a signal, whose handler notes the instruction. The clock is wall time, as a
// clock of processor time ticks only every few ms.
//   g++ -O2 -shared -fPIC host_sampler.cpp -o host_sampler.so
#include <csignal>
#include <cstdint>
#include <ctime>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

namespace {
constexpr int64_t kMost = 1 << 20;
uint64_t addresses[kMost];
volatile int64_t count = 0;
timer_t timer;

void note(int, siginfo_t*, void* context) {
  const auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  const auto address = uint64_t(machine.gregs[REG_RIP]);
#else
  const auto address = uint64_t(machine.pc);
#endif
  if (count < kMost) addresses[count] = address, count = count + 1;
}
}  // namespace

extern "C" {

// Begins to sample the calling thread every `nanoseconds`. 0, or the error of the system.
int sampler_start(long nanoseconds) {
  struct sigaction action = {};
  action.sa_sigaction = note;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  if (sigaction(SIGPROF, &action, nullptr) != 0) return -1;
  sigevent event = {};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = SIGPROF;
  event._sigev_un._tid = int(syscall(SYS_gettid));
  if (timer_create(CLOCK_MONOTONIC, &event, &timer) != 0) return -2;
  const itimerspec period = {{0, nanoseconds}, {0, nanoseconds}};
  return timer_settime(timer, 0, &period, nullptr);
}

void sampler_stop() {
  timer_delete(timer);
}

// Moves the samples since the last call to `to`, at most `most`; how many there were.
int64_t sampler_take(uint64_t* to, int64_t most) {
  const int64_t all = count < most ? count : most;
  for (int64_t i = 0; i < all; ++i) to[i] = addresses[i];
  count = 0;
  return all;
}
}
