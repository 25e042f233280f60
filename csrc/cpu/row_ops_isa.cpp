// The row operations for one instruction set: KVPLANE_ISA names it, KVPLANE_VECTOR_BYTES is the
// width of its registers. Only headers without shared inline functions may be included here, or the
// linker could keep a copy that other machines can not run.

#include <cstdint>
#include <cstring>

#include "row_ops.h"

namespace kvplane {
namespace {

constexpr int kWidth = KVPLANE_VECTOR_BYTES / 4;
constexpr int kVectors = kLanes / kWidth;
constexpr int kScoreTokens = 4;  // keys that share one reading of the query
constexpr int kColumns = 4;      // groups of lanes of the output kept in registers

typedef float Vector __attribute__((vector_size(KVPLANE_VECTOR_BYTES)));
typedef uint32_t IntVector __attribute__((vector_size(KVPLANE_VECTOR_BYTES)));

#define KVPLANE_INLINE inline __attribute__((always_inline))
#define KVPLANE_EACH_VECTOR _Pragma("GCC unroll 8") for (int v = 0; v < kVectors; ++v)

// kLanes floats, in as many registers as they take.
struct Lanes {
  Vector part[kVectors];
};

KVPLANE_INLINE Lanes load_lanes(const float* from) {
  Lanes lanes;
  KVPLANE_EACH_VECTOR { std::memcpy(&lanes.part[v], from + v * kWidth, sizeof(Vector)); }
  return lanes;
}

KVPLANE_INLINE void store_lanes(const Lanes& lanes, float* to) {
  KVPLANE_EACH_VECTOR { std::memcpy(to + v * kWidth, &lanes.part[v], sizeof(Vector)); }
}

// Halves are added until one lane is left: the order does not depend on the width.
KVPLANE_INLINE float sum_of(const float* lanes) {
  float half[kLanes / 2];
  for (int i = 0; i < 8; ++i) half[i] = lanes[i] + lanes[i + 8];
  for (int i = 0; i < 4; ++i) half[i] = half[i] + half[i + 4];
  for (int i = 0; i < 2; ++i) half[i] = half[i] + half[i + 2];
  return half[0] + half[1];
}

// exp(x) for x <= 0, within 2 units in the last place; 0 below -87, where results turn subnormal;
// NaN stays NaN. Cody and Waite's reduction by ln 2 in two parts, then a polynomial of degree 6
// (coefficients of Cephes expf).
KVPLANE_INLINE Vector exp_of(Vector x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vector zero = {};
  const Vector shifted = x * 1.44269504088896341f + kRound;
  const Vector n = shifted - kRound;
  const Vector r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vector poly = r * 1.9875691500e-4f + 1.3981999507e-3f;
  poly = poly * r + 8.3334519073e-3f;
  poly = poly * r + 4.1665795894e-2f;
  poly = poly * r + 1.6666665459e-1f;
  poly = poly * r + 5.0000001201e-1f;
  poly = poly * (r * r) + r + 1.0f;
  const IntVector exponent = ((IntVector)shifted << 23) + 0x3F800000;  // low bits of shifted are n
  const Vector result = poly * (Vector)exponent;
  return x < zero - 87.0f ? zero : result;
}

void load(const void* source, Dtype dtype, int64_t count, float* __restrict row) {
  if (dtype == Dtype::kFloat32) {
    std::memcpy(row, source, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const uint16_t* __restrict bits = static_cast<const uint16_t*>(source);
  if (dtype == Dtype::kFloat16) {
    for (int64_t i = 0; i < count; ++i) row[i] = fp16_to_float(bits[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) row[i] = bf16_to_float(bits[i]);
  }
}

void store(const float* __restrict row, int64_t count, Dtype dtype, void* destination) {
  if (dtype == Dtype::kFloat32) {
    std::memcpy(destination, row, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  uint16_t* __restrict bits = static_cast<uint16_t*>(destination);
  if (dtype == Dtype::kFloat16) {
    for (int64_t i = 0; i < count; ++i) bits[i] = float_to_fp16(row[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) bits[i] = float_to_bf16(row[i]);
  }
}

// dots[t] = query . key[t] for all kTileTokens; those outside [begin, end) mean nothing.
KVPLANE_INLINE void dot_products(const float* query, const TileView& tile, float* dots) {
  const int64_t first = tile.begin / kScoreTokens * kScoreTokens;
  for (int64_t t = first; t < tile.end; t += kScoreTokens) {
    Lanes sums[kScoreTokens] = {};
    for (int64_t d = 0; d < tile.row_size; d += kLanes) {
      const Lanes q = load_lanes(query + d);
#pragma GCC unroll 4
      for (int i = 0; i < kScoreTokens; ++i) {
        const Lanes k = load_lanes(tile.key + (t + i) * tile.row_size + d);
        KVPLANE_EACH_VECTOR { sums[i].part[v] = sums[i].part[v] + q.part[v] * k.part[v]; }
      }
    }
    for (int i = 0; i < kScoreTokens; ++i) {
      float lanes[kLanes];
      store_lanes(sums[i], lanes);
      dots[t + i] = sum_of(lanes);
    }
  }
}

// out = out * correction + sum over t of weights[t] * value[t], for kGroups groups of lanes.
template <int kGroups>
KVPLANE_INLINE void add_values(const float* weights, const TileView& tile, float correction,
                               int64_t column, float* out) {
  Lanes sums[kGroups];
#pragma GCC unroll 4
  for (int c = 0; c < kGroups; ++c) {
    sums[c] = load_lanes(out + column + c * kLanes);
    KVPLANE_EACH_VECTOR { sums[c].part[v] = sums[c].part[v] * correction; }
  }
  for (int64_t t = tile.begin; t < tile.end; ++t) {
    const float weight = weights[t];
#pragma GCC unroll 4
    for (int c = 0; c < kGroups; ++c) {
      const Lanes x = load_lanes(tile.value + t * tile.row_size + column + c * kLanes);
      KVPLANE_EACH_VECTOR { sums[c].part[v] = sums[c].part[v] + x.part[v] * weight; }
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kGroups; ++c) store_lanes(sums[c], out + column + c * kLanes);
}

void attend(const float* query, const TileView& tile, const ScoreTerms& terms, RowState* state,
            float* out) {
  const float infinity = __builtin_inff();
  float weights[kTileTokens];
  dot_products(query, tile, weights);
  float max = state->max;
  for (int64_t t = 0; t < kTileTokens; ++t) {
    const bool visible = t >= tile.begin && t < tile.end;
    const float distance = static_cast<float>(t - terms.position);
    const float score = visible ? weights[t] * terms.scale + terms.slope * distance : -infinity;
    weights[t] = score;
    max = score > max ? score : max;
  }
  const Vector shift = Vector{} + (state->max - max);
  const float correction = state->max == max ? 1.0f : exp_of(shift)[0];
  for (int64_t t = 0; t < kTileTokens; t += kLanes) {
    const Lanes scores = load_lanes(weights + t);
    Lanes sum = load_lanes(state->sum);
    Lanes weight;
    KVPLANE_EACH_VECTOR {
      weight.part[v] = exp_of(scores.part[v] - max);
      // The correction is due once for each tile: with the first lanes.
      sum.part[v] = (t == 0 ? sum.part[v] * correction : sum.part[v]) + weight.part[v];
    }
    store_lanes(weight, weights + t);
    store_lanes(sum, state->sum);
  }
  state->max = max;
  int64_t column = 0;
  for (; column + kColumns * kLanes <= tile.row_size; column += kColumns * kLanes) {
    add_values<kColumns>(weights, tile, correction, column, out);
  }
  for (; column < tile.row_size; column += kLanes) {
    add_values<1>(weights, tile, correction, column, out);
  }
}

float finish(const RowState& state, int64_t row_size, float* out) {
  const float sum = sum_of(state.sum);
  for (int64_t d = 0; d < row_size; ++d) out[d] = out[d] / sum;
  return sum;
}

}  // namespace

#define KVPLANE_CONCAT(a, b) a##b
#define KVPLANE_NAME(isa) KVPLANE_CONCAT(row_ops_, isa)
#define KVPLANE_STRING(isa) #isa
#define KVPLANE_QUOTE(isa) KVPLANE_STRING(isa)

RowOps KVPLANE_NAME(KVPLANE_ISA)();

RowOps KVPLANE_NAME(KVPLANE_ISA)() {
  return {KVPLANE_QUOTE(KVPLANE_ISA), load, store, attend, finish};
}

}  // namespace kvplane
