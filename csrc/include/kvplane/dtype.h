// Element types, and their conversions to and from fp32.
//
// Conversions are branch-free integer and fp32 arithmetic, so that a compiler can vectorise loops
// over them for any instruction set; they round to nearest even, as the hardware's do. They are
// static, because files that include them are compiled for different instruction sets.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvplane {

// The 8-bit types are of keys and values as stored, and of nothing else.
enum class Dtype : int {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kFloat8E4M3 = 3,  // no infinity; NaN is 0x7F; up to 448
  kFloat8E5M2 = 4,  // the upper half of an fp16; up to 57344
};

static inline bool is_8_bit(Dtype dtype) {
  return dtype == Dtype::kFloat8E4M3 || dtype == Dtype::kFloat8E5M2;
}

static inline int64_t dtype_bytes(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 4 : is_8_bit(dtype) ? 1 : 2;
}

static inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float bf16_to_float(uint16_t bits) {
  return from_bits(static_cast<uint32_t>(bits) << 16);
}

static inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded);
}

// After M. Dukhan's FP16 library (MIT): the exponent is moved by a multiplication, which also
// keeps infinities and NaNs; subnormals come from a subtraction that normalises them.
static inline float fp16_to_float(uint16_t bits) {
  const uint32_t w = static_cast<uint32_t>(bits) << 16;
  const uint32_t sign = w & 0x80000000u;
  const uint32_t two_w = w + w;
  const float normal = from_bits((two_w >> 4) + (0xE0u << 23)) * from_bits(0x07800000u);  // 2^-112
  const float subnormal = from_bits((two_w >> 17) | (126u << 23)) - 0.5f;
  return from_bits(sign | (two_w < (1u << 27) ? to_bits(subnormal) : to_bits(normal)));
}

static inline uint16_t float_to_fp16(float value) {
  const uint32_t w = to_bits(value);
  const uint32_t two_w = w + w;
  const uint32_t sign = w & 0x80000000u;
  const float magnitude = from_bits(w & 0x7FFFFFFFu);
  // 2^112 sends too large values to infinity, 2^-110 brings the others back, times four.
  const float scaled = (magnitude * from_bits(0x77800000u)) * from_bits(0x08800000u);
  const uint32_t exponent = two_w & 0xFF000000u;
  const uint32_t bias = exponent < 0x71000000u ? 0x71000000u : exponent;
  // Adding the bias leaves the rounded mantissa in the low bits.
  const uint32_t rounded = to_bits(from_bits((bias >> 1) + 0x07800000u) + scaled);
  const uint32_t magnitude_bits = ((rounded >> 13) & 0x7C00u) + (rounded & 0x0FFFu);
  return static_cast<uint16_t>((sign >> 16) | (two_w > 0xFF000000u ? 0x7E00u : magnitude_bits));
}

}  // namespace kvplane
