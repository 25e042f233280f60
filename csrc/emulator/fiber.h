// Stacks that take turns on one thread of the processor: what the emulator runs CUDA threads on.
#pragma once

#include <cstddef>
#include <memory>

namespace kvplane::emulator {

// A stack of its own, on which `entry` runs from resume() to yield() or to its end. The sanitizers
// are told of each change of stack; under ThreadSanitizer each fiber is a thread of its own, and
// changing from one to the other creates no order between them.
class Fiber {
 public:
  using Entry = void (*)();

  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Forgets what ran before: the next resume() calls `entry`, which must never return.
  void reset(Entry entry);
  // To be called outside any fiber; comes back when the fiber yields.
  void resume();
  // To be called on the running fiber.
  void yield();

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace kvplane::emulator
