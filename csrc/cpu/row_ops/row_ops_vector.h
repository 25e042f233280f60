// The row operations in terms of vectors of KVPLANE_VECTOR_BYTES. Each file of an instruction set
// includes this once, with its own width and compiler flags. Everything here has internal linkage:
// otherwise the linker could keep a copy that other machines cannot run. For the same reason only
// headers without shared inline functions may be included.
#pragma once

#include <cstdint>
#include <cstring>

#include "row_ops.h"

#define KVPLANE_INLINE inline __attribute__((always_inline))
#define KVPLANE_UNROLL _Pragma("GCC unroll 16")

namespace kvplane {
namespace {

constexpr int kWidth = KVPLANE_VECTOR_BYTES / 4;
constexpr int kVectors = kLanes / kWidth;
constexpr float kInfinity = __builtin_inff();
constexpr float kTokens[kTileTokens] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                        11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                        22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

typedef float Vector __attribute__((vector_size(KVPLANE_VECTOR_BYTES)));
typedef int32_t IntVector __attribute__((vector_size(KVPLANE_VECTOR_BYTES)));

KVPLANE_INLINE Vector load_vector(const float* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

KVPLANE_INLINE void store_vector(Vector vector, float* to) {
  std::memcpy(to, &vector, sizeof vector);
}

// kLanes floats, in as many registers as they take.
struct Lanes {
  Vector part[kVectors];
};

KVPLANE_INLINE Lanes load_lanes(const float* from) {
  Lanes lanes;
  KVPLANE_UNROLL for (int v = 0; v < kVectors; ++v) lanes.part[v] = load_vector(from + v * kWidth);
  return lanes;
}

KVPLANE_INLINE void store_lanes(const Lanes& lanes, float* to) {
  KVPLANE_UNROLL for (int v = 0; v < kVectors; ++v) store_vector(lanes.part[v], to + v * kWidth);
}

// Adds halves while there is more than one vector; `sum_of` and `totals` continue until one lane is
// left. The order of the additions does not depend on the width.
KVPLANE_INLINE Vector fold(Lanes lanes) {
  KVPLANE_UNROLL for (int half = kVectors / 2; half > 0; half /= 2) {
    KVPLANE_UNROLL for (int v = 0; v < half; ++v) lanes.part[v] += lanes.part[v + half];
  }
  return lanes.part[0];
}

// Adds the two halves of each group of 2 * kHalf lanes of a and b; a's groups come before b's.
//
//   kHalf = 2:  a = |0 1 2 3|4 5 6 7|   ->   |0+2 1+3|4+6 5+7|  then b's
template <int kHalf>
KVPLANE_INLINE Vector add_halves(Vector a, Vector b) {
  IntVector low, high;
  KVPLANE_UNROLL for (int i = 0; i < kWidth; ++i) {
    low[i] = i / kHalf * 2 * kHalf + i % kHalf;
    high[i] = low[i] + kHalf;
  }
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}

// One vector for each of kRows query rows.
template <int kRows>
struct PerRow {
  Vector row[kRows];
};

// The totals of the vectors partial(first), ..., partial(first + kCount - 1), as kWidth / kCount
// lanes of partial totals each; with kCount = kWidth, one lane each and in order. Computed depth
// first, so that few registers are in use at a time.
template <int kCount, int kRows, typename Partial>
KVPLANE_INLINE PerRow<kRows> totals(int64_t first, const Partial& partial) {
  if constexpr (kCount == 1) {
    return partial(first);
  } else {
    const PerRow<kRows> a = totals<kCount / 2, kRows>(first, partial);
    const PerRow<kRows> b = totals<kCount / 2, kRows>(first + kCount / 2, partial);
    PerRow<kRows> sums;
    KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
      sums.row[r] = add_halves<kWidth / kCount>(a.row[r], b.row[r]);
    }
    return sums;
  }
}

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

KVPLANE_INLINE float exp_of(float x) { return exp_of(Vector{} + x)[0]; }

// tanh(x), within 3 units in the last place; NaN stays NaN. A polynomial near 0 (coefficients of
// Cephes tanhf), and by exp elsewhere.
KVPLANE_INLINE Vector tanh_of(Vector x) {
  const Vector one = Vector{} + 1.0f;
  const IntVector sign = (IntVector)x & (IntVector{} + INT32_MIN);
  const Vector magnitude = (Vector)((IntVector)x & (IntVector{} + INT32_MAX));
  const Vector e = exp_of(magnitude * -2.0f);
  const Vector large = (Vector)((IntVector)((one - e) / (one + e)) | sign);
  const Vector z = x * x;
  Vector poly = z * -5.70498872745e-3f + 2.06390887954e-2f;
  poly = poly * z - 5.37397155531e-2f;
  poly = poly * z + 1.33314422036e-1f;
  poly = poly * z - 3.33332819422e-1f;
  const Vector small = poly * z * x + x;
  return magnitude < one * 0.625f ? small : large;
}

template <int kHalf = kWidth / 2>
KVPLANE_INLINE float max_of(Vector vector) {
  IntVector other;
  KVPLANE_UNROLL for (int i = 0; i < kWidth; ++i) other[i] = (i + kHalf) % kWidth;
  const Vector moved = __builtin_shuffle(vector, other);
  vector = moved > vector ? moved : vector;
  if constexpr (kHalf == 1) {
    return vector[0];
  } else {
    return max_of<kHalf / 2>(vector);
  }
}

template <typename Bits, typename Convert>
KVPLANE_INLINE void convert_from(const void* source, int64_t count, float* __restrict row,
                                 Convert convert) {
  const Bits* __restrict bits = static_cast<const Bits*>(source);
  for (int64_t i = 0; i < count; ++i) row[i] = convert(bits[i]);
}

void load(const void* source, Dtype dtype, int64_t count, float* row) {
  switch (dtype) {
    case Dtype::kFloat32:
      std::memcpy(row, source, static_cast<size_t>(count) * sizeof(float));
      break;
    case Dtype::kFloat16:
      convert_from<uint16_t>(source, count, row, fp16_to_float);
      break;
    case Dtype::kBFloat16:
      convert_from<uint16_t>(source, count, row, bf16_to_float);
      break;
    case Dtype::kFloat8E4M3:
      convert_from<uint8_t>(source, count, row, e4m3_to_float);
      break;
    case Dtype::kFloat8E5M2:
      convert_from<uint8_t>(source, count, row, e5m2_to_float);
      break;
  }
}

template <typename Bits, typename Convert>
KVPLANE_INLINE void convert_to(const float* __restrict row, int64_t count, void* destination,
                               Convert convert) {
  Bits* __restrict bits = static_cast<Bits*>(destination);
  for (int64_t i = 0; i < count; ++i) bits[i] = convert(row[i]);
}

void store(const float* row, int64_t count, Dtype dtype, void* destination) {
  switch (dtype) {
    case Dtype::kFloat32:
      std::memcpy(destination, row, static_cast<size_t>(count) * sizeof(float));
      break;
    case Dtype::kFloat16:
      convert_to<uint16_t>(row, count, destination, float_to_fp16);
      break;
    case Dtype::kBFloat16:
      convert_to<uint16_t>(row, count, destination, float_to_bf16);
      break;
    case Dtype::kFloat8E4M3:
      convert_to<uint8_t>(row, count, destination, float_to_e4m3);
      break;
    case Dtype::kFloat8E5M2:
      convert_to<uint8_t>(row, count, destination, float_to_e5m2);
      break;
  }
}

// Into the second-level cache. One core has few buffers for lines on their way to its first-level
// cache, and their number times a line, each memory latency, is all that prefetches into that one
// can bring; the second level has more buffers.
KVPLANE_INLINE void prefetch_line(const char* line) { __builtin_prefetch(line, 0, 2); }

// Prefetches rows a few at a time, between pieces of work: prefetching all at once would fill the
// memory queue and stall. `again`: rows to be prefetched with them, or null.
class Prefetch {
 public:
  Prefetch(const char* const* rows, const char* const* again, int64_t row_bytes, int64_t num_steps)
      : rows_(rows),
        again_(again),
        row_bytes_(row_bytes),
        rows_a_step_((kTileTokens << 16) / num_steps + 1) {}

  KVPLANE_INLINE void step() {
    due_ += rows_a_step_;
    const int64_t end = due_ >> 16 < kTileTokens ? due_ >> 16 : kTileTokens;
    for (; row_ < end; ++row_) {
      for (int64_t b = 0; b < row_bytes_; b += 64) {
        prefetch_line(rows_[row_] + b);
        if (again_ != nullptr) prefetch_line(again_[row_] + b);
      }
    }
  }

 private:
  const char* const* rows_;
  const char* const* again_;
  int64_t row_bytes_;
  int64_t rows_a_step_;  // in 2^-16
  int64_t due_ = 0;      // rows, in 2^-16
  int64_t row_ = 0;
};

// Rows that the passes over a tile's keys and over its values prefetch: the same of the next tile.
// But a processor may drop prefetches when too many are pending. So with few rows, where memory is
// the limit, each pass prefetches the rows again that the pass after it reads.
KVPLANE_INLINE bool asks_again(const AttendArgs& args) { return args.num_rows <= 8; }
KVPLANE_INLINE const char* const* again_with_keys(const AttendArgs& args) {
  return asks_again(args) ? args.tile->value : nullptr;
}
KVPLANE_INLINE const char* const* again_with_values(const AttendArgs& args) {
  return asks_again(args) ? args.prefetch->key : nullptr;
}
KVPLANE_INLINE Prefetch prefetch_with_keys(const AttendArgs& args, int64_t num_steps) {
  return {args.prefetch->key, again_with_keys(args), args.prefetch_bytes, num_steps};
}
KVPLANE_INLINE Prefetch prefetch_with_values(const AttendArgs& args, int64_t num_steps) {
  return {args.prefetch->value, again_with_values(args), args.prefetch_bytes, num_steps};
}

void load_tile(const LoadArgs& args) {
  Prefetch prefetch(args.prefetch, nullptr, args.prefetch_bytes, kTileTokens);
  for (int64_t t = 0; t < kTileTokens; ++t) {
    prefetch.step();
    float* to = reinterpret_cast<float*>(args.to + t * args.row_bytes);
    load(args.rows[t], args.dtype, args.count, to);
  }
}

// weights[t] = cap * tanh(weights[t] * scale / cap)
void cap_scores(float scale, float cap, float* weights) {
  for (int64_t t = 0; t < kTileTokens; t += kWidth) {
    store_vector(tanh_of(load_vector(weights + t) * scale / cap) * cap, weights + t);
  }
}

// Turns a row's dot products into weights. Returns the factor for the sums so far.
KVPLANE_INLINE float weigh(const Row& row, float scale, float soft_cap, float* weights) {
  if (soft_cap > 0.0f) {
    cap_scores(scale, soft_cap, weights);
    scale = 1.0f;
  }
  const Vector begin = Vector{} + static_cast<float>(row.begin);
  const Vector end = Vector{} + static_cast<float>(row.end);
  const Vector none = Vector{} - kInfinity;
  Vector scores[kTileTokens / kWidth];
  Vector best = none + 0.0f;
  KVPLANE_UNROLL for (int i = 0; i < kTileTokens / kWidth; ++i) {
    const Vector token = load_vector(kTokens + i * kWidth);
    const Vector distance = token - static_cast<float>(row.position);
    const Vector score = load_vector(weights + i * kWidth) * scale + distance * row.slope;
    scores[i] = token >= begin ? score : none;
    scores[i] = token < end ? scores[i] : none;
    best = scores[i] > best ? scores[i] : best;
  }
  RowState& state = *row.state;
  const float tile_max = max_of(best);
  const float max = tile_max > state.max ? tile_max : state.max;
  const float correction = state.max == max ? 1.0f : exp_of(state.max - max);
  KVPLANE_UNROLL for (int v = 0; v < kVectors; ++v) {
    Vector sum = load_vector(state.sum + v * kWidth) * correction;
    KVPLANE_UNROLL for (int i = v; i < kTileTokens / kWidth; i += kVectors) {
      const Vector weight = exp_of(scores[i] - max);
      store_vector(weight, weights + i * kWidth);
      sum += weight;
    }
    store_vector(sum, state.sum + v * kWidth);
  }
  state.max = max;
  return correction;
}

// dots[r][t] = query of row r . key[t]; kGroups: groups of lanes in a row, 0 when known only at run
// time; kSteps: of the prefetch.
template <int kRows, int kGroups, int kSteps>
KVPLANE_INLINE void dot_products(const Row* rows, const Tile& tile, int64_t row_size,
                                 Prefetch* prefetch, float (*dots)[kTileTokens]) {
  const int64_t num_groups = kGroups > 0 ? kGroups : row_size / kLanes;
  const auto dot = [&](int64_t token) __attribute__((always_inline)) {
    if (token % (kTileTokens / kSteps) == 0) prefetch->step();
    const float* key = reinterpret_cast<const float*>(tile.key[token]);
    Lanes sums[kRows] = {};
    KVPLANE_UNROLL for (int64_t c = 0; c < num_groups; ++c) {
      const Lanes k = load_lanes(key + c * kLanes);
      KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
        const Lanes q = load_lanes(static_cast<const float*>(rows[r].query) + c * kLanes);
        KVPLANE_UNROLL for (int v = 0; v < kVectors; ++v) sums[r].part[v] += q.part[v] * k.part[v];
      }
    }
    PerRow<kRows> folded;
    KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) folded.row[r] = fold(sums[r]);
    return folded;
  };
  for (int64_t first = 0; first < kTileTokens; first += kWidth) {
    const PerRow<kRows> sums = totals<kWidth, kRows>(first, dot);
    KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) store_vector(sums.row[r], dots[r] + first);
  }
}

// out = out * correction + sum over t of weights[t] * value[t], for kGroups groups of lanes of
// kRows rows that attend to the same tokens.
template <int kRows, int kGroups, int kSteps>
KVPLANE_INLINE void add_values(const Row* rows, const float (*weights)[kTileTokens],
                               const float* corrections, const Tile& tile, int64_t column,
                               Prefetch* prefetch) {
  Lanes sums[kRows][kGroups];
  KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
    KVPLANE_UNROLL for (int c = 0; c < kGroups; ++c) {
      sums[r][c] = load_lanes(rows[r].out + column + c * kLanes);
      KVPLANE_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][c].part[v] *= corrections[r];
    }
  }
  for (int64_t t = rows[0].begin; t < rows[0].end; ++t) {
    if (t % (kTileTokens / kSteps) == 0) prefetch->step();
    const float* value = reinterpret_cast<const float*>(tile.value[t]) + column;
    KVPLANE_UNROLL for (int c = 0; c < kGroups; ++c) {
      const Lanes x = load_lanes(value + c * kLanes);
      KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
        const float weight = weights[r][t];
        KVPLANE_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][c].part[v] += x.part[v] * weight;
      }
    }
  }
  KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
    KVPLANE_UNROLL for (int c = 0; c < kGroups; ++c) {
      store_lanes(sums[r][c], rows[r].out + column + c * kLanes);
    }
  }
}

template <int kRows, int kSteps>
KVPLANE_INLINE void add_all_values(const Row* rows, const float (*weights)[kTileTokens],
                                   const float* corrections, const AttendArgs& args,
                                   Prefetch* prefetch) {
  constexpr int kColumns = kWidth == 16 ? 8 : kWidth == 8 ? 4 : 2;  // as many as the registers hold
  const Tile& tile = *args.tile;
  int64_t column = 0;
  for (; column + kColumns * kLanes <= args.value_size; column += kColumns * kLanes) {
    add_values<kRows, kColumns, kSteps>(rows, weights, corrections, tile, column, prefetch);
  }
  for (; column < args.value_size; column += kLanes) {
    add_values<kRows, 1, kSteps>(rows, weights, corrections, tile, column, prefetch);
  }
}

KVPLANE_INLINE bool see_the_same(const Row& a, const Row& b) {
  return a.begin == b.begin && a.end == b.end;
}

// kKeySteps, kValueSteps: prefetch steps for each turn of one or two rows.
template <int kGroups, int kKeySteps, int kValueSteps>
void attend_rows(const AttendArgs& args) {
  constexpr int64_t kTogether = kWidth == 16 ? 2 : 1;
  const int64_t num_turns = (args.num_rows + kTogether - 1) / kTogether;
  float weights[kAttendRows][kTileTokens];
  float corrections[kAttendRows];
  Prefetch first = prefetch_with_keys(args, kKeySteps * num_turns);
  for (int64_t r = 0; r < args.num_rows;) {
    const Row* rows = args.rows + r;
    const int64_t num = r + kTogether <= args.num_rows ? kTogether : 1;
    float (*dots)[kTileTokens] = weights + r;
    if (num == 2) {
      dot_products<2, kGroups, kKeySteps>(rows, *args.tile, args.row_size, &first, dots);
    } else {
      dot_products<1, kGroups, kKeySteps>(rows, *args.tile, args.row_size, &first, dots);
    }
    for (const int64_t end = r + num; r < end; ++r) {
      corrections[r] = weigh(args.rows[r], args.scale, args.soft_cap, weights[r]);
    }
  }
  Prefetch second = prefetch_with_values(args, kValueSteps * num_turns);
  for (int64_t r = 0; r < args.num_rows;) {
    const Row* rows = args.rows + r;
    if (kWidth == 16 && r + 1 < args.num_rows && see_the_same(rows[0], rows[1])) {
      add_all_values<2, kValueSteps>(rows, weights + r, corrections + r, args, &second);
      r += 2;
    } else {
      add_all_values<1, kValueSteps>(rows, weights + r, corrections + r, args, &second);
      r += 1;
    }
  }
}

// With few rows, memory is the limit, and prefetching one row at a time is faster than in bursts.
// With many rows, arithmetic is the limit, and fewer prefetch steps cost less.
template <int kGroups>
void attend_any(const AttendArgs& args) {
  if (args.num_rows <= 4) return attend_rows<kGroups, 32, 32>(args);
  attend_rows<kGroups, 8, 4>(args);
}

void attend(const AttendArgs& args) {
  switch (args.row_size) {
    case 64:
      return attend_any<4>(args);
    case 128:
      return attend_any<8>(args);
    default:
      return attend_any<0>(args);
  }
}

void merge(const RowState& later, const float* later_out, int64_t value_size, RowState* state,
           float* out) {
  const auto saw_nothing = [](const RowState& s) {
    return s.max == -kInfinity && s.sum[0] == 0.0f;
  };
  if (saw_nothing(later)) return;
  if (saw_nothing(*state)) {
    *state = later;
    std::memcpy(out, later_out, static_cast<size_t>(value_size) * sizeof(float));
    return;
  }
  const float max = later.max > state->max ? later.max : state->max;
  const float old_factor = state->max == max ? 1.0f : exp_of(state->max - max);
  const float new_factor = later.max == max ? 1.0f : exp_of(later.max - max);
  state->max = max;
  for (int64_t i = 0; i < kLanes; ++i) {
    state->sum[i] = state->sum[i] * old_factor + later.sum[i] * new_factor;
  }
  for (int64_t d = 0; d < value_size; ++d) out[d] = out[d] * old_factor + later_out[d] * new_factor;
}

float finish(const RowState& state, int64_t value_size, float scale, const float* sink, float* out,
             float* max) {
  float sum = sum_of(state.sum);
  *max = state.max;
  if (sink != nullptr) {
    *max = *sink > state.max ? *sink : state.max;
    const float factor = state.max == *max ? 1.0f : exp_of(state.max - *max);
    sum = sum * factor + (*sink == *max ? 1.0f : exp_of(*sink - *max));
    for (int64_t d = 0; d < value_size; ++d) out[d] *= factor;
  }
  for (int64_t d = 0; d < value_size; ++d) out[d] = out[d] / sum * scale;
  return sum;
}

}  // namespace
}  // namespace kvplane
