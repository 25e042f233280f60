// Turns sums over columns into weights for several rows at once, so that operations that are done
// once per row fill whole registers. For files of an instruction set, after row_ops_vector.h.
#pragma once

#include <immintrin.h>

#include "row_ops_vector.h"

namespace kvplane {
namespace {

#if KVPLANE_VECTOR_BYTES == 64
// a > b ? a : b, in each lane.
KVPLANE_INLINE Vector larger(Vector a, Vector b) {
  return (Vector)_mm512_max_ps((__m512)a, (__m512)b);
}

// The totals of kWidth vectors, in order.
KVPLANE_INLINE Vector totals_in_order(const Vector* vectors) {
  const auto vector = [&](int64_t i)
                          __attribute__((always_inline)) { return PerRow<1>{{vectors[i]}}; };
  return totals<kWidth, 1>(0, vector).row[0];
}
#else
KVPLANE_INLINE Vector larger(Vector a, Vector b) {
  return (Vector)_mm256_max_ps((__m256)a, (__m256)b);
}

// The halves of a and b, exchanged so that adding the two gives the sums of a's halves and, after
// them, of b's.
KVPLANE_INLINE Vector add_halves_of_registers(Vector a, Vector b) {
  const __m256 inner = _mm256_permute2f128_ps((__m256)a, (__m256)b, 0x21);
  return (Vector)_mm256_add_ps(_mm256_blend_ps((__m256)a, (__m256)b, 0xF0), inner);
}

// Within each half of a register: the even pairs (numbers) of a and then b, plus the odd ones.
template <int kEven, int kOdd>
KVPLANE_INLINE Vector add_shuffled(Vector a, Vector b) {
  return (Vector)_mm256_add_ps(_mm256_shuffle_ps((__m256)a, (__m256)b, kEven),
                               _mm256_shuffle_ps((__m256)a, (__m256)b, kOdd));
}

// The totals of kWidth vectors, in order: the additions of totals(), but vectors 4 apart share a
// register at first, which leaves each total where it belongs.
KVPLANE_INLINE Vector totals_in_order(const Vector* vectors) {
  Vector halves[4], quarters[2];
  KVPLANE_UNROLL for (int i = 0; i < 2; ++i) {
    KVPLANE_UNROLL for (int j = 2 * i; j < 2 * i + 2; ++j) {
      halves[j] = add_halves_of_registers(vectors[j], vectors[j + 4]);
    }
    quarters[i] = add_shuffled<0x44, 0xEE>(halves[2 * i], halves[2 * i + 1]);
  }
  return add_shuffled<0x88, 0xDD>(quarters[0], quarters[1]);
}
#endif

// For each group of kWidth / kRows lanes, the largest number of one row, in all of them.
template <int kRows>
KVPLANE_INLINE Vector largest_of(const Vector* rows) {
  constexpr int kGroup = kWidth / kRows;
  Vector all = rows[0];
  if constexpr (kRows > 1) {
    float largest[kRows];
    KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) largest[r] = largest_of<1>(rows + r)[0];
    KVPLANE_UNROLL for (int i = 0; i < kWidth; ++i) all[i] = largest[i / kGroup];
  } else {
    KVPLANE_UNROLL for (int half = kWidth / 2; half > 0; half /= 2) {
      IntVector other;
      KVPLANE_UNROLL for (int i = 0; i < kWidth; ++i) other[i] = i ^ half;
      all = larger(all, __builtin_shuffle(all, other));
    }
  }
  return all;
}

#if KVPLANE_VECTOR_BYTES == 32
template <>
KVPLANE_INLINE Vector largest_of<4>(const Vector* rows) {
  const auto halves = [](Vector a, Vector b) {
    const Vector inner = (Vector)_mm256_permute2f128_ps((__m256)a, (__m256)b, 0x21);
    return larger((Vector)_mm256_blend_ps((__m256)a, (__m256)b, 0xF0), inner);
  };
  const __m256 a = (__m256)halves(rows[0], rows[2]), b = (__m256)halves(rows[1], rows[3]);
  const Vector quarters =
      larger((Vector)_mm256_shuffle_ps(a, b, 0x44), (Vector)_mm256_shuffle_ps(a, b, 0xEE));
  return larger(quarters, (Vector)_mm256_permute_ps((__m256)quarters, 0xB1));
}
#endif

// Turns the dot products of kRows rows, 1, 2 or 4, into weights times `factor`, which is that of
// the scores too; leaves the factors of the sums so far in `corrections`. The same as weigh() for
// each row.
template <int kRows>
KVPLANE_INLINE void weigh_rows(const Row* rows, float scale, float soft_cap, float factor,
                               float (*weights)[kTileTokens], float* corrections) {
  constexpr int kParts = kTileTokens / kWidth, kGroup = kWidth / kRows;
  const Vector none = Vector{} - kInfinity, one = Vector{} + 1.0f;
  scale *= factor;
  if (soft_cap > 0.0f) {
    for (int r = 0; r < kRows; ++r) cap_scores(scale, soft_cap, weights[r]);
    scale = 1.0f;
  }
  Vector best[kRows], before;
  KVPLANE_UNROLL for (int i = 0; i < kWidth; ++i) before[i] = rows[i / kGroup].state->max;
  KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
    const Row& row = rows[r];
    best[r] = none;
    if (row.begin == 0 && row.end == kTileTokens && row.slope == 0.0f) {
      KVPLANE_UNROLL for (int i = 0; i < kParts; ++i) {
        const Vector score = load_vector(weights[r] + i * kWidth) * scale;
        store_vector(score, weights[r] + i * kWidth);
        best[r] = larger(score, best[r]);
      }
      continue;
    }
    const Vector begin = Vector{} + static_cast<float>(row.begin);
    const Vector end = Vector{} + static_cast<float>(row.end);
    for (int i = 0; i < kParts; ++i) {
      const Vector token = load_vector(kTokens + i * kWidth);
      const Vector distance = token - static_cast<float>(row.position);
      Vector score = load_vector(weights[r] + i * kWidth) * scale + distance * row.slope;
      score = token >= begin ? score : none;
      score = token < end ? score : none;
      store_vector(score, weights[r] + i * kWidth);
      best[r] = larger(score, best[r]);
    }
  }
  alignas(64) float max[kWidth], factors[kWidth];
  const Vector after = larger(largest_of<kRows>(best), before);
  store_vector(after, max);
  store_vector(before == after ? one : exp_of(before - after), factors);
  for (int r = 0; r < kRows; ++r) {
    RowState& state = *rows[r].state;
    const Vector row_max = Vector{} + max[r * kGroup];
    const float correction = factors[r * kGroup];
    Vector sums[kVectors];
    KVPLANE_UNROLL for (int v = 0; v < kVectors; ++v) {
      sums[v] = load_vector(state.sum + v * kWidth) * correction;
    }
    KVPLANE_UNROLL for (int i = 0; i < kParts; ++i) {
      const Vector weight = exp_of(load_vector(weights[r] + i * kWidth) - row_max);
      store_vector(weight * factor, weights[r] + i * kWidth);
      sums[i % kVectors] += weight;
    }
    KVPLANE_UNROLL for (int v = 0; v < kVectors; ++v) {
      store_vector(sums[v], state.sum + v * kWidth);
    }
    state.max = max[r * kGroup];
    corrections[r] = correction;
  }
}

}  // namespace
}  // namespace kvplane
