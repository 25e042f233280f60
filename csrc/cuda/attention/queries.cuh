// Queries for 8-bit keys on the tensor cores: as fp16, in which every key is exact.
//
// fp16 queries are used as they are. A row of bf16 is first multiplied by the power of two that
// brings its largest number to [2^14, 2^15), and its scores by the inverse. Neither rounds. A
// number of the row loses only bits below 2^-24, which is 2^-38 of the largest: far less than the
// precision of the largest itself in bf16. (The power is at most 2^126, which loses nothing: even
// the smallest bf16 number is then far above 2^-24.) Products are below 2^15 * 2^16, so a sum of
// 256 of them is far from the largest fp32 number.
#pragma once

#include <cstdint>

#include "cuda/device/eight_bits.cuh"
#include "cuda/device/ptx.cuh"

namespace kvplane::cuda {

// Powers of two, the inverses of each other.
struct RowScale {
  float to_halves;
  float back;
};

// `largest`: the largest magnitude of the row. If it is infinite, so are products with it.
__device__ inline RowScale row_scale(float largest) {
  constexpr uint32_t kBias = 127, kLargestExponent = 14;
  const uint32_t exponent = bits_of(largest) >> 23;
  // At most 2^126, whose inverse is still a normal number.
  const uint32_t up = min_of(2 * kBias + kLargestExponent - exponent, kBias + 126);
  return {float_of(up << 23), float_of((2 * kBias - up) << 23)};
}

__device__ inline float low_bfloat(uint32_t pair) { return float_of(pair << 16); }
__device__ inline float high_bfloat(uint32_t pair) { return float_of(pair & 0xFFFF0000u); }

// Converts to fp16 a row of bf16 that `kLanes` neighbouring lanes share, two numbers in each
// register. Returns the factor for the row's scores.
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
