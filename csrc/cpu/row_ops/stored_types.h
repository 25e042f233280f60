// The types of stored keys and values, and how their bits become registers of fp32. For files of an
// instruction set, after row_ops_vector.h.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "row_ops_vector.h"

namespace kvplane {
namespace {

constexpr int64_t kUnitColumns = 2 * kWidth;

typedef int16_t Shorts __attribute__((vector_size(KVPLANE_VECTOR_BYTES / 2)));
typedef int16_t TwoShorts __attribute__((vector_size(KVPLANE_VECTOR_BYTES)));
typedef uint8_t ByteVector __attribute__((vector_size(KVPLANE_VECTOR_BYTES)));

#if KVPLANE_VECTOR_BYTES == 64
KVPLANE_INLINE Vector fused(Vector a, Vector b, Vector c) {
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
KVPLANE_INLINE void add_product(Vector a, Vector b, Vector* sum) { *sum = fused(a, b, *sum); }
KVPLANE_INLINE Vector all_lanes(float x) { return (Vector)_mm512_set1_ps(x); }
KVPLANE_INLINE Vector from_fp16(Shorts bits) { return (Vector)_mm512_cvtph_ps((__m256i)bits); }
KVPLANE_INLINE ByteVector larger(ByteVector a, ByteVector b) {
  return (ByteVector)_mm512_max_epu8((__m512i)a, (__m512i)b);
}
#else
KVPLANE_INLINE Vector fused(Vector a, Vector b, Vector c) {
  return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
// *sum = fused(a, b, *sum), where the sum is: a compiler that picks another register for the result
// runs out of 16.
KVPLANE_INLINE void add_product(Vector a, Vector b, Vector* sum) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(*sum) : "x"(a), "x"(b));
}
KVPLANE_INLINE Vector all_lanes(float x) { return (Vector)_mm256_set1_ps(x); }
KVPLANE_INLINE Vector from_fp16(Shorts bits) { return (Vector)_mm256_cvtph_ps((__m128i)bits); }
KVPLANE_INLINE ByteVector larger(ByteVector a, ByteVector b) {
  return (ByteVector)_mm256_max_epu8((__m256i)a, (__m256i)b);
}
#endif

// Keeps a loaded vector in a register: a compiler would load it again for each of its uses, and the
// load ports would be the limit.
template <typename T>
KVPLANE_INLINE T hold(T x) {
  asm("" : "+v"(x));
  return x;
}

template <typename T>
KVPLANE_INLINE T load_as(const char* from) {
  T vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// Whether some codes of e4m3 are a NaN: without its sign it is the largest of all.
class NanCodes {
 public:
  KVPLANE_INLINE void add(ByteVector codes) { largest_ = larger(largest_, codes | uint8_t{0x80}); }
  KVPLANE_INLINE bool found() const {
    uint64_t words[KVPLANE_VECTOR_BYTES / 8], any = 0;
    const auto is_nan = largest_ == uint8_t{0xFF};
    std::memcpy(words, &is_nan, sizeof words);
    for (const uint64_t word : words) any |= word;
    return any != 0;
  }

 private:
  ByteVector largest_ = {};
};

// For types whose NaNs need no special treatment.
struct NoNanCodes {
  KVPLANE_INLINE void add(ByteVector) {}
  KVPLANE_INLINE bool found() const { return false; }
};

bool have_nan(const char* const* rows, int64_t size) {
  constexpr int64_t kBytes = KVPLANE_VECTOR_BYTES;
  if (size < kBytes) return true;  // maybe
  NanCodes even, odd;              // two chains of maxima
  for (int64_t d = 0; d < size; d += kBytes) {
    const int64_t at = d + kBytes <= size ? d : size - kBytes;
    for (int64_t t = 0; t < kTileTokens; t += 2) {
      even.add(load_as<ByteVector>(rows[t] + at));
      odd.add(load_as<ByteVector>(rows[t + 1] + at));
    }
  }
  return even.found() || odd.found();
}

// The stored types: load(row, u, ...) gives unit u of a row, and load_half() one of its registers,
// for where few are left. Slow: the same for rows of which may_have_nan() is true, or in which
// Codes found one.
template <typename Source>
struct Plain {
  using Slow = Source;
  using Codes = NoNanCodes;
  static KVPLANE_INLINE bool may_have_nan(const char* const*, int64_t) { return false; }
  // Units u and u + 1.
  static KVPLANE_INLINE void load_two(const char* row, int64_t u, Vector* four) {
    Source::load(row, u, four, four + 1);
    Source::load(row, u + 1, four + 2, four + 3);
  }
};

// Returns the same address under another name, so that a compiler reads from it again.
KVPLANE_INLINE const char* reread(const char* address) {
  asm("" : "+r"(address));
  return address;
}

struct StoredBf16 : Plain<StoredBf16> {
  static constexpr int kBytes = 2;
  static KVPLANE_INLINE void load(const char* row, int64_t u, Vector* first, Vector* second) {
    const IntVector bits = hold(load_as<IntVector>(row + u * KVPLANE_VECTOR_BYTES));
    *first = (Vector)(bits << 16);
    *second = (Vector)(bits & static_cast<int32_t>(0xFFFF0000));
  }
  static KVPLANE_INLINE Vector load_half(const char* row, int64_t u, int half) {
    const IntVector bits = load_as<IntVector>(reread(row) + u * KVPLANE_VECTOR_BYTES);
    return hold((Vector)(half == 0 ? bits << 16 : bits & static_cast<int32_t>(0xFFFF0000)));
  }
};

struct StoredFp16 : Plain<StoredFp16> {
  static constexpr int kBytes = 2;
  static KVPLANE_INLINE void load(const char* row, int64_t u, Vector* first, Vector* second) {
    const char* at = row + u * KVPLANE_VECTOR_BYTES;
    *first = from_fp16(load_as<Shorts>(at));
    *second = from_fp16(load_as<Shorts>(at + sizeof(Shorts)));
  }
  static KVPLANE_INLINE Vector load_half(const char* row, int64_t u, int half) {
    const int64_t at = u * KVPLANE_VECTOR_BYTES + half * static_cast<int64_t>(sizeof(Shorts));
    return hold(from_fp16(load_as<Shorts>(row + at)));
  }
};

struct StoredE5m2 : Plain<StoredE5m2> {
  static constexpr int kBytes = 1;
  static KVPLANE_INLINE void load(const char* row, int64_t u, Vector* first, Vector* second) {
    const Shorts codes = hold(load_as<Shorts>(row + u * static_cast<int64_t>(sizeof(Shorts))));
    *first = from_fp16(codes << 8);
    *second = from_fp16(codes & static_cast<int16_t>(0xFF00));
  }
  static KVPLANE_INLINE Vector load_half(const char* row, int64_t u, int half) {
    const Shorts codes = load_as<Shorts>(row + u * static_cast<int64_t>(sizeof(Shorts)));
    return hold(from_fp16(half == 0 ? codes << 8 : codes & static_cast<int16_t>(0xFF00)));
  }
};

// kNan: codes of NaN are looked for; without it they are 480.
template <bool kNan>
struct StoredE4m3 {
  using Slow = StoredE4m3<true>;
  using Codes = std::conditional_t<kNan, NoNanCodes, NanCodes>;
  static constexpr int kBytes = 1;
  static KVPLANE_INLINE bool may_have_nan(const char* const* rows, int64_t size) {
    return have_nan(rows, size);
  }
  static KVPLANE_INLINE void load(const char* row, int64_t u, Vector* first, Vector* second) {
    const Shorts codes = hold(load_as<Shorts>(row + u * static_cast<int64_t>(sizeof(Shorts))));
    *first = from_fp16(widened(codes << 8));
    *second = from_fp16(widened(codes));
  }
  static KVPLANE_INLINE Vector load_half(const char* row, int64_t u, int half) {
    const Shorts codes = load_as<Shorts>(row + u * static_cast<int64_t>(sizeof(Shorts)));
    return hold(from_fp16(widened(half == 0 ? codes << 8 : codes)));
  }

  // With AVX2 the two take half the shifts and masks: a register has room for the codes of both.
  static KVPLANE_INLINE void load_two(const char* row, int64_t u, Vector* four) {
#if KVPLANE_VECTOR_BYTES == 64
    load(row, u, four, four + 1);
    load(row, u + 1, four + 2, four + 3);
#else
    const TwoShorts codes =
        hold(load_as<TwoShorts>(row + u * static_cast<int64_t>(sizeof(Shorts))));
    const __m256i first = (__m256i)widened(codes << 8), second = (__m256i)widened(codes);
    four[0] = from_fp16((Shorts)_mm256_castsi256_si128(first));
    four[1] = from_fp16((Shorts)_mm256_castsi256_si128(second));
    four[2] = from_fp16((Shorts)_mm256_extracti128_si256(first, 1));
    four[3] = from_fp16((Shorts)_mm256_extracti128_si256(second, 1));
#endif
  }

  // From the upper bytes. All ones, a NaN, where the code is one.
  template <typename Codes>
  static KVPLANE_INLINE Codes widened(Codes codes) {
    const Codes number = (codes >> 1) & static_cast<int16_t>(0xBF80);
    if constexpr (!kNan) return number;
    const Codes nan = Codes{} + int16_t{0x7F00};
    return number | (Codes)((codes & nan) == nan);
  }
};

// The result of `convert_tile`: the two registers of each unit.
struct StoredFloats {
  static constexpr int kBytes = 4;
  static KVPLANE_INLINE void load(const char* row, int64_t u, Vector* first, Vector* second) {
    const float* at = reinterpret_cast<const float*>(row) + u * kUnitColumns;
    *first = hold(load_vector(at));
    *second = hold(load_vector(at + kWidth));
  }
  static KVPLANE_INLINE Vector load_half(const char* row, int64_t u, int half) {
    return hold(
        load_vector(reinterpret_cast<const float*>(row) + u * kUnitColumns + half * kWidth));
  }
};

}  // namespace
}  // namespace kvplane
