// Reads memory and does nothing else: the upper bound of the kernels' bandwidth, in any order.

#include <atomic>
#include <cstring>

#include "kvplane/params.h"
#include "thread_pool.h"

namespace kvplane {
namespace {

constexpr int64_t kStep = 64;  // bytes
typedef uint64_t Words __attribute__((vector_size(16)));

Words read_run(const char* run, const char* next, int64_t run_bytes) {
  Words sums[4] = {};
  for (int64_t b = 0; b < run_bytes; b += kStep) {
    __builtin_prefetch(next + b, 0, 2);  // as the kernels do
    for (int i = 0; i < 4; ++i) {
      Words words;
      std::memcpy(&words, run + b + 16 * i, sizeof words);
      sums[i] ^= words;
    }
  }
  return (sums[0] ^ sums[1]) ^ (sums[2] ^ sums[3]);
}

}  // namespace

uint64_t read_runs(const ReadRunsParams& p) {
  std::atomic<uint64_t> sum{0};
  const int64_t num_items = (p.num_runs + p.runs_of_item - 1) / p.runs_of_item;
  parallel_for(num_items, p.num_threads, [&](int, int64_t item) {
    const int64_t first = item * p.runs_of_item;
    const int64_t end = first + p.runs_of_item < p.num_runs ? first + p.runs_of_item : p.num_runs;
    Words words = {};
    for (int64_t i = first; i < end; ++i) {
      const char* next = p.memory + p.offsets[i + 1 < end ? i + 1 : i];
      words ^= read_run(p.memory + p.offsets[i], next, p.run_bytes);
    }
    sum.fetch_xor(words[0] ^ words[1], std::memory_order_relaxed);
  });
  return sum.load();
}

}  // namespace kvplane
