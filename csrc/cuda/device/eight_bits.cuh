// Conversions of 8-bit numbers.
//
// To fp16, in which every one of them is exact: one instruction for two numbers in machine code for
// sm_89 and later, arithmetic in older code. A default build has code for sm_80, which sm_89 runs
// too, and for sm_90. Tests run both. From fp32: arithmetic everywhere.
#pragma once

#include <cstdint>

#include "cuda/device/ptx.cuh"

namespace kvplane::cuda {

// Each number is in the upper byte of its half; the lower byte is zero.
template <typename T>
__device__ uint32_t compute_halves(uint32_t upper_bytes);
// An E5M2 number is the upper half of an fp16 number.
template <>
__device__ inline uint32_t compute_halves<E5m2>(uint32_t upper_bytes) {
  return upper_bytes;
}
// E4M3 has one bit of exponent less than fp16 and a bias smaller by 8:
//
//   s eeee mmm        shifted by one, times 2^8, which is right for subnormals too
//   s 0eeee mmm0...   NaN (s 1111 111) becomes 480, whose exponent is all ones except for 0x2000
template <>
__device__ inline uint32_t compute_halves<E4m3>(uint32_t upper_bytes) {
  const uint32_t magnitudes = upper_bytes & 0x7F007F00u;
  const uint32_t shifted = (upper_bytes & 0x80008000u) | magnitudes >> 1;
  return halves_times_256(shifted) | ((magnitudes + 0x01000100u) >> 2 & 0x20002000u);
}

// Bytes 0 and 1 of four 8-bit numbers as two fp16 numbers, and bytes 2 and 3.
template <typename T, bool kConverts = kConvertsToHalves>
__device__ void widen_pairs(uint32_t four, uint32_t& low, uint32_t& high) {
  if constexpr (kConverts) {
    low = convert_to_halves<T>(four);
    high = convert_to_halves<T>(four >> 16);
  } else {
    low = compute_halves<T>(permute_bytes(four, 0x1404));
    high = compute_halves<T>(permute_bytes(four, 0x3424));
  }
}

// Bytes 0 and 2 of four 8-bit numbers as two fp16 numbers, and bytes 1 and 3.
template <typename T, bool kConverts = kConvertsToHalves>
__device__ void widen_every_second(uint32_t four, uint32_t& even, uint32_t& odd) {
  if constexpr (kConverts) {
    widen_pairs<T, true>(permute_bytes(four, 0x3120), even, odd);
  } else {
    even = compute_halves<T>(permute_bytes(four, 0x2404));
    odd = compute_halves<T>(permute_bytes(four, 0x3414));
  }
}

template <typename T>
__device__ float widen(uint8_t bits) {
  uint32_t low, high;
  widen_pairs<T>(bits, low, high);
  return to_float(Half{static_cast<uint16_t>(low)});
}
__device__ inline float to_float(E4m3 value) { return widen<E4m3>(value.bits); }
__device__ inline float to_float(E5m2 value) { return widen<E5m2>(value.bits); }

// Rounds to nearest even. Larger magnitudes than `largest`, infinity too, become `largest`; NaN
// becomes 0x7F.
template <int kMantissaBits, int kBias>
__device__ uint8_t round_to_8_bits(float value, float largest) {
  constexpr int kDropped = 23 - kMantissaBits;
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - kBias) << 23;
  const uint32_t bits = bits_of(value);
  const uint32_t sign = bits >> 24 & 0x80u;
  const uint32_t magnitude = min_of(bits & 0x7FFFFFFFu, bits_of(largest));
  // One bit of this number's mantissa is worth as much as one of a subnormal result.
  const float shift = float_of(kSmallestNormal + (static_cast<uint32_t>(kDropped) << 23));
  const uint32_t subnormal = bits_of(float_of(magnitude) + shift) - bits_of(shift);
  const uint32_t tie_to_even = (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1u);
  const uint32_t normal =
      (magnitude + tie_to_even >> kDropped) - (static_cast<uint32_t>(127 - kBias) << kMantissaBits);
  const uint32_t rounded = magnitude < kSmallestNormal ? subnormal : normal;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<uint8_t>(is_nan ? 0x7Fu : sign | rounded);
}

template <>
__device__ inline E4m3 from_float<E4m3>(float value) {
  return {round_to_8_bits<3, 7>(value, 448.0f)};
}
template <>
__device__ inline E5m2 from_float<E5m2>(float value) {
  return {round_to_8_bits<2, 15>(value, 57344.0f)};
}

}  // namespace kvplane::cuda
