// Queries that meet 8-bit keys on the tensor cores: as fp16, in which every key is exact.
//
// fp16 queries go as they are. A row of bf16 is first multiplied by the power of two that brings
// its largest number to [2^14, 2^15), and its scores by the inverse. Neither rounds. A number of
// the row loses bits only below 2^-24, 2^-38 of the largest: far less than bf16 keeps of the
// largest itself. (Where that power would be above 2^126 this one is taken: bf16 has nothing so
// small to lose.) Products are below 2^15 * 2^16, so that a sum of 256 of them is far from the end
// of fp32.
#pragma once

#include <cstdint>

#include "eight_bits.cuh"
#include "ptx.cuh"

namespace kvplane::cuda {

// Powers of two, the inverses of each other.
struct RowScale {
  float to_halves;
  float back;
};

// `largest`: of the row's magnitudes. Where it is infinite, so are products with it.
__device__ inline RowScale row_scale(float largest) {
  constexpr uint32_t kBias = 127, kLargestExponent = 14;
  const uint32_t exponent = bits_of(largest) >> 23;
  // Up to 2^126, whose inverse is still a normal number.
  const uint32_t up = min_of(2 * kBias + kLargestExponent - exponent, kBias + 126);
  return {float_of(up << 23), float_of((2 * kBias - up) << 23)};
}

__device__ inline float low_bfloat(uint32_t pair) { return float_of(pair << 16); }
__device__ inline float high_bfloat(uint32_t pair) { return float_of(pair & 0xFFFF0000u); }

// Makes fp16 of a row of bf16 that `kLanes` neighbouring lanes share, two numbers a register;
// returns what its scores are to be multiplied by.
template <int kLanes, int kCount>
__device__ float scale_row(uint32_t (&pairs)[kCount]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    largest = fmaxf(largest, fabsf(low_bfloat(pairs[i])));
    largest = fmaxf(largest, fabsf(high_bfloat(pairs[i])));
  }
#pragma unroll
  for (int bits = 1; bits < kLanes; bits *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, bits));
  }
  const RowScale scale = row_scale(largest);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    pairs[i] =
        pack<Half>(low_bfloat(pairs[i]) * scale.to_halves, high_bfloat(pairs[i]) * scale.to_halves);
  }
  return scale.back;
}

}  // namespace kvplane::cuda
