// Runs independent items on a few threads that live as long as the call.
#pragma once

#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace kvplane {

// Calls run(worker, item) once for each item in [0, num_items), worker in [0, num_workers). Which
// worker gets which item is left open, so an item's result must not depend on it; `run` must not
// throw. When the system has no more threads, those there are do the work.
template <typename Run>
void parallel_for(int64_t num_items, int num_workers, const Run& run) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int worker) {
    for (int64_t item = next++; item < num_items; item = next++) run(worker, item);
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(num_workers));
  try {
    for (int worker = 1; worker < num_workers; ++worker) threads.emplace_back(work, worker);
  } catch (const std::system_error&) {
  }
  work(0);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace kvplane
