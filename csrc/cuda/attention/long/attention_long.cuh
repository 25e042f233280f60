// Attention of many rows: prefill, and appending to a cached prefix.
//
//   block   64 rows of one KV head, 16 for each warp; all warps share each tile of keys and values
//   tile    64 tokens (fewer for the largest heads); the next one is copied while one is computed
//   scores  S [16 rows, tokens] = Q [16, head_size] x K^T;  output O [16 rows, head_size] += P x V
//
// After FlashAttention-2 (Dao, 2023). Tiles are cut at multiples of the sequence's positions.
#pragma once

#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/batch.cuh"
#include "cuda/attention/long/long_tile.cuh"
#include "cuda/attention/queries.cuh"
#include "cuda/attention/tiles.cuh"
#include "cuda/device/launch.h"

namespace kvplane::cuda {

constexpr int kLongWarps = 4;

// A thread's rows: g and g + 8 of its warp's sixteen.
struct LongRows {
  int32_t position[2];  // -1 for a missing row
  int32_t head[2];
  float scale[2];  // of products, to scores in base 2
  float slope[2];  // in base 2
  float maximum[2];
  float sum[2];  // of this thread's tokens
};

__device__ inline LongRows long_rows(const Work& work, const Item& item, int32_t first_row,
                                     int32_t num_rows) {
  const int32_t group = work.cutting.group;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const int32_t g = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp / 4;
  const float scale = finite(work.p.scale * kLog2E * key_scale(work.p.pages, item.kv_head));
  LongRows rows;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int32_t row = 16 * warp + g + 8 * j;
    const bool there = row < num_rows;
    const int32_t token = (first_row + row) / group;
    const int32_t head = item.kv_head * group + (first_row + row) % group;
    rows.position[j] = there ? item.sequence.first_position() + token : -1;
    rows.head[j] = head;
    rows.scale[j] = scale;
    rows.slope[j] =
        there && work.p.alibi_slopes != nullptr ? work.p.alibi_slopes[head] * kLog2E : 0.0f;
    rows.maximum[j] = -INFINITY;
    rows.sum[j] = 0.0f;
  }
  return rows;
}

// The address of a row's query; null for a missing row.
__device__ inline const uint16_t* query_of(const Work& work, const Item& item, int32_t first_row,
                                           int32_t num_rows, int32_t row) {
  if (row >= num_rows) return nullptr;
  const int32_t group = work.cutting.group;
  const int64_t token = item.sequence.first_token + (first_row + row) / group;
  const int64_t head = item.kv_head * group + (first_row + row) % group;
  return static_cast<const uint16_t*>(work.p.query) + token * work.p.query_token_stride +
         head * work.p.query_head_stride;
}

// Starts the copies of the block's queries; missing rows are zeros.
template <int kHeadSize>
__device__ void copy_queries(const Work& work, const Item& item, int32_t first_row,
                             int32_t num_rows, unsigned char* queries) {
  constexpr int kElements = kChunkBytes / 2;
  constexpr int kChunks = kHeadSize / kElements;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kRowsOfLongTile * kChunks;
       i += kLongWarps * kLanesOfWarp) {
    const int32_t row = i / kChunks, chunk = i % kChunks;
    const uint16_t* from = query_of(work, item, first_row, num_rows, row);
    const bool wanted = from != nullptr && chunk * kElements < work.p.pages.head_size;
    copy_async_16(queries + row * kPitch<Half, kHeadSize> + chunk * kChunkBytes,
                  wanted ? from + chunk * kElements : work.p.query, wanted);
  }
}

// For 8-bit keys: converts a warp's 16 rows to fp16, with each 16 columns in the order of the keys'
// columns. Row by row, 64 columns at a time, each lane a pair of columns.
template <int kHeadSize>
__device__ void convert_queries(const Work& work, const Item& item, int32_t first_row,
                                int32_t num_rows, LongRows& rows, unsigned char* queries) {
  constexpr int kPairs = kHeadSize / (2 * kLanesOfWarp);  // for each lane
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
#pragma unroll 2
  for (int32_t i = 0; i < 16; ++i) {
    const uint16_t* from = query_of(work, item, first_row, num_rows, 16 * warp + i);
    uint32_t pairs[kPairs];
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int32_t dim = 2 * (n * kLanesOfWarp + lane);
      const bool there = from != nullptr && dim < work.p.pages.head_size;
      pairs[n] = there ? *reinterpret_cast<const uint32_t*>(from + dim) : 0u;
    }
    if (work.p.query_dtype == Dtype::kBFloat16) {
      const float back = scale_row<kLanesOfWarp>(pairs);
      rows.scale[0] = finite(rows.scale[0] * (i == lane / 4 ? back : 1.0f));
      rows.scale[1] = finite(rows.scale[1] * (i == lane / 4 + 8 ? back : 1.0f));
    }
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      // Columns 4t + 2j and the next, of each 16, go to 2t + 8j and the next.
      const int32_t pair = (n * kLanesOfWarp + lane) % 8;
      const int32_t factor = (n * kLanesOfWarp + lane) / 8;
      const int32_t column = 16 * factor + 2 * (pair / 2) + 8 * (pair % 2);
      unsigned char* to = queries + (16 * warp + i) * kPitch<Half, kHeadSize> + 2 * column;
      *reinterpret_cast<uint32_t*>(to) = pairs[n];
    }
  }
}

// Starts the copies of a tile of keys and values: each warp takes 16 rows at a time.
template <typename Kv, int kHeadSize>
__device__ void copy_tile(const Work& work, const Item& item, Range seen, int32_t tile,
                          unsigned char* keys) {
  using Tile = LongTile<Kv, kHeadSize>;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const PagesParams& pages = work.p.pages;
  const int32_t first_dim = item.part * Tile::kValueSize;
  for (int32_t n = warp; n < Tile::kTokens / kTileRows; n += kLongWarps) {
    const int32_t position = tile * Tile::kTokens + n * kTileRows;
    const int64_t row = find_tile_row(work, item, position, seen);
    const Kv* data = static_cast<const Kv*>(pages.data);
    const int32_t head_size = static_cast<int32_t>(pages.head_size);
    const int32_t num_values = static_cast<int32_t>(pages.value_head_size) - first_dim;
    unsigned char* to_keys = keys + n * kTileRows * kPitch<Kv, kHeadSize>;
    unsigned char* to_values = keys + Tile::kKeys + n * kTileRows * kPitch<Kv, Tile::kValueSize>;
    if (is_in_one_block(work, position, seen)) {
      load_tile_of_block<Kv, kHeadSize>(data, row, 0, pages.token_stride, head_size, to_keys);
      load_tile_of_block<Kv, Tile::kValueSize>(data + first_dim, row, kTileRows,
                                               pages.value_token_stride, num_values, to_values);
    } else {
      load_tile_rows<Kv, kHeadSize>(data, row, 0, head_size, to_keys);
      load_tile_rows<Kv, Tile::kValueSize>(data + first_dim, row, kTileRows, num_values, to_values);
    }
  }
}

// One bit for each kMaskUnit tokens of a tile, from position `first` on: whether a mask of blocks
// shows them to row j of the thread.
template <int kTokens>
__device__ uint32_t units_seen(const Work& work, const Item& item, int32_t first,
                               const LongRows& rows, int j) {
  if (work.p.blocks.seen == nullptr) return ~0u;
  uint32_t units = 0;
#pragma unroll
  for (int n = 0; n < kTokens / static_cast<int>(kMaskUnit); ++n) {
    const int32_t key = first + n * static_cast<int32_t>(kMaskUnit);
    const bool is_seen = sees_block(work, item.sequence.index, rows.head[j], rows.position[j], key);
    units |= static_cast<uint32_t>(is_seen) << n;
  }
  return units;
}

// Turns scores into probabilities, as in the short kernel; here four lanes hold a row's scores. A
// tile of which every row sees all tokens, with plain scores, needs no mask: it takes a third of
// the instructions then, and the bits are the same.
template <int kTokens, bool kIsMasked>
__device__ void online_softmax(const Work& work, const Item& item, Range seen, int32_t first,
                               float (&scores)[kTokens / 8][4], LongRows& rows,
                               float (&rescale)[2]) {
  const int32_t t = static_cast<int32_t>(threadIdx.x) % 4;
  const SoftCap cap = soft_cap(work);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const Range own = visible(work.cutting.window, rows.position[j]);
    const int32_t begin = max_of(own.begin, seen.begin);
    const int32_t end = min_of(own.end, seen.end);
    const uint32_t units = kIsMasked ? units_seen<kTokens>(work, item, first, rows, j) : 0;
    float maximum = rows.maximum[j];
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = scores[n][2 * j + i];
        score *= rows.scale[j];
        if constexpr (kIsMasked) {
          const int32_t position = first + 8 * n + 2 * t + i;
          const float bias = rows.slope[j] * static_cast<float>(position - rows.position[j]);
          const bool is_seen = position >= begin && position < end && (units >> n / 2 & 1) != 0;
          score = is_seen ? cap.of<true>(score) + bias : -INFINITY;
        }
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

// Returns the positions whose tokens all rows of an item see with plain scores: none where an
// option changes them.
__device__ inline Range seen_by_all(const Work& work, const Item& item, Range seen,
                                    int32_t first_row, int32_t num_rows) {
  const PagedAttentionParams& p = work.p;
  if (p.alibi_slopes != nullptr || p.logit_soft_cap != 0.0f || p.blocks.seen != nullptr) {
    return {0, 0};
  }
  const int32_t group = work.cutting.group;
  const int32_t first = item.sequence.first_position() + first_row / group;
  const int32_t last = item.sequence.first_position() + (first_row + num_rows - 1) / group;
  return {max_of(seen.begin, visible(work.cutting.window, last).begin),
          min_of(seen.end, first + 1)};
}

template <typename Kv, int kHeadSize>
__device__ void take_tile(const Work& work, const Item& item, Range seen, Range plain, int32_t tile,
                          const unsigned char* queries, const unsigned char* keys, LongRows& rows,
                          float (&out)[LongTile<Kv, kHeadSize>::kValueSize / 8][4]) {
  using Tile = LongTile<Kv, kHeadSize>;
  using Factor = FactorOf<Kv>;
  constexpr int kValueSize = Tile::kValueSize;
  constexpr int kValueReads = kValueSize * static_cast<int>(sizeof(Kv)) / kReadBytes;
  constexpr int kReads = kHeadSize * static_cast<int>(sizeof(Kv)) / kReadBytes;
  constexpr int kRowsBytes = 16 * kPitch<Kv, kHeadSize>;
  float scores[Tile::kTokens / 8][4] = {};
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    uint32_t a[kFactors<Kv>][1][4];
#pragma unroll
    for (int f = 0; f < kFactors<Kv>; ++f) {
      load_rows<Factor, kHeadSize>(a[f], queries, (kFactors<Kv> * i + f) * kReadBytes);
    }
#pragma unroll
    for (int n = 0; n < Tile::kTokens / 16; ++n) {
      uint32_t low[kFactors<Kv>][2], high[kFactors<Kv>][2];
      load_rows_as_b<Kv, kHeadSize>(low, high, keys + n * kRowsBytes, i * kReadBytes);
#pragma unroll
      for (int f = 0; f < kFactors<Kv>; ++f) {
        multiply_add<Factor>(scores[2 * n], a[f][0], low[f]);
        multiply_add<Factor>(scores[2 * n + 1], a[f][0], high[f]);
      }
    }
  }
  float rescale[2];
  const int32_t first = tile * Tile::kTokens;
  if (first >= plain.begin && first + Tile::kTokens <= plain.end) {
    online_softmax<Tile::kTokens, false>(work, item, seen, first, scores, rows, rescale);
  } else {
    online_softmax<Tile::kTokens, true>(work, item, seen, first, scores, rows, rescale);
  }
#pragma unroll
  for (int d = 0; d < kValueSize / 8; ++d) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[d][i] *= rescale[i / 2];
  }
  const unsigned char* values = keys + Tile::kKeys;
#pragma unroll
  for (int n = 0; n < Tile::kTokens / 16; ++n) {
    const uint32_t a[4] = {pack_probabilities<Factor>(scores[2 * n][0], scores[2 * n][1]),
                           pack_probabilities<Factor>(scores[2 * n][2], scores[2 * n][3]),
                           pack_probabilities<Factor>(scores[2 * n + 1][0], scores[2 * n + 1][1]),
                           pack_probabilities<Factor>(scores[2 * n + 1][2], scores[2 * n + 1][3])};
#pragma unroll
    for (int i = 0; i < kValueReads; ++i) {
      uint32_t left[kFactors<Kv>][2], right[kFactors<Kv>][2];
      load_columns_as_b<Kv, kValueSize>(left, right, values + n * 16 * kPitch<Kv, kValueSize>,
                                        i * kReadBytes);
#pragma unroll
      for (int f = 0; f < kFactors<Kv>; ++f) {
        const int d = 2 * (kFactors<Kv> * i + f);
        multiply_add<Factor>(out[d], a, left[f]);
        multiply_add<Factor>(out[d + 1], a, right[f]);
      }
    }
  }
}

// Writes a row's outputs of 16 dims, four in each of four lanes, in the query's type. `left` and
// `right` are the two parts of the factor's columns (tiles.cuh); `sum` has the same lift as they.
template <typename Kv>
__device__ void store_four(Dtype dtype, uint16_t* to, int32_t head_size, int t, const float* left,
                           const float* right, float sum, float scale) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int32_t dim = column_of<Kv>(t, j);
    const float low = (kIs8Bits<Kv> ? left[j] : (j == 0 ? left : right)[0]) / sum * scale;
    const float high = (kIs8Bits<Kv> ? right[j] : (j == 0 ? left : right)[1]) / sum * scale;
    if (dim >= head_size) continue;
    *reinterpret_cast<uint32_t*>(to + dim) = kIs8Bits<Kv> && dtype == Dtype::kBFloat16
                                                 ? pack<Bfloat>(low, high)
                                                 : pack<FactorOf<Kv>>(low, high);
  }
}

// Stores four dims of a row's partial outputs, as `store_four` does.
template <typename Kv>
__device__ void store_four_partials(float* to, int32_t head_size, int t, const float* left,
                                    const float* right) {
  constexpr float kLower = 1.0f / kLift<FactorOf<Kv>>;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int32_t dim = column_of<Kv>(t, j);
    if (dim >= head_size) continue;
    to[dim] = (kIs8Bits<Kv> ? left[j] : (j == 0 ? left : right)[0]) * kLower;
    to[dim + 1] = (kIs8Bits<Kv> ? right[j] : (j == 0 ? left : right)[1]) * kLower;
  }
}

template <typename Kv, int kValueSize>
__device__ void write_rows(const Work& work, const Item& item, int32_t first_row, int32_t num_rows,
                           const LongRows& rows, const float (&out)[kValueSize / 8][4]) {
  const int32_t group = work.cutting.group;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  const int32_t all_dims = static_cast<int32_t>(work.p.pages.value_head_size);
  const int32_t first_dim = item.part * kValueSize, head_size = all_dims - first_dim;
  const bool is_whole = item.sequence.cut.splits == 1;
  const float scale = value_scale(work.p.pages, item.kv_head);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float sum = rows.sum[j];
    sum += __shfl_xor_sync(kWholeWarp, sum, 1);
    sum += __shfl_xor_sync(kWholeWarp, sum, 2);
    const int32_t i = 16 * warp + lane / 4 + 8 * j;
    if (i >= num_rows) continue;
    const int32_t token = (first_row + i) / group;
    const int32_t head = item.kv_head * group + (first_row + i) % group;
    const int64_t row = (item.sequence.first_token + token) * work.p.num_heads + head;
    if (!is_whole) {
      const int64_t partial = partial_row(work, item.sequence, item.split, token, head);
      float* to = work.scratch.partial_outs + partial * all_dims + first_dim;
#pragma unroll
      for (int d = 0; d < kValueSize / 16; ++d) {
        store_four_partials<Kv>(to + 16 * d, head_size - 16 * d, lane % 4, &out[2 * d][2 * j],
                                &out[2 * d + 1][2 * j]);
      }
      if (lane % 4 == 0 && item.part == 0) {
        work.scratch.partial_states[2 * partial] = rows.maximum[j];
        work.scratch.partial_states[2 * partial + 1] = sum;
      }
      continue;
    }
    const Total total = with_sink(work, head, rows.maximum[j], sum);
    uint16_t* to = static_cast<uint16_t*>(work.p.out) + row * all_dims + first_dim;
#pragma unroll
    for (int d = 0; d < kValueSize / 16; ++d) {
      store_four<Kv>(work.p.query_dtype, to + 16 * d, head_size - 16 * d, lane % 4,
                     &out[2 * d][2 * j], &out[2 * d + 1][2 * j], total.sum * kLift<FactorOf<Kv>>,
                     scale * total.factor);
    }
    if (work.p.lse != nullptr && lane % 4 == 0 && item.part == 0) {
      work.p.lse[row] = log_sum_exp(total.maximum, total.sum);
    }
  }
}

template <typename Kv, int kHeadSize>
__device__ void attend_long_item(const Work& work, const Item& item, unsigned char* shared) {
  using Tile = LongTile<Kv, kHeadSize>;
  constexpr int kStageBytes = Tile::kKeys + Tile::kValues;
  unsigned char* const queries = shared;
  unsigned char* const ring = shared + Tile::kQueries;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const int32_t first_row = item.tile * kRowsOfLongTile;
  const int32_t all_rows = item.sequence.query_len * work.cutting.group;
  const int32_t num_rows = min_of(kRowsOfLongTile, all_rows - first_row);
  const Range seen = range_of(work, item, first_row, num_rows);
  const Range plain = seen_by_all(work, item, seen, first_row, num_rows);
  LongRows rows = long_rows(work, item, first_row, num_rows);
  float out[Tile::kValueSize / 8][4] = {};
  const int32_t begin = seen.begin / Tile::kTokens;
  const int32_t end = seen.begin < seen.end ? div_ceil(seen.end, Tile::kTokens) : begin;
  const auto is_seen = [&](int32_t tile, int32_t row) {
    return rows_that_see(work, item, first_row + row, num_rows - row, tile * Tile::kTokens,
                         Tile::kTokens) != 0;
  };
  const auto first_seen = [&](int32_t tile) {
    while (tile < end && !is_seen(tile, 0) && !is_seen(tile, kRowsOfLongTile / 2)) ++tile;
    return tile;
  };
  int32_t tile = first_seen(begin);
  if constexpr (!kIs8Bits<Kv>) {
    copy_queries<kHeadSize>(work, item, first_row, num_rows, queries);
  }
  copy_tile<Kv, kHeadSize>(work, item, seen, tile, ring);
  commit_copies();
  if constexpr (kIs8Bits<Kv>) {
    convert_queries<kHeadSize>(work, item, first_row, num_rows, rows, queries);
  }
  for (int stage = 0; tile < end; stage = 1 - stage) {
    const int32_t next = first_seen(tile + 1);
    wait_for_copies<0>();
    __syncthreads();  // Until the tile has arrived and the other stage has been read.
    if (next < end) {
      copy_tile<Kv, kHeadSize>(work, item, seen, next, ring + (1 - stage) * kStageBytes);
    }
    commit_copies();
    take_tile<Kv, kHeadSize>(work, item, seen, plain, tile, queries + 16 * warp * Tile::kQueryPitch,
                             ring + stage * kStageBytes, rows, out);
    tile = next;
  }
  wait_for_copies<0>();  // Of a split that none of the rows attends to.
  write_rows<Kv, Tile::kValueSize>(work, item, first_row, num_rows, rows, out);
}

// A block's first item is the one of its index; then it takes the next that no block has taken.
// Items differ much in length. Sequences with long ones come first, and of a sequence the longest.
template <typename Kv, int kHeadSize>
__global__ void __launch_bounds__(kLongWarps* kLanesOfWarp, 1) attend_long(Work work) {
  using Tile = LongTile<Kv, kHeadSize>;
  KVPLANE_DYNAMIC_SHARED(unsigned char, shared);
  // Two in turn: one may still be read while the other is written.
  int32_t* const next = reinterpret_cast<int32_t*>(shared + Tile::kPadding);
  wait_for_kernel_before();
  let_next_kernel_begin();
  const int32_t num_items = work.plan.long_ends[work.p.num_sequences - 1];
  int32_t i = static_cast<int32_t>(blockIdx.x);
  for (int turn = 0; i < num_items; turn = 1 - turn) {
    if (threadIdx.x == 0) {
      next[turn] = static_cast<int32_t>(gridDim.x) + atomicAdd(work.scratch.num_taken, 1);
    }
    const Plan& plan = work.plan;
    const Item item =
        find_item(work, plan.long_ends, plan.long_order, kRowsOfLongTile, work.long_parts, i);
    attend_long_item<Kv, kHeadSize>(work, item, shared);
    __syncthreads();  // Until this item's tiles have been read: the next item overwrites them.
    i = next[turn];
  }
}

template <typename Kv, int kHeadSize>
void launch_long_of(const Work& work, const Launch& how) {
  constexpr int kThreads = kLongWarps * kLanesOfWarp;
  constexpr size_t kBytes = LongTile<Kv, kHeadSize>::kSharedBytes;
  constexpr auto kKernel = &attend_long<Kv, kHeadSize>;
  const int64_t at_once = resident_blocks<kKernel>(kThreads, kBytes);
  launch_when<kKernel>(how.begins, {min_of(at_once, how.max_items)}, kThreads, kBytes, how.stream,
                       work);
}

template <typename Kv>
void launch_long(const Work& work, const Launch& how) {
  with_head_size(work.p.pages.head_size,
                 [&](auto head_size) { launch_long_of<Kv, head_size>(work, how); });
}

}  // namespace kvplane::cuda
