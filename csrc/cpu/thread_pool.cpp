// The threads of parallel_for.
//
//   caller: publishes a job --- takes items ------------------- withdraws it --- waits for helpers
//   helper:          sleeps ---- joins it --- takes items --- leaves it --- sleeps

#include "thread_pool.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>

namespace kvplane {
namespace {

struct Job {
  const std::function<void(int, int64_t)>& run;
  const int64_t num_items;
  const int num_workers;
  std::atomic<int64_t> next{0};
  int num_joined = 1;   // workers that joined, the caller included; guarded by the pool's mutex
  int num_helpers = 0;  // that work on it now; guarded by the pool's mutex

  void work(int worker) {
    for (int64_t item = next++; item < num_items; item = next++) run(worker, item);
  }
};

class ThreadPool {
 public:
  void run(Job* job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      grow(job->num_workers - 1);
      jobs_.push_back(job);
    }
    work_.notify_all();
    job->work(0);
    std::unique_lock<std::mutex> lock(mutex_);
    jobs_.remove(job);
    left_.wait(lock, [job] { return job->num_helpers == 0; });
  }

 private:
  void grow(int num_threads) {
    try {
      for (; num_threads_ < num_threads; ++num_threads_) {
        std::thread(&ThreadPool::help, this).detach();
      }
    } catch (const std::system_error&) {
    }
  }

  [[noreturn]] void help() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      Job* job = nullptr;
      work_.wait(lock, [&] { return (job = open_job()) != nullptr; });
      const int worker = job->num_joined++;
      ++job->num_helpers;
      lock.unlock();
      job->work(worker);
      lock.lock();
      if (--job->num_helpers == 0) left_.notify_all();
    }
  }

  Job* open_job() const {
    for (Job* job : jobs_) {
      if (job->num_joined < job->num_workers && job->next < job->num_items) return job;
    }
    return nullptr;
  }

  std::mutex mutex_;
  std::condition_variable work_;  // a job was published
  std::condition_variable left_;  // the last helper left a job
  std::list<Job*> jobs_;
  int num_threads_ = 0;
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
  Job job{run, num_items, num_workers};
  if (num_workers <= 1 || num_items <= 1) {
    job.work(0);
  } else {
    pool().run(&job);
  }
}

}  // namespace kvplane
