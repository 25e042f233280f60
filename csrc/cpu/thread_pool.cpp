// The threads of parallel_for: helpers, each with a slot of its own in which a caller offers it a
// job.
//
//   caller:  offers a job --- takes items ------------ withdraws the offer, or waits for the helper
//   helper:  spins, sleeps --- accepts --- takes items --- finishes --- spins, sleeps
//
//   state of a slot:  idle -> claimed -> offered -> working -> idle     or     offered -> idle
//                          caller     caller     helper     helper                 caller
//
// A helper that sleeps wakes up on its waker's CPU, as the kernel likes it: there it waits for the
// caller, or takes its place, until the balancer moves one of them, which takes milliseconds. So a
// sleeping helper is kept off the caller's CPU before it is woken.

#include "thread_pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace kvplane {
namespace {

using Clock = std::chrono::steady_clock;

// The layers of a model call one after another: the next job often comes within this time.
constexpr std::chrono::microseconds kSpin{50};
constexpr int kPausesBetweenLooks = 32;  // at the clock
constexpr int kMaxHelpers = 1024;

enum State : int { kIdle, kClaimed, kOffered, kWorking };

struct Job {
  const std::function<void(int, int64_t)>& run;
  const int64_t num_items;
  alignas(128) std::atomic<int64_t> next{0};

  void work(int worker) {
    for (int64_t item = next++; item < num_items; item = next++) run(worker, item);
  }
};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("yield");
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Returns once `done` does: spins at first, then sleeps on `word`, and says so in `asleep`.
template <typename Done>
void wait(std::atomic<uint32_t>& word, std::atomic<bool>& asleep, const Done& done) {
  const Clock::time_point end = Clock::now() + kSpin;
  for (int i = 1; !done(); ++i) {
    pause();
    if (i % kPausesBetweenLooks != 0 || Clock::now() < end) continue;
    asleep.store(true);
    for (uint32_t seen = word.load(); !done(); seen = word.load()) sleep_while(word, seen);
    asleep.store(false);
    return;
  }
}

struct alignas(128) Slot {
  std::atomic<int> state{kIdle};
  std::atomic<uint32_t> offered{0};  // offers so far
  std::atomic<bool> helper_sleeps{false};
  std::atomic<int> cpu{-1};  // that the helper was on
  Job* job = nullptr;        // these three: of the latest offer
  int worker = 0;
  uint32_t number = 0;
  pid_t thread_id = 0;
  int avoided_cpu = -1;                            // by the helper
  alignas(128) std::atomic<uint32_t> finished{0};  // the latest offer that was worked off
  std::atomic<bool> caller_sleeps{false};
};

// The CPUs that the process may use, found out before a library binds its main thread to one.
cpu_set_t cpus_of_process() {
  cpu_set_t cpus;
  if (sched_getaffinity(getpid(), sizeof cpus, &cpus) != 0) CPU_ZERO(&cpus);
  return cpus;
}
const cpu_set_t kCpus = cpus_of_process();

class ThreadPool {
 public:
  void run(Job* job, int num_helpers) {
    const int num = grow(num_helpers);
    std::vector<std::pair<Slot*, uint32_t>> offers;
    const int cpu = sched_getcpu();
    for (int i = 0; i < num && static_cast<int>(offers.size()) < num_helpers; ++i) {
      Slot& slot = *slots_[i];
      int idle = kIdle;
      if (!slot.state.compare_exchange_strong(idle, kClaimed)) continue;
      offers.emplace_back(&slot, offer(slot, job, static_cast<int>(offers.size()) + 1, cpu));
    }
    job->work(0);
    for (const auto& [slot, number] : offers) take_back(*slot, number);
  }

 private:
  static uint32_t offer(Slot& slot, Job* job, int worker, int caller_cpu) {
    slot.job = job;
    slot.worker = worker;
    slot.number = slot.offered.load() + 1;
    const uint32_t number = slot.number;
    if (slot.helper_sleeps.load() || slot.cpu.load() == caller_cpu) keep_off(slot, caller_cpu);
    slot.state.store(kOffered);
    slot.offered.store(number);
    if (slot.helper_sleeps.load()) wake(slot.offered);
    return number;
  }

  static void keep_off(Slot& slot, int cpu) {
    cpu_set_t others = kCpus;
    if (cpu < 0 || slot.avoided_cpu == cpu) return;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) == 0) return;
    // Where it fails, the helper only starts later.
    if (sched_setaffinity(slot.thread_id, sizeof others, &others) == 0) slot.avoided_cpu = cpu;
  }

  static void take_back(Slot& slot, uint32_t number) {
    int offered = kOffered;
    if (slot.state.compare_exchange_strong(offered, kIdle)) return;
    wait(slot.finished, slot.caller_sleeps,
         [&] { return static_cast<int32_t>(slot.finished.load() - number) >= 0; });
  }

  // Returns the number of helpers: as many as wanted, or as the system has threads for.
  int grow(int num_wanted) {
    int num = num_slots_.load(std::memory_order_acquire);
    if (num >= num_wanted || num == kMaxHelpers) return num;
    const std::lock_guard<std::mutex> lock(growing_);
    try {
      for (num = num_slots_.load(); num < num_wanted && num < kMaxHelpers; ++num) {
        slots_[num] = new Slot;
        std::atomic<bool> started{false};
        std::thread(&ThreadPool::help, slots_[num], &started).detach();
        while (!started.load(std::memory_order_acquire)) std::this_thread::yield();
        num_slots_.store(num + 1, std::memory_order_release);
      }
    } catch (const std::system_error&) {
    }
    return num_slots_.load();
  }

  [[noreturn]] static void help(Slot* slot, std::atomic<bool>* started) {
    slot->thread_id = static_cast<pid_t>(syscall(SYS_gettid));
    // The creator's mask, which the thread has inherited, may be a single CPU.
    if (CPU_COUNT(&kCpus) > 0) sched_setaffinity(0, sizeof kCpus, &kCpus);
    started->store(true, std::memory_order_release);
    uint32_t seen = 0;
    while (true) {
      wait(slot->offered, slot->helper_sleeps, [&] { return slot->offered.load() != seen; });
      seen = slot->offered.load();
      int offered = kOffered;
      if (!slot->state.compare_exchange_strong(offered, kWorking)) continue;  // was withdrawn
      slot->cpu.store(sched_getcpu(), std::memory_order_relaxed);
      const uint32_t number = slot->number;
      slot->job->work(slot->worker);
      slot->finished.store(number);  // from here on the job may be gone
      if (slot->caller_sleeps.load()) wake(slot->finished);
      slot->state.store(kIdle);
    }
  }

  std::mutex growing_;
  std::atomic<int> num_slots_{0};
  Slot* slots_[kMaxHelpers] = {};
};

// Never destroyed: threads may sleep in it until the process ends. A child of fork() has none of
// its parent's threads, so it gets a pool of its own.
ThreadPool& pool() {
  static std::mutex mutex;
  static ThreadPool* pool = nullptr;
  static pid_t owner = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (pool == nullptr || owner != getpid()) {
    pool = new ThreadPool;
    owner = getpid();
  }
  return *pool;
}

}  // namespace

void parallel_for(int64_t num_items, int num_workers,
                  const std::function<void(int worker, int64_t item)>& run) {
  Job job{run, num_items};
  if (num_workers <= 1 || num_items <= 1) {
    job.work(0);
  } else {
    pool().run(&job, num_workers - 1);
  }
}

}  // namespace kvplane
