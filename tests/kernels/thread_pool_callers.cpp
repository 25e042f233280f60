// Many callers of parallel_for at once, on few CPUs: each item of each call runs once, and before
// the call returns. argv: seconds, callers. Exits with 1 and a line on what went wrong; a call that
// does not return is given 10 s.

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "cpu/thread_pool.h"

namespace {

std::atomic<bool> ended{false};

[[noreturn]] void fail(const char* what) {
  std::printf("%s\n", what);
  std::fflush(stdout);
  _exit(1);
}

// A plain counter for each item: ThreadSanitizer reports a worker that the call did not wait for.
void call_until_the_end(unsigned seed) {
  std::mt19937 random(seed);
  while (!ended.load()) {
    std::vector<int> runs(2 + random() % 6);
    const int num_workers = 2 + static_cast<int>(random() % 7);
    const int num_turns = random() % 10 == 0 ? 100000 : static_cast<int>(random() % 2000);
    kvplane::parallel_for(static_cast<int64_t>(runs.size()), num_workers, [&](int, int64_t item) {
      for (volatile int turn = 0; turn < num_turns; turn = turn + 1) {
      }
      ++runs[static_cast<size_t>(item)];
    });
    for (const int count : runs) {
      if (count != 1) fail("an item did not run once");
    }
    if (random() % 20 == 0) usleep(random() % 200);
  }
}

}  // namespace

int main(int, char** argv) {
  const double seconds = std::atof(argv[1]);
  const unsigned num_callers = static_cast<unsigned>(std::atoi(argv[2]));
  std::vector<std::thread> callers;
  for (unsigned seed = 0; seed < num_callers; ++seed)
    callers.emplace_back(call_until_the_end, seed);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  ended = true;
  std::thread([] {
    sleep(10);
    fail("a call does not return");
  }).detach();
  for (std::thread& caller : callers) caller.join();
}
