// The threads of parallel_for: each helper has a word by which a caller offers it a job.
//
//   caller:  claims, offers --- takes items ----- withdraws the offer, or waits for the helper
//   helper:  spins, sleeps ---- accepts --- takes items ---- finishes --- spins, sleeps
//
// Caller and helper communicate by one word of the helper: the number of the latest claim, and a
// state. The number tells a delayed caller from a later one. Sleeping is a state too, so no thread
// goes to sleep on a word that has changed.
//
//   idle <-> asleep                                   the helper goes to sleep, or has woken up
//   idle, asleep -> claimed -> offered                a caller
//   offered -> idle                                   the same caller, whose items ran out
//   offered -> working -> idle                        the helper
//   working -> awaited -> idle                        the caller sleeps, and the helper wakes it
//
// The kernel tends to wake a sleeping helper on its waker's CPU: there it waits for the caller, or
// preempts it, until the balancer moves one of them, which takes milliseconds. So a sleeping helper
// is kept off the caller's CPU before it is woken.

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

enum State : uint32_t { kIdle, kAsleep, kClaimed, kOffered, kWorking, kAwaited };
constexpr uint32_t kStateBits = 3;

constexpr State state_of(uint32_t word) {
  return static_cast<State>(word & ((1u << kStateBits) - 1));
}

// The word of the same claim in another state.
constexpr uint32_t in_state(uint32_t word, State state) {
  return (word >> kStateBits << kStateBits) | state;
}

constexpr uint32_t next_claim(uint32_t word) {
  return in_state(word + (1u << kStateBits), kClaimed);
}

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

// Spins until `done` or for kSpin. Returns whether `done` came true.
template <typename Done>
bool spin_until(const Done& done) {
  const Clock::time_point end = Clock::now() + kSpin;
  for (int i = 1; !done(); ++i) {
    pause();
    if (i % kPausesBetweenLooks == 0 && Clock::now() >= end) return false;
  }
  return true;
}

struct alignas(128) Helper {
  std::atomic<uint32_t> word{kIdle};
  std::atomic<int> cpu{-1};  // the one that the helper was on
  pid_t thread_id = 0;
  // The job and worker of the latest claim, written by the caller that holds it.
  Job* job = nullptr;
  int worker = 0;
  int avoided_cpu = -1;  // the one that the helper is kept off
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
    std::vector<std::pair<Helper*, uint32_t>> offers;
    const int cpu = sched_getcpu();
    for (int i = 0; i < num && static_cast<int>(offers.size()) < num_helpers; ++i) {
      uint32_t word = helpers_[i]->word.load();
      const State state = state_of(word);
      if (state != kIdle && state != kAsleep) continue;
      if (!helpers_[i]->word.compare_exchange_strong(word, next_claim(word))) continue;
      const int worker = static_cast<int>(offers.size()) + 1;
      offers.emplace_back(helpers_[i], offer(*helpers_[i], job, worker, cpu, state == kAsleep));
    }
    job->work(0);
    for (const auto& [helper, word] : offers) take_back(*helper, word);
  }

 private:
  // Returns the word of the offer.
  static uint32_t offer(Helper& helper, Job* job, int worker, int caller_cpu, bool asleep) {
    helper.job = job;
    helper.worker = worker;
    if (asleep || helper.cpu.load(std::memory_order_relaxed) == caller_cpu) {
      keep_off(helper, caller_cpu);
    }
    const uint32_t offered = in_state(helper.word.load(), kOffered);
    helper.word.store(offered);
    if (asleep) wake(helper.word);
    return offered;
  }

  static void keep_off(Helper& helper, int cpu) {
    cpu_set_t others = kCpus;
    if (cpu < 0 || helper.avoided_cpu == cpu) return;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) == 0) return;
    // If this fails, the helper only starts later.
    if (sched_setaffinity(helper.thread_id, sizeof others, &others) == 0) helper.avoided_cpu = cpu;
  }

  static void take_back(Helper& helper, uint32_t offered) {
    uint32_t word = offered;
    if (helper.word.compare_exchange_strong(word, in_state(offered, kIdle))) return;
    uint32_t working = in_state(offered, kWorking);
    if (spin_until([&] { return helper.word.load() != working; })) return;
    const uint32_t awaited = in_state(offered, kAwaited);
    if (!helper.word.compare_exchange_strong(working, awaited)) return;
    while (helper.word.load() == awaited) sleep_while(helper.word, awaited);
  }

  // Adds helpers up to `num_wanted`, or as many as the system allows. Returns how many there are.
  int grow(int num_wanted) {
    int num = num_helpers_.load(std::memory_order_acquire);
    if (num >= num_wanted || num == kMaxHelpers) return num;
    const std::lock_guard<std::mutex> lock(growing_);
    try {
      for (num = num_helpers_.load(); num < num_wanted && num < kMaxHelpers; ++num) {
        helpers_[num] = new Helper;
        std::atomic<bool> started{false};
        std::thread(&ThreadPool::help, helpers_[num], &started).detach();
        while (!started.load(std::memory_order_acquire)) std::this_thread::yield();
        num_helpers_.store(num + 1, std::memory_order_release);
      }
    } catch (const std::system_error&) {
    }
    return num_helpers_.load();
  }

  [[noreturn]] static void help(Helper* helper, std::atomic<bool>* started) {
    helper->thread_id = static_cast<pid_t>(syscall(SYS_gettid));
    // The creator's mask, which the thread has inherited, may be a single CPU.
    if (CPU_COUNT(&kCpus) > 0) sched_setaffinity(0, sizeof kCpus, &kCpus);
    started->store(true, std::memory_order_release);
    while (true) {
      uint32_t word = wait_for_offer(helper->word);
      if (!helper->word.compare_exchange_strong(word, in_state(word, kWorking))) continue;
      helper->cpu.store(sched_getcpu(), std::memory_order_relaxed);
      helper->job->work(helper->worker);
      // From here on the job may be destroyed.
      if (state_of(helper->word.exchange(in_state(word, kIdle))) == kAwaited) wake(helper->word);
    }
  }

  // Returns the word of an offer, which its caller may have withdrawn since.
  static uint32_t wait_for_offer(std::atomic<uint32_t>& helper_word) {
    uint32_t word = helper_word.load();
    const auto is_offered = [&] { return state_of(word = helper_word.load()) == kOffered; };
    while (!spin_until(is_offered)) {
      // For a claimed helper spin again: its offer will come soon.
      if (state_of(word) == kIdle) {
        const uint32_t asleep = in_state(word, kAsleep);
        if (helper_word.compare_exchange_strong(word, asleep)) word = asleep;
      }
      if (state_of(word) == kAsleep) sleep_while(helper_word, word);
    }
    return word;
  }

  std::mutex growing_;
  std::atomic<int> num_helpers_{0};
  Helper* helpers_[kMaxHelpers] = {};
};

// Never destroyed: threads may sleep in it until the process ends. A child of fork() has none of
// its parent's threads, so it gets a new pool.
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
