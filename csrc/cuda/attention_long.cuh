// Attention of many rows: prefill, and appending to a cached prefix.
//
//   block   64 rows of one KV head, 16 a warp; all warps share each tile of keys and values
//   tile    64 tokens (32 for the largest heads), the next one on its way while one is computed
//   scores  S [16 rows, tokens] = Q [16, head_size] x K^T;  output O [16 rows, head_size] += P x V
//
// After FlashAttention-2 (Dao, 2023). Tiles are cut at multiples of the sequence's positions.
#pragma once

#include "attention_kernels.h"
#include "batch.cuh"
#include "launch.h"
#include "tiles.cuh"

namespace kvplane::cuda {

constexpr int kLongWarps = 4;

template <int kHeadSize>
struct LongTile {
  static constexpr int kTokens = kHeadSize <= 128 ? 64 : 32;
  static constexpr int kQueries = kRowsOfLongTile * kPitch<kHeadSize>;
  static constexpr int kKeys = kTokens * kPitch<kHeadSize>;  // and as many values
  static constexpr int kStages = 2;
  static constexpr int kSharedBytes = (kQueries + kStages * 2 * kKeys) * 2;
};

// A thread's rows: g and g + 8 of its warp's sixteen.
struct LongRows {
  int32_t position[2];  // -1 for a row that is not there
  float slope[2];       // in base 2
  float maximum[2];
  float sum[2];  // of this thread's tokens
};

__device__ inline LongRows long_rows(const Work& work, const Item& item, int32_t first_row,
                                     int32_t num_rows) {
  const int32_t group = static_cast<int32_t>(group_of(work.p));
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const int32_t g = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp / 4;
  LongRows rows;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int32_t row = 16 * warp + g + 8 * j;
    const bool there = row < num_rows;
    const int32_t token = (first_row + row) / group;
    const int32_t head = item.kv_head * group + (first_row + row) % group;
    rows.position[j] = there ? item.sequence.first_position() + token : -1;
    rows.slope[j] =
        there && work.p.alibi_slopes != nullptr ? work.p.alibi_slopes[head] * kLog2E : 0.0f;
    rows.maximum[j] = -INFINITY;
    rows.sum[j] = 0.0f;
  }
  return rows;
}

// Starts the copies of the block's queries; rows that are not there are zeros.
template <int kHeadSize>
__device__ void copy_queries(const Work& work, const Item& item, int32_t first_row,
                             int32_t num_rows, uint16_t* queries) {
  constexpr int kChunks = kHeadSize / kElementsOfChunk;
  const int32_t group = static_cast<int32_t>(group_of(work.p));
  const uint16_t* data = static_cast<const uint16_t*>(work.p.query);
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kRowsOfLongTile * kChunks;
       i += kLongWarps * kLanesOfWarp) {
    const int32_t row = i / kChunks;
    const int32_t column = i % kChunks * kElementsOfChunk;
    const bool wanted = row < num_rows && column < work.p.pages.head_size;
    const int64_t token = item.sequence.first_token + (first_row + row) / group;
    const int64_t head = item.kv_head * group + (first_row + row) % group;
    const int64_t from = token * work.p.query_token_stride + head * work.p.query_head_stride;
    copy_async_16(queries + row * kPitch<kHeadSize> + column, wanted ? data + from + column : data,
                  wanted);
  }
}

// Starts the copies of a tile of keys and values: warps take 16 rows each, in turns.
template <int kHeadSize>
__device__ void copy_tile(const Work& work, const Item& item, Span seen, int32_t tile,
                          uint16_t* keys) {
  using Tile = LongTile<kHeadSize>;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  for (int32_t part = warp; part < Tile::kTokens / kTileRows; part += kLongWarps) {
    const int32_t position = tile * Tile::kTokens + part * kTileRows + lane % kTileRows;
    const int64_t key = find_key(work, item.sequence.index, item.kv_head, position, seen);
    uint16_t* to = keys + part * kTileRows * kPitch<kHeadSize>;
    load_keys_and_values<kHeadSize>(work.p.pages, key, to, to + Tile::kKeys);
  }
}

// Scores to probabilities, as in the short kernel; here a row's scores lie in four lanes.
template <int kTokens>
__device__ void soften_rows(const Work& work, Span seen, int32_t first,
                            float (&scores)[kTokens / 8][4], LongRows& rows, float (&rescale)[2]) {
  const int32_t t = static_cast<int32_t>(threadIdx.x) % 4;
  const float scale = work.p.scale * kLog2E;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const Span own = visible(work.p, rows.position[j]);
    const int32_t begin = max_of(own.begin, seen.begin);
    const int32_t end = min_of(own.end, seen.end);
    float maximum = rows.maximum[j];
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = scores[n][2 * j + i];
        const int32_t position = first + 8 * n + 2 * t + i;
        const float bias = rows.slope[j] * static_cast<float>(position - rows.position[j]);
        score = position >= begin && position < end ? score * scale + bias : -INFINITY;
        maximum = fmaxf(maximum, score);
      }
    }
    maximum = fmaxf(maximum, __shfl_xor_sync(kWholeWarp, maximum, 1));
    maximum = fmaxf(maximum, __shfl_xor_sync(kWholeWarp, maximum, 2));
    const float base = finite_maximum(maximum);
    rescale[j] = exp2_fast(rows.maximum[j] - base);
    rows.maximum[j] = maximum;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = scores[n][2 * j + i];
        score = exp2_fast(score - base);
        sum += score;
      }
    }
    rows.sum[j] = rows.sum[j] * rescale[j] + sum;
  }
}

template <typename T, int kHeadSize>
__device__ void take_tile(const Work& work, Span seen, int32_t tile, const uint16_t* queries,
                          const uint16_t* keys, LongRows& rows, float (&out)[kHeadSize / 8][4]) {
  using Tile = LongTile<kHeadSize>;
  float scores[Tile::kTokens / 8][4] = {};
#pragma unroll
  for (int k = 0; k < kHeadSize / 16; ++k) {
    uint32_t a[4];
    load_rows<kHeadSize>(a, queries, 16 * k);
#pragma unroll
    for (int n = 0; n < Tile::kTokens / 16; ++n) {
      uint32_t low[2], high[2];
      load_rows_as_b<kHeadSize>(low, high, keys + 16 * n * kPitch<kHeadSize>, 16 * k);
      multiply_add<T>(scores[2 * n], a, low);
      multiply_add<T>(scores[2 * n + 1], a, high);
    }
  }
  float rescale[2];
  soften_rows<Tile::kTokens>(work, seen, tile * Tile::kTokens, scores, rows, rescale);
#pragma unroll
  for (int d = 0; d < kHeadSize / 8; ++d) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[d][i] *= rescale[i / 2];
  }
  const uint16_t* values = keys + Tile::kKeys;
#pragma unroll
  for (int n = 0; n < Tile::kTokens / 16; ++n) {
    const uint32_t a[4] = {pack<T>(scores[2 * n][0], scores[2 * n][1]),
                           pack<T>(scores[2 * n][2], scores[2 * n][3]),
                           pack<T>(scores[2 * n + 1][0], scores[2 * n + 1][1]),
                           pack<T>(scores[2 * n + 1][2], scores[2 * n + 1][3])};
#pragma unroll
    for (int d = 0; d < kHeadSize / 16; ++d) {
      uint32_t left[2], right[2];
      load_columns_as_b<kHeadSize>(left, right, values + 16 * n * kPitch<kHeadSize>, 16 * d);
      multiply_add<T>(out[2 * d], a, left);
      multiply_add<T>(out[2 * d + 1], a, right);
    }
  }
}

template <typename T, int kHeadSize>
__device__ void write_rows(const Work& work, const Item& item, int32_t first_row, int32_t num_rows,
                           const LongRows& rows, const float (&out)[kHeadSize / 8][4]) {
  const int32_t group = static_cast<int32_t>(group_of(work.p));
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  const int64_t head_size = work.p.pages.head_size;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float sum = rows.sum[j];
    sum += __shfl_xor_sync(kWholeWarp, sum, 1);
    sum += __shfl_xor_sync(kWholeWarp, sum, 2);
    const int32_t i = 16 * warp + lane / 4 + 8 * j;
    if (i >= num_rows) continue;
    const int64_t token = item.sequence.first_token + (first_row + i) / group;
    const int64_t head = item.kv_head * group + (first_row + i) % group;
    const int64_t row = token * work.p.num_heads + head;
    T* to = static_cast<T*>(work.p.out) + row * head_size;
#pragma unroll
    for (int d = 0; d < kHeadSize / 8; ++d) {
      const int32_t dim = 8 * d + 2 * (lane % 4);
      if (dim >= head_size) continue;
      *reinterpret_cast<uint32_t*>(to + dim) =
          pack<T>(out[d][2 * j] / sum, out[d][2 * j + 1] / sum);
    }
    if (work.p.lse != nullptr && lane % 4 == 0) {
      work.p.lse[row] = log_sum_exp(rows.maximum[j], sum);
    }
  }
}

template <typename T, int kHeadSize>
__global__ void __launch_bounds__(kLongWarps* kLanesOfWarp) attend_long(Work work) {
  using Tile = LongTile<kHeadSize>;
  KVPLANE_DYNAMIC_SHARED(uint16_t, shared);
  uint16_t* const queries = shared;
  uint16_t* const ring = shared + Tile::kQueries;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const int32_t num_items = work.plan.long_ends[work.p.num_sequences - 1];
  for (int32_t i = static_cast<int32_t>(blockIdx.x); i < num_items;
       i += static_cast<int32_t>(gridDim.x)) {
    const Item item = find_item(work, work.plan.long_ends, kRowsOfLongTile, i);
    const int32_t first_row = item.tile * kRowsOfLongTile;
    const int32_t all_rows = item.sequence.query_len * static_cast<int32_t>(group_of(work.p));
    const int32_t num_rows = min_of(kRowsOfLongTile, all_rows - first_row);
    const Span seen = span_of(work, item.sequence, item.split, first_row, num_rows);
    LongRows rows = long_rows(work, item, first_row, num_rows);
    float out[kHeadSize / 8][4] = {};
    const int32_t end = div_ceil(seen.end, Tile::kTokens);
    int32_t tile = seen.begin / Tile::kTokens;
    copy_queries<kHeadSize>(work, item, first_row, num_rows, queries);
    copy_tile<kHeadSize>(work, item, seen, tile, ring);
    commit_copies();
    for (int stage = 0; tile < end; ++tile, stage = 1 - stage) {
      wait_for_copies<0>();
      __syncthreads();  // The tile has landed, and the other stage has been read.
      if (tile + 1 < end) {
        copy_tile<kHeadSize>(work, item, seen, tile + 1, ring + (1 - stage) * 2 * Tile::kKeys);
      }
      commit_copies();
      take_tile<T, kHeadSize>(work, seen, tile, queries + 16 * warp * kPitch<kHeadSize>,
                              ring + stage * 2 * Tile::kKeys, rows, out);
    }
    write_rows<T, kHeadSize>(work, item, first_row, num_rows, rows, out);
    __syncthreads();  // The next item's copies take the place of this one's tiles.
  }
}

template <typename T, int kHeadSize>
void launch_long_of(const Work& work, int64_t max_items, uintptr_t stream) {
  constexpr int kThreads = kLongWarps * kLanesOfWarp;
  constexpr size_t kBytes = LongTile<kHeadSize>::kSharedBytes;
  const int64_t at_once = resident_blocks<&attend_long<T, kHeadSize>>(kThreads, kBytes);
  launch(&attend_long<T, kHeadSize>, {min_of(at_once, max_items)}, kThreads, kBytes, stream, work);
}

template <typename T>
void launch_long(const Work& work, int64_t max_items, uintptr_t stream) {
  const int64_t head_size = work.p.pages.head_size;
  if (head_size <= 64) {
    launch_long_of<T, 64>(work, max_items, stream);
  } else if (head_size <= 128) {
    launch_long_of<T, 128>(work, max_items, stream);
  } else if (head_size <= 192) {
    launch_long_of<T, 192>(work, max_items, stream);
  } else {
    launch_long_of<T, 256>(work, max_items, stream);
  }
}

}  // namespace kvplane::cuda
