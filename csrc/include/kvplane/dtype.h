// Element types, and their conversions to and from fp32.
//
// Conversions are branch-free integer and fp32 arithmetic, so that a compiler can vectorise loops
// over them for any instruction set; they round to nearest even, as the hardware does. They are
// static, because files that include them are compiled for different instruction sets.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvplane {

// Only stored keys and values have the 8-bit types.
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

// From an 8-bit type. Its exponent bias is `bias` below that of fp32. Codes from `nan` on are NaNs,
// or an infinity and then NaNs: their exponent becomes all ones.
static inline float from_8_bits(uint8_t code, int mantissa_bits, uint32_t bias, uint32_t nan) {
  const uint32_t sign = (code & 0x80u) << 24;
  const uint32_t w = (code & 0x7Fu) << (23 - mantissa_bits);
  const uint32_t smallest = (bias + 1) << 23;  // normal number
  const float subnormal = from_bits(w + smallest) - from_bits(smallest);
  const uint32_t finite = w < (1u << 23) ? to_bits(subnormal) : w + (bias << 23);
  return from_bits(sign | ((code & 0x7Fu) < nan ? finite : w | 0x7F800000u));
}

// To an 8-bit type. Saturates at `largest`, also for infinities; every NaN becomes 0x7F.
static inline uint8_t to_8_bits(float value, int mantissa_bits, uint32_t bias, float largest) {
  const uint32_t bits = to_bits(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t w = magnitude < to_bits(largest) ? magnitude : to_bits(largest);
  const int shift = 23 - mantissa_bits;
  const uint32_t rounded = (w + (1u << (shift - 1)) - 1u + ((w >> shift) & 1u)) >> shift;
  // The last bit of this number is the smallest subnormal: adding it rounds to that.
  const uint32_t large = (bias + 1 + static_cast<uint32_t>(shift)) << 23;
  const uint32_t subnormal = to_bits(from_bits(w) + from_bits(large)) - large;
  const bool is_normal = w >= (bias + 1) << 23;
  const uint32_t code = is_normal ? rounded - (bias << mantissa_bits) : subnormal;
  const bool is_nan = magnitude > 0x7F800000u;
  return static_cast<uint8_t>(is_nan ? 0x7Fu : ((bits >> 24) & 0x80u) | code);
}

static inline float e4m3_to_float(uint8_t code) { return from_8_bits(code, 3, 120, 0x7F); }
static inline uint8_t float_to_e4m3(float value) { return to_8_bits(value, 3, 120, 448.0f); }
static inline float e5m2_to_float(uint8_t code) { return from_8_bits(code, 2, 112, 0x7C); }
static inline uint8_t float_to_e5m2(float value) { return to_8_bits(value, 2, 112, 57344.0f); }

}  // namespace kvplane
