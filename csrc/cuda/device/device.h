// The interface that the kernels use: CUDA, or the emulator where KVPLANE_EMULATED is defined.
#pragma once

#if defined(KVPLANE_EMULATED)
#include "emulator.h"
#else
#include <cuda_runtime.h>
#endif

// A block's dynamic shared memory as an array of T; a kernel may use only one such name.
#if defined(KVPLANE_EMULATED)
#define KVPLANE_DYNAMIC_SHARED(T, name) \
  T* const name = reinterpret_cast<T*>(::kvplane::emulator::dynamic_shared())
#else
#define KVPLANE_DYNAMIC_SHARED(T, name)                                    \
  extern __shared__ __align__(128) unsigned char kvplane_dynamic_shared[]; \
  T* const name = reinterpret_cast<T*>(kvplane_dynamic_shared)
#endif

namespace kvplane::cuda {

constexpr int kLanesOfWarp = 32;
constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

template <typename T>
__host__ __device__ constexpr T div_ceil(T a, T b) {
  return (a + b - 1) / b;
}

template <typename T>
__host__ __device__ constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}

template <typename T>
__host__ __device__ constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}

}  // namespace kvplane::cuda
