// Small kernels that are right, and faulty ones that the emulator must not let pass.
//
//   emulator_cases CASE SEED    exits with 0 when the kernel gives the right answer, else with 1,
//                               saying what went wrong

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

// Each thread's number, from the thread opposite; through shared memory.
enum class Exchange { kSound, kMissingBarrier, kWriteAfterRead, kShuffleAsBarrier };

template <Exchange kExchange>
void mirror(const int* input, int* output, int rounds) {
  KVPLANE_DYNAMIC_SHARED(int, shared);
  const int i = static_cast<int>(threadIdx.x);
  int value = input[i];
  for (int round = 0; round < rounds; ++round) {
    shared[i] = value;
    if (kExchange == Exchange::kShuffleAsBarrier) {
      __shfl_sync(kWholeWarp, 0, 0);
    } else if (kExchange != Exchange::kMissingBarrier) {
      __syncthreads();
    }
    // Within the warp where a shuffle stands for the barrier, else across the block.
    value = shared[kExchange == Exchange::kShuffleAsBarrier ? i ^ 31 : kThreads - 1 - i];
    if (kExchange != Exchange::kWriteAfterRead) __syncthreads();
  }
  output[blockIdx.x * kThreads + threadIdx.x] = value;
}

bool mirror_is_right(void (*kernel)(const int*, int*, int), bool within_warps, int rounds) {
  constexpr unsigned kBlocks = 3;
  std::vector<int> input(kThreads), output(kBlocks * kThreads, -1);
  for (int i = 0; i < kThreads; ++i) input[static_cast<size_t>(i)] = 7 * i;
  emulator::launch({kBlocks}, {kThreads}, kThreads * sizeof(int),
                   [&] { kernel(input.data(), output.data(), rounds); });
  for (size_t n = 0; n < output.size(); ++n) {
    const int i = static_cast<int>(n % kThreads);
    const int from = rounds % 2 == 0 ? i : within_warps ? i ^ 31 : kThreads - 1 - i;
    if (output[n] != 7 * from) return false;
  }
  return true;
}

// A copy of 16 bytes a lane, then the neighbour's.
enum class Copying { kSound, kEarlyRead, kNoWait, kNoWarpBarrier };

template <Copying kCopying>
void copy_rows_of_warp(const float* input, float* output) {
  KVPLANE_DYNAMIC_SHARED(float, shared);
  const int lane = static_cast<int>(threadIdx.x);
  for (int group = 0; group < 2; ++group) {
    copy_async_16(shared + (group * 32 + lane) * 4, input + (group * 32 + lane) * 4, true);
    commit_copies();
  }
  // The first group has to be there, the second may be on its way.
  if (kCopying == Copying::kEarlyRead) {
    wait_for_copies<2>();
  } else if (kCopying != Copying::kNoWait) {
    wait_for_copies<1>();
  }
  if (kCopying != Copying::kNoWarpBarrier) __syncwarp();
  output[lane] = shared[((lane + 1) % 32) * 4];
  wait_for_copies<0>();
  __syncwarp();
  output[32 + lane] = shared[(32 + (lane + 1) % 32) * 4];
}

bool copies_are_right(void (*kernel)(const float*, float*)) {
  struct alignas(16) Row {
    float number[4];
  };
  std::vector<Row> input(64);
  std::vector<float> output(64, -1);
  for (size_t i = 0; i < 64; ++i) input[i].number[0] = static_cast<float>(i);
  emulator::launch({1}, {32}, 64 * sizeof(Row), [&] { kernel(input[0].number, output.data()); });
  for (size_t i = 0; i < 64; ++i) {
    if (output[i] != static_cast<float>(i / 32 * 32 + (i + 1) % 32)) return false;
  }
  return true;
}

// The sum over a warp.
enum class Summing { kSound, kWrongLane, kDivergentShuffle, kLeftOut, kGone };

template <Summing kSumming>
void sum_of_warp(const int* input, int* output) {
  const int lane = static_cast<int>(threadIdx.x);
  int value = input[lane];
  if (kSumming == Summing::kGone && lane == 5) return;
  for (int bits = kSumming == Summing::kWrongLane ? 8 : 16; bits > 0; bits /= 2) {
    if (kSumming == Summing::kDivergentShuffle && lane >= 16) continue;
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

// The matrix instructions against their definition.
void multiply(const Half* a, const Half* b, float* d) {
  KVPLANE_DYNAMIC_SHARED(Half, shared);  // [16, 16] of a, then [16, 8] of b in rows of 8
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
  for (int i = lane; i < 16 * 16; i += 32) shared[i] = a[i];
  for (int i = lane; i < 16 * 8; i += 32) shared[256 + i] = b[i];
  __syncwarp();
  uint32_t left[4], both[4];
  load_matrices(left, shared + lane % 16 * 16 + lane / 16 * 8);
  load_matrices_transposed(both, shared + 256 + lane % 16 * 8);
  // Transposing twice changes nothing.
  const uint32_t right[2] = {transpose(transpose(both[0])), both[1]};
  float sums[4] = {};
  multiply_add<Half>(sums, left, right);
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}

bool products_are_right() {
  std::vector<Half> a(16 * 16), b(16 * 8);
  std::vector<float> d(16 * 8);
  for (size_t i = 0; i < a.size(); ++i) a[i] = from_float<Half>(static_cast<float>(i % 13));
  for (size_t i = 0; i < b.size(); ++i) b[i] = from_float<Half>(static_cast<float>(i % 7));
  emulator::launch({1}, {32}, (a.size() + b.size()) * sizeof(Half),
                   [&] { multiply(a.data(), b.data(), d.data()); });
  for (size_t row = 0; row < 16; ++row) {
    for (size_t column = 0; column < 8; ++column) {
      float sum = 0;
      for (size_t k = 0; k < 16; ++k)
        sum += to_float(a[row * 16 + k]) * to_float(b[k * 8 + column]);
      if (sum != d[row * 8 + column]) return false;
    }
  }
  return true;
}

const std::map<std::string, bool (*)()> kCases = {
    {"exchange", [] { return mirror_is_right(&mirror<Exchange::kSound>, false, 3); }},
    {"missing_barrier",
     [] { return mirror_is_right(&mirror<Exchange::kMissingBarrier>, false, 1); }},
    {"write_after_read",
     [] { return mirror_is_right(&mirror<Exchange::kWriteAfterRead>, false, 8); }},
    {"shuffle_as_barrier",
     [] { return mirror_is_right(&mirror<Exchange::kShuffleAsBarrier>, true, 1); }},
    {"copies", [] { return copies_are_right(&copy_rows_of_warp<Copying::kSound>); }},
    {"early_read_of_a_copy",
     [] { return copies_are_right(&copy_rows_of_warp<Copying::kEarlyRead>); }},
    {"copy_not_waited_for", [] { return copies_are_right(&copy_rows_of_warp<Copying::kNoWait>); }},
    {"copies_of_others_not_waited_for",
     [] { return copies_are_right(&copy_rows_of_warp<Copying::kNoWarpBarrier>); }},
    {"sums", [] { return sums_are_right(&sum_of_warp<Summing::kSound>); }},
    {"wrong_lane", [] { return sums_are_right(&sum_of_warp<Summing::kWrongLane>); }},
    {"divergent_shuffle", [] { return sums_are_right(&sum_of_warp<Summing::kDivergentShuffle>); }},
    {"mask_without_the_caller", [] { return sums_are_right(&sum_of_warp<Summing::kLeftOut>); }},
    {"shuffle_with_a_lane_that_is_gone",
     [] { return sums_are_right(&sum_of_warp<Summing::kGone>); }},
    {"barrier_in_a_branch", [] { return runs(&barrier_in_a_branch); }},
    {"two_barriers", [] { return runs(&two_barriers); }},
    {"barrier_against_warp_barrier", [] { return runs(&barrier_against_warp_barrier); }},
    {"unwritten_shared_memory", &unwritten_shared_memory_is_zero},
    {"odd_copies", &odd_copies_pass},
    {"products", &products_are_right},
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
