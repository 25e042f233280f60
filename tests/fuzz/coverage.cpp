// Tells a fuzzer which code ran, for a module that GCC compiled with -fsanitize-coverage=trace-pc.
//
// libFuzzer reads counters, one for each place in the code, which only Clang lays out; here the
// address of the place, hashed, picks a counter of a table, as in AFL. The fuzzer is told where the
// tables are by the test, through their symbols.

#include <cstddef>
#include <cstdint>

constexpr size_t kNumCounters = 1 << 16;

extern "C" {

__attribute__((visibility("default"))) uint8_t kvplane_counters[kNumCounters];
// An address and flags for each counter, which libFuzzer wants too, but only prints.
__attribute__((visibility("default"))) uintptr_t kvplane_places[2 * kNumCounters];

void __sanitizer_cov_trace_pc() {
  const auto address = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  // The module is loaded at a multiple of a page, so that the low bits stay from run to run.
  ++kvplane_counters[(address ^ address >> 16) % kNumCounters];
}
}
