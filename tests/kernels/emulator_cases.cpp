// Small kernels that misuse barriers, shuffles and copies, which the emulator must not let pass.
//
//   emulator_cases CASE SEED    exits with 1 and says what is wrong; with 0 if it is let pass

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "cuda/device/device.h"
#include "cuda/device/ptx.cuh"

namespace {

using namespace kvplane;
using namespace kvplane::cuda;

constexpr int kThreads = 128;

// The sum over a warp.
enum class Summing { kSound, kLeftOut, kGone };

template <Summing kSumming>
void sum_of_warp(const int* input, int* output) {
  const int lane = static_cast<int>(threadIdx.x);
  int value = input[lane];
  if (kSumming == Summing::kGone && lane == 5) return;
  for (int bits = 16; bits > 0; bits /= 2) {
    const unsigned mask = kSumming == Summing::kLeftOut && lane >= 30 ? 0x3FFFFFFFu : kWholeWarp;
    value += __shfl_xor_sync(mask, value, bits);
  }
  output[lane] = value;
}

bool sums_are_right(void (*kernel)(const int*, int*)) {
  std::vector<int> input(32), output(32, -1);
  for (int i = 0; i < 32; ++i) input[static_cast<size_t>(i)] = i * i;
  emulator::launch({1}, {32}, 0, [&] { kernel(input.data(), output.data()); });
  for (const int sum : output) {
    if (sum != 10416) return false;
  }
  return true;
}

// Barriers that not all threads come to.
void barrier_in_a_branch(int) {
  if (threadIdx.x < 64) __syncthreads();
}

void two_barriers(int) {
  if (threadIdx.x < 64) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

void barrier_against_warp_barrier(int) {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

bool runs(void (*kernel)(int)) {
  emulator::launch({1}, {kThreads}, 0, [&] { kernel(0); });
  return true;
}

// Memory that was never written holds no numbers.
void read_shared(float* output) {
  KVPLANE_DYNAMIC_SHARED(float, shared);
  output[threadIdx.x] = shared[threadIdx.x];
}

bool unwritten_shared_memory_is_zero() {
  std::vector<float> output(32);
  emulator::launch({1}, {32}, 32 * sizeof(float), [&] { read_shared(output.data()); });
  return output[0] == 0.0f;
}

void copy_to_an_odd_place(const float* input) {
  KVPLANE_DYNAMIC_SHARED(float, shared);
  copy_async_16(shared + 1, input, true);
}

bool odd_copies_pass() {
  std::vector<float> input(8);
  emulator::launch({1}, {1}, 32, [&] { copy_to_an_odd_place(input.data()); });
  return true;
}

const std::map<std::string, bool (*)()> kCases = {
    {"sums", [] { return sums_are_right(&sum_of_warp<Summing::kSound>); }},
    {"mask_without_the_caller", [] { return sums_are_right(&sum_of_warp<Summing::kLeftOut>); }},
    {"shuffle_with_a_lane_that_is_gone",
     [] { return sums_are_right(&sum_of_warp<Summing::kGone>); }},
    {"barrier_in_a_branch", [] { return runs(&barrier_in_a_branch); }},
    {"two_barriers", [] { return runs(&two_barriers); }},
    {"barrier_against_warp_barrier", [] { return runs(&barrier_against_warp_barrier); }},
    {"unwritten_shared_memory", &unwritten_shared_memory_is_zero},
    {"odd_copies", &odd_copies_pass},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 || kCases.count(argv[1]) == 0) return 2;
  emulator::set_seed(std::strtoull(argv[2], nullptr, 10));
  try {
    if (kCases.at(argv[1])()) return 0;
    std::puts("wrong answer");
  } catch (const emulator::EmulationError& error) {
    std::puts(error.what());
  }
  return 1;
}
