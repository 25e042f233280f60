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
#include <type_traits>

#include "eight_bits.cuh"
#include "ptx.cuh"

namespace kvplane::cuda {

// Whether a row has to be scaled, to be multiplied as numbers of type Factor.
template <typename Query, typename Factor>
constexpr bool kScalesRows = !std::is_same_v<Query, Factor>;

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

__device__ inline float larger_of(float largest, uint32_t pair) {
  return fmaxf(largest, fmaxf(fabsf(low_bfloat(pair)), fabsf(high_bfloat(pair))));
}

__device__ inline uint32_t bfloats_to_halves(uint32_t pair, RowScale scale) {
  return pack<Half>(low_bfloat(pair) * scale.to_halves, high_bfloat(pair) * scale.to_halves);
}

}  // namespace kvplane::cuda
