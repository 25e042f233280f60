// Copies with stores that bypass the caches: without them each line of the destination is read
// before it is overwritten. For files of an instruction set, after row_ops_vector.h.
#pragma once

#include <immintrin.h>

#include "row_ops_vector.h"

namespace kvplane {
namespace {

KVPLANE_INLINE void store_past_caches(const char* from, char* to) {
#if KVPLANE_VECTOR_BYTES == 64
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#else
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to),
                      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#endif
}

void stream(char* destination, const char* source, int64_t num_bytes) {
  constexpr int64_t kStep = 256;    // bytes
  constexpr int64_t kAhead = 2048;  // bytes that the prefetch is ahead of the copy
  const int64_t unaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(destination) % 64);
  int64_t at = unaligned == 0 ? 0 : 64 - unaligned;
  if (at > num_bytes) at = num_bytes;
  std::memcpy(destination, source, static_cast<size_t>(at));
  for (; at + kStep <= num_bytes; at += kStep) {
    KVPLANE_UNROLL for (int64_t b = 0; b < kStep; b += 64) {
      __builtin_prefetch(source + at + kAhead + b, 0, 0);
    }
    KVPLANE_UNROLL for (int64_t b = 0; b < kStep; b += KVPLANE_VECTOR_BYTES) {
      store_past_caches(source + at + b, destination + at + b);
    }
  }
  std::memcpy(destination + at, source + at, static_cast<size_t>(num_bytes - at));
  _mm_sfence();
}

}  // namespace
}  // namespace kvplane
