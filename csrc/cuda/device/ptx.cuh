// Every instruction that C++ cannot express: its PTX, and beside it the emulator's implementation.
//
// Layouts of the 16-bit matrix instructions, with g = lane / 4 and t = lane % 4:
//   8 x 8 matrix     row g, columns 2t and 2t + 1, in one register
//   A 16 x 16        registers: rows g, g + 8 at columns 0-7, then the same at columns 8-15
//   B 16 x 8         registers: k = 2t, 2t + 1 of column g, then k + 8
//   C, D 16 x 8      floats: row g at columns 2t, 2t + 1, then row g + 8
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/device/device.h"
#include "kvplane/dtype.h"

namespace kvplane::cuda {

// Numbers in memory.
struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};
// Stored keys and values only. Each is exact in fp16; eight_bits.cuh converts them.
struct E4m3 {
  uint8_t bits;
};
struct E5m2 {
  uint8_t bits;
};

// Two 8-bit numbers, in the low half of `pair`, as two fp16 numbers, on devices that can do it.
template <typename T>
__device__ uint32_t convert_to_halves(uint32_t pair);
#if defined(KVPLANE_EMULATED) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890)
constexpr bool kConvertsToHalves = true;
#else
constexpr bool kConvertsToHalves = false;
#endif

#if defined(KVPLANE_EMULATED)

__device__ inline uint32_t bits_of(float value) { return to_bits(value); }
__device__ inline float float_of(uint32_t bits) { return from_bits(bits); }

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(Half value) { return fp16_to_float(value.bits); }
__device__ inline float to_float(Bfloat value) { return bf16_to_float(value.bits); }

template <typename T>
__device__ T from_float(float value);
template <>
inline float from_float<float>(float value) {
  return value;
}
template <>
inline Half from_float<Half>(float value) {
  return {float_to_fp16(value)};
}
template <>
inline Bfloat from_float<Bfloat>(float value) {
  return {float_to_bf16(value)};
}

// Two numbers in one register, `low` in the low half.
template <typename T>
__device__ uint32_t pack(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}

__device__ inline float exp2_fast(float x) { return std::exp2(x); }
__device__ inline float reciprocal_fast(float x) { return 1.0f / x; }

// Four bytes chosen by the digits of the selector, lowest first: 0 to 3 stand for the bytes of
// `bytes`, 4 for zero.
__device__ inline uint32_t permute_bytes(uint32_t bytes, uint32_t selector) {
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t from = selector >> 4 * i & 7;
    result |= (from < 4 ? bytes >> 8 * from & 0xFFu : 0u) << 8 * i;
  }
  return result;
}

template <>
inline uint32_t convert_to_halves<E4m3>(uint32_t pair) {
  const auto half = [](uint32_t code) {
    return uint32_t{float_to_fp16(e4m3_to_float(static_cast<uint8_t>(code)))};
  };
  return half(pair & 0xFFu) | half(pair >> 8 & 0xFFu) << 16;
}
template <>
inline uint32_t convert_to_halves<E5m2>(uint32_t pair) {
  const auto half = [](uint32_t code) {
    return uint32_t{float_to_fp16(e5m2_to_float(static_cast<uint8_t>(code)))};
  };
  return half(pair & 0xFFu) | half(pair >> 8 & 0xFFu) << 16;
}

// Two fp16 numbers, each multiplied by 256.
__device__ inline uint32_t halves_times_256(uint32_t halves) {
  const auto times_256 = [](uint32_t half) {
    return uint32_t{float_to_fp16(256.0f * fp16_to_float(static_cast<uint16_t>(half)))};
  };
  return times_256(halves & 0xFFFFu) | times_256(halves >> 16) << 16;
}

// Copies 16 bytes from global to shared memory; zeros unless `wanted`. Both addresses are multiples
// of 16.
__device__ inline void copy_async_16(void* shared, const void* global, bool wanted,
                                     EmulatorSite site = EmulatorSite::here()) {
  emulator::copy_async(shared, global, 16, wanted ? 16 : 0, site);
}
__device__ inline void commit_copies() { emulator::commit_copies(); }

// Returns when the kernels before this one in the stream have ended, and their writes are visible:
// at once in a kernel that was not launched to begin early.
__device__ inline void wait_for_kernel_before() { emulator::wait_for_kernel_before(); }
// The next kernel of the stream may begin, if it was launched to begin early, when every block of
// this one has said so or ended.
__device__ inline void let_next_kernel_begin() { emulator::let_next_kernel_begin(); }
template <int kNumGroupsLeft>
__device__ void wait_for_copies() {
  emulator::wait_for_copies(kNumGroupsLeft);
}

struct MatrixRow {
  uint16_t element[8];
};

template <bool kTransposed>
__device__ void load_matrices(uint32_t (&matrices)[4], const void* row, EmulatorSite site) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) emulator::fail("ldmatrix: not aligned", site);
  // Each lane reads its row when it calls: it must see the writes of the other lanes.
  const MatrixRow own = *static_cast<const MatrixRow*>(row);
  const emulator::Combine combine = [](const emulator::Slot* given, unsigned, emulator::Slot* got) {
    MatrixRow rows[32];
    for (int lane = 0; lane < 32; ++lane) rows[lane] = given[lane].as<MatrixRow>();
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      uint32_t registers[4];
      for (int m = 0; m < 4; ++m) {
        const MatrixRow* matrix = rows + 8 * m;
        const uint16_t low = kTransposed ? matrix[2 * t].element[g] : matrix[g].element[2 * t];
        const uint16_t high =
            kTransposed ? matrix[2 * t + 1].element[g] : matrix[g].element[2 * t + 1];
        registers[m] = low | static_cast<uint32_t>(high) << 16;
      }
      std::memcpy(got[lane].bytes, registers, sizeof registers);
    }
  };
  const emulator::Slot got =
      emulator::collective("ldmatrix", emulator::kAllLanes, emulator::Slot::of(own), combine, site);
  std::memcpy(matrices, got.bytes, sizeof matrices);
}

// Four 8 x 8 matrices from shared memory: lane l has the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&matrices)[4], const void* row,
                                     EmulatorSite site = EmulatorSite::here()) {
  load_matrices<false>(matrices, row, site);
}
__device__ inline void load_matrices_transposed(uint32_t (&matrices)[4], const void* row,
                                                EmulatorSite site = EmulatorSite::here()) {
  load_matrices<true>(matrices, row, site);
}

// Transposes an 8 x 8 matrix within the warp.
__device__ inline uint32_t transpose(uint32_t matrix, EmulatorSite site = EmulatorSite::here()) {
  const emulator::Combine combine = [](const emulator::Slot* given, unsigned, emulator::Slot* got) {
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      // Column g of row 2t of the argument is in lane 2t * 4 + g / 2.
      const uint32_t low = given[8 * t + g / 2].as<uint32_t>() >> 16 * (g % 2) & 0xFFFFu;
      const uint32_t high = given[8 * t + 4 + g / 2].as<uint32_t>() >> 16 * (g % 2) & 0xFFFFu;
      got[lane] = emulator::Slot::of(low | high << 16);
    }
  };
  return emulator::collective("movmatrix", emulator::kAllLanes, emulator::Slot::of(matrix), combine,
                              site)
      .as<uint32_t>();
}

// D += A * B with 16-bit factors and fp32 sums.
template <typename T>
__device__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             EmulatorSite site = EmulatorSite::here()) {
  struct Factors {
    uint32_t a[4], b[2];
  };
  struct Sums {
    float d[4];
  };
  const emulator::Combine combine = [](const emulator::Slot* given, unsigned, emulator::Slot* got) {
    float left[16][16], right[8][16], sums[16][8];  // right is transposed
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      const Factors f = given[lane].as<Factors>();
      for (int half = 0; half < 2; ++half) {
        const auto number = [&](uint32_t pair) {
          return to_float(T{static_cast<uint16_t>(pair >> 16 * half)});
        };
        for (int i = 0; i < 4; ++i) {
          left[g + 8 * (i % 2)][2 * t + half + 8 * (i / 2)] = number(f.a[i]);
        }
        for (int i = 0; i < 2; ++i) right[g][2 * t + half + 8 * i] = number(f.b[i]);
      }
    }
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 8; ++column) {
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) sum += left[row][k] * right[column][k];
        sums[row][column] = sum;
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      got[lane] = emulator::Slot::of(
          Sums{{sums[g][2 * t], sums[g][2 * t + 1], sums[g + 8][2 * t], sums[g + 8][2 * t + 1]}});
    }
  };
  const Factors own = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const Sums sums =
      emulator::collective("mma", emulator::kAllLanes, emulator::Slot::of(own), combine, site)
          .template as<Sums>();
  for (int i = 0; i < 4; ++i) d[i] += sums.d[i];
}

#else

__device__ inline uint32_t bits_of(float value) { return __float_as_uint(value); }
__device__ inline float float_of(uint32_t bits) { return __uint_as_float(bits); }

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(Half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}
__device__ inline float to_float(Bfloat value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}

template <typename T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline Half from_float<Half>(float value) {
  Half result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}
template <>
__device__ inline Bfloat from_float<Bfloat>(float value) {
  Bfloat result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}

template <typename T>
__device__ uint32_t pack(float low, float high);
template <>
__device__ inline uint32_t pack<Half>(float low, float high) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
template <>
__device__ inline uint32_t pack<Bfloat>(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

__device__ inline float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ inline float reciprocal_fast(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ inline uint32_t permute_bytes(uint32_t bytes, uint32_t selector) {
  return __byte_perm(bytes, 0, selector);
}

__device__ inline uint32_t halves_times_256(uint32_t halves) {
  uint32_t result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(halves), "r"(0x5C005C00u));
  return result;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
template <>
__device__ inline uint32_t convert_to_halves<E4m3>(uint32_t pair) {
  uint32_t result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(static_cast<uint16_t>(pair)));
  return result;
}
template <>
__device__ inline uint32_t convert_to_halves<E5m2>(uint32_t pair) {
  uint32_t result;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(result) : "h"(static_cast<uint16_t>(pair)));
  return result;
}
#endif

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void copy_async_16(void* shared, const void* global, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(shared)), "l"(global), "r"(wanted ? 16 : 0)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ inline void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
template <int kNumGroupsLeft>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kNumGroupsLeft) : "memory");
}

__device__ inline void load_matrices(uint32_t (&matrices)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&matrices)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ inline uint32_t transpose(uint32_t matrix) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

template <typename T>
__device__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
__device__ inline void multiply_add<Half>(float (&d)[4], const uint32_t (&a)[4],
                                          const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ inline void multiply_add<Bfloat>(float (&d)[4], const uint32_t (&a)[4],
                                            const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif

}  // namespace kvplane::cuda
