// Samples one thread: a timer sends it a signal, whose handler notes the instruction. The timer's clock is wall time,
// as one of processor time ticks only every few ms.
//   g++ -O2 -shared -fPIC host_sampler.cpp -o host_sampler.so
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <ctime>

static uint64_t addresses[1 << 20];
static volatile int64_t count = 0;
static timer_t timer;

static void note(int, siginfo_t*, void* context) {
  const auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
  if (count == 1 << 20) return;
#ifdef __x86_64__
  addresses[count] = uint64_t(machine.gregs[REG_RIP]);
#else
  addresses[count] = uint64_t(machine.pc);
#endif
  count = count + 1;
}

// Samples the calling thread every `period` nanoseconds. Not 0 where the system has no such timer.
extern "C" int sampler_start(long period) {
  struct sigaction action = {};
  action.sa_sigaction = note;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigevent event = {};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = SIGPROF;
  event._sigev_un._tid = int(syscall(SYS_gettid));
  const itimerspec times = {{0, period}, {0, period}};
  return sigaction(SIGPROF, &action, nullptr) || timer_create(CLOCK_MONOTONIC, &event, &timer) ||
         timer_settime(timer, 0, &times, nullptr);
}

// Ends it. Copies the samples, at most `most`, and returns how many.
extern "C" int sampler_stop(uint64_t* to, int most) {
  timer_delete(timer);
  const int taken = count < most ? int(count) : most;
  for (int i = 0; i < taken; ++i) to[i] = addresses[i];
  count = 0;
  return taken;
}
