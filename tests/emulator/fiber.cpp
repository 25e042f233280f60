// Switches stacks: in assembly on x86-64, which takes some nanoseconds, elsewhere by ucontext.

#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

// This file is compiled without ThreadSanitizer, so that it does not watch the switches themselves.
#if defined(KVPLANE_WATCH_RACES)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
}
#endif

#if defined(__x86_64__)
// Saves the registers that a call must keep, and the stack pointer to *rdi; continues at rsi.
asm(R"(
  .text
  .type kvplane_change_stack, @function
kvplane_change_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size kvplane_change_stack, . - kvplane_change_stack
)");
extern "C" void kvplane_change_stack(void** from, void* to);
#endif

namespace kvplane::emulator {
namespace {

constexpr size_t kStackBytes = 256 * 1024;

}  // namespace

struct Fiber::State {
  char* memory = nullptr;  // a guard page, then the stack
  size_t page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  Entry entry = nullptr;
#if defined(__x86_64__)
  void* here = nullptr;    // the fiber's stack pointer while it waits
  void* caller = nullptr;  // resume()'s while the fiber runs
#else
  ucontext_t here, caller;
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  void* caller_fake_stack = nullptr;
  const void* caller_stack = nullptr;
  size_t caller_stack_bytes = 0;
#endif
#if defined(KVPLANE_WATCH_RACES)
  void* watched = __tsan_create_fiber(0);
  void* watched_caller = nullptr;
#endif

  char* stack() const { return memory + page_bytes; }
};

namespace {

// Set just before a fiber starts, for its first function to read.
Fiber::State* starting = nullptr;

void start() {
  Fiber::State* state = starting;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &state->caller_stack, &state->caller_stack_bytes);
#endif
  state->entry();
  __builtin_trap();
}

}  // namespace

Fiber::Fiber() : state_(std::make_unique<State>()) {
  void* memory = mmap(nullptr, state_->page_bytes + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  state_->memory = static_cast<char*>(memory);
  mprotect(memory, state_->page_bytes, PROT_NONE);
}

Fiber::~Fiber() {
#if defined(KVPLANE_WATCH_RACES)
  __tsan_destroy_fiber(state_->watched);
#endif
  munmap(state_->memory, state_->page_bytes + kStackBytes);
}

void Fiber::reset(Entry entry) {
  state_->entry = entry;
#if defined(__SANITIZE_ADDRESS__)
  state_->fake_stack = nullptr;
#endif
#if defined(__x86_64__)
  // The six registers, start() to return to, and a null return address for start() itself.
  constexpr int kSavedRegisters = 6;
  uintptr_t* top = reinterpret_cast<uintptr_t*>(state_->stack() + kStackBytes);
  *--top = 0;
  *--top = reinterpret_cast<uintptr_t>(&start);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = 0;
  state_->here = top;
#else
  getcontext(&state_->here);
  state_->here.uc_stack.ss_sp = state_->stack();
  state_->here.uc_stack.ss_size = kStackBytes;
  state_->here.uc_link = nullptr;
  makecontext(&state_->here, &start, 0);
#endif
}

void Fiber::resume() {
  starting = state_.get();
#if defined(KVPLANE_WATCH_RACES)
  state_->watched_caller = __tsan_get_current_fiber();
  constexpr unsigned kNoOrder = 1;
  __tsan_switch_to_fiber(state_->watched, kNoOrder);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&state_->caller_fake_stack, state_->stack(), kStackBytes);
#endif
#if defined(__x86_64__)
  kvplane_change_stack(&state_->caller, state_->here);
#else
  swapcontext(&state_->caller, &state_->here);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(state_->caller_fake_stack, nullptr, nullptr);
#endif
}

void Fiber::yield() {
#if defined(KVPLANE_WATCH_RACES)
  constexpr unsigned kNoOrder = 1;
  __tsan_switch_to_fiber(state_->watched_caller, kNoOrder);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&state_->fake_stack, state_->caller_stack,
                                 state_->caller_stack_bytes);
#endif
#if defined(__x86_64__)
  kvplane_change_stack(&state_->here, state_->caller);
#else
  swapcontext(&state_->here, &state_->caller);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(state_->fake_stack, &state_->caller_stack,
                                  &state_->caller_stack_bytes);
#endif
}

}  // namespace kvplane::emulator
