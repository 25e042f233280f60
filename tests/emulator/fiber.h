// Stacks that run by turns on one operating system thread: the emulator's CUDA threads.
#pragma once

#include <cstddef>
#include <memory>

namespace kvplane::emulator {

// A stack of its own, on which `entry` runs from resume() to yield() or to its end. The sanitizers
// are notified of each switch; to ThreadSanitizer each fiber is a thread of its own, and a switch
// creates no order between them.
class Fiber {
 public:
  using Entry = void (*)();

  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Forgets what ran before: the next resume() calls `entry`, which must never return.
  void reset(Entry entry);
  // To be called outside any fiber; returns when the fiber yields.
  void resume();
  // To be called on the running fiber.
  void yield();

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace kvplane::emulator
