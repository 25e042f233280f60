// Attention of few rows over long contexts: decode, and speculative steps of a few tokens.
//
//        tokens of a split            warp w takes tiles w, w + 4, w + 8, ... of 16 tokens:
//   ┌────┬────┬────┬────┬────┬───     its own ring of tiles in flight, its own maximum,
//   │ w0 │ w1 │ w2 │ w3 │ w0 │ ...    sum and output; no barrier before the end of the split
//   └────┴────┴────┴────┴────┴───
//   scores  S^T [16 tokens, 8 rows]     = K [16 tokens, head_size] x Q^T [head_size, 8 rows]
//   output  O^T [16 dims, 8 rows] each += V^T [16 dims, 16 tokens] x P^T [16 tokens, 8 rows]
//
// Rows are the narrow side of the product, so eight of them suffice to fill it, and a thread holds
// the same rows in S^T and in O^T: outputs are rescaled without any exchange.
//
// A block takes a run of consecutive splits of one tile of rows. The ring runs on from one split to
// the next: their outputs pass through the stage that was just read, while the others are filled.
#pragma once

#include <type_traits>

#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/batch.cuh"
#include "cuda/attention/long/long_tile.cuh"
#include "cuda/attention/short/short_rows.cuh"
#include "cuda/attention/tiles.cuh"
#include "cuda/device/launch.h"

namespace kvplane::cuda {

// The shared memory of a warp: a ring of tiles, K before V. At the end of a split the stage that is
// to be filled next holds the warp's outputs and states of eight rows at a time. The number of
// stages changes no bit of the result. Behind the rings are shared queries and the warps' stages.
template <typename Kv, int kHeadSize, int kColumns, int kNumStages>
struct ShortRing {
  static constexpr int kStages = kNumStages;
  static constexpr int kWarps = kShortWarps<Kv, kHeadSize>;
  static constexpr int kThreads = kWarps * kLanesOfWarp;
  static constexpr int kRowBytes = kHeadSize * static_cast<int>(sizeof(Kv));
  static constexpr int kTile = kTileRows * kPitch<Kv, kHeadSize>;
  static constexpr int kStageBytes = 2 * kTile;
  static constexpr int kBytes = kStages * kStageBytes;
  static constexpr int kRows = 8 * kColumns;
  static constexpr int kOutPitch = kHeadSize + 4;  // floats; avoids bank conflicts
  static constexpr int kQueries = kWarps * kBytes;
  static constexpr int kLeft = kQueries + SharedQueries<Kv, kHeadSize, kColumns>::kBytes;
  static constexpr int kSharedBytes = kLeft + kWarps * static_cast<int>(sizeof(int32_t));
  static_assert((8 * kOutPitch + 2 * 8) * 4 <= kStageBytes);
};

// The stages that a ring can have: the most, and where `kFewStages` is fewer, those too. A tile of
// short rows takes little room, so four stages fit everywhere.
template <typename Kv, int kHeadSize>
constexpr int kMostStages = kHeadSize * sizeof(Kv) <= 128 ? 4 : 3;
template <typename Kv, int kHeadSize>
constexpr int kFewStages = kHeadSize * sizeof(Kv) <= 128 ? 4 : 2;

// Turns scores into probabilities and updates the rows' maxima and sums. `first` is the position of
// the tile's first token, and `shown` has the bits of rows_that_see. The outputs so far are to be
// multiplied by `rescale`.
template <int kColumns>
__device__ void online_softmax(const Work& work, Range seen, int32_t first, uint32_t shown,
                               float (&scores)[kColumns][4], RowsOfThread<kColumns>& rows,
                               float (&rescale)[kColumns][2]) {
  const int32_t t = static_cast<int32_t>(threadIdx.x) % 4;
  const int32_t g = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp / 4;
  const SoftCap cap = soft_cap(work);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Range own = visible(work.cutting.window, rows.position[c][j]);
      const bool is_shown = (shown >> (8 * c + 2 * t + j) & 1) != 0;
      float maximum = rows.maximum[c][j];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& score = scores[c][2 * half + j];
        const int32_t position = first + g + 8 * half;
        const bool is_seen = is_shown && position >= seen.begin && position < seen.end &&
                             position >= own.begin && position < own.end;
        const float bias = rows.slope[c][j] * static_cast<float>(position - rows.position[c][j]);
        score = is_seen ? cap.of<true>(score * rows.scale[c][j]) + bias : -INFINITY;
        maximum = fmaxf(maximum, score);
      }
#pragma unroll
      for (int bits = 4; bits < kLanesOfWarp; bits *= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(kWholeWarp, maximum, bits));
      }
      const float base = finite_maximum(maximum);
      rescale[c][j] = exp2_fast(rows.maximum[c][j] - base);
      rows.maximum[c][j] = maximum;
      scores[c][j] = exp2_fast(scores[c][j] - base);
      scores[c][2 + j] = exp2_fast(scores[c][2 + j] - base);
      rows.sum[c][j] = rows.sum[c][j] * rescale[c][j] + (scores[c][j] + scores[c][2 + j]);
    }
  }
}

// Stores a warp's results of the eight rows of a column: [8, kOutPitch] outputs, then states.
template <typename Kv, int kHeadSize, int kColumns>
__device__ void store_partials(const float (&out)[kHeadSize / 16][kColumns][4], int c,
                               const RowsOfThread<kColumns>& rows, float* left) {
  constexpr int kOutPitch = kHeadSize + 4;
  constexpr int kDimsApart = kIs8Bits<Kv> ? 2 : 1;  // of rows g and g + 1 of a factor
  constexpr int kHalf = kIs8Bits<Kv> ? 1 : 8;       // of rows g and g + 8
  constexpr float kLower = 1.0f / kLift<FactorOf<Kv>>;
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfWarp;
  const int g = lane / 4, t = lane % 4;
  float* states = left + 8 * kOutPitch;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int row = 2 * t + j;
    float sum = rows.sum[c][j];
#pragma unroll
    for (int bits = 4; bits < kLanesOfWarp; bits *= 2) {
      sum += __shfl_xor_sync(kWholeWarp, sum, bits);
    }
    if (g == 0) {
      states[2 * row] = rows.maximum[c][j];
      states[2 * row + 1] = sum;
    }
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; ++k) {
      float* dims = left + row * kOutPitch + 16 * k + kDimsApart * g;
      dims[0] = out[k][c][j] * kLower;
      dims[kHalf] = out[k][c][2 + j] * kLower;
    }
  }
}

// By the whole block: adds up the warps' outputs of a column, in order, and writes rows or partial
// rows. `first` is the column's first row, `count` the rows that there are, `left` where each warp
// left its results.
template <typename Kv, int kHeadSize, bool kIsShared, int kWarps>
__device__ void merge_partials(const Work& work, const Item& item, int32_t split, int32_t first,
                               int32_t count, const float* const (&left)[kWarps]) {
  constexpr int kOutPitch = kHeadSize + 4;
  const int32_t head_size = static_cast<int32_t>(work.p.pages.value_head_size);
  const bool is_whole = !kIsShared && item.sequence.cut.splits == 1;
  const float scale = value_scale(work.p.pages, item.kv_head);
  for (int32_t i = 0; i < count; ++i) {
    const RowPlace at = place_of_row<kIsShared>(work, item, first + i);
    if (kIsShared && split >= at.sequence->shared_splits) continue;
    const int32_t state = 8 * kOutPitch + 2 * i;
    float maximum = -INFINITY;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) maximum = fmaxf(maximum, left[w][state]);
    const float base = finite_maximum(maximum);
    float weights[kWarps], sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      weights[w] = exp2_fast(left[w][state] - base);
      sum += weights[w] * left[w][state + 1];
    }
    const int64_t row = (at.sequence->first_token + at.token) * work.p.num_heads + at.head;
    const int64_t partial = partial_row(work, *at.sequence, split, at.token, at.head);
    const Total total = with_sink(work, at.head, maximum, sum);
    for (int32_t d = static_cast<int32_t>(threadIdx.x); d < head_size; d += kWarps * kLanesOfWarp) {
      float value = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) value += weights[w] * left[w][i * kOutPitch + d];
      if (is_whole) {
        store_number(work.p, row * head_size + d, value / total.sum * (scale * total.factor));
      } else {
        work.scratch.partial_outs[partial * head_size + d] = value;
      }
    }
    if (threadIdx.x != 0) continue;
    if (!is_whole) {
      work.scratch.partial_states[2 * partial] = maximum;
      work.scratch.partial_states[2 * partial + 1] = sum;
    } else if (work.p.lse != nullptr) {
      work.p.lse[row] = log_sum_exp(total.maximum, total.sum);
    }
  }
}

// Ends a split: passes each column's results through a stage that the warp neither reads nor fills.
template <typename Kv, int kHeadSize, int kColumns, int kStages, bool kIsShared>
__device__ void end_split(const Work& work, const Item& item, int32_t split, int32_t first_row,
                          int32_t num_rows, unsigned char* shared, int stage,
                          const float (&out)[kHeadSize / 16][kColumns][4],
                          const RowsOfThread<kColumns>& rows) {
  using Ring = ShortRing<Kv, kHeadSize, kColumns, kStages>;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  int32_t* const places = reinterpret_cast<int32_t*>(shared + Ring::kLeft);
  const int32_t place = warp * Ring::kBytes + stage * Ring::kStageBytes;
  __syncwarp();  // Until all lanes have read the stage.
  if (threadIdx.x % kLanesOfWarp == 0) places[warp] = place;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (8 * c >= num_rows) break;
    store_partials<Kv, kHeadSize>(out, c, rows, reinterpret_cast<float*>(shared + place));
    __syncthreads();
    const float* left[Ring::kWarps];
#pragma unroll
    for (int w = 0; w < Ring::kWarps; ++w) {
      left[w] = reinterpret_cast<const float*>(shared + places[w]);
    }
    merge_partials<Kv, kHeadSize, kIsShared>(work, item, split, first_row + 8 * c,
                                             min_of(8, num_rows - 8 * c), left);
    __syncthreads();  // Until the results have been read.
  }
}

template <typename Kv, int kHeadSize, int kColumns>
using QueriesOf = std::conditional_t<SharedQueries<Kv, kHeadSize, kColumns>::kIsUsed,
                                     SharedQueries<Kv, kHeadSize, kColumns>,
                                     QueryRegisters<Kv, kHeadSize, kColumns>>;

// Attends to `num_splits` splits from an item's on: each warp to its tiles of 16 tokens,
// kStages - 1 of them in flight at any time.
template <typename Kv, int kHeadSize, int kColumns, int kStages, bool kIsShared>
__device__ void attend_run(const Work& work, const Item& item, int32_t num_splits,
                           unsigned char* shared) {
  using Ring = ShortRing<Kv, kHeadSize, kColumns, kStages>;
  using Factor = FactorOf<Kv>;
  constexpr int kReads = Ring::kRowBytes / kReadBytes, kWarps = Ring::kWarps;
  constexpr int kUnroll = kHeadSize > 256 ? 1 : kColumns == 4 ? 2 : 4;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  unsigned char* const ring = shared + warp * Ring::kBytes;
  const int32_t first_row = item.tile * Ring::kRows;
  const int32_t all_rows =
      (kIsShared ? item.num_members : item.sequence.query_len) * work.cutting.group;
  const int32_t num_rows = min_of(Ring::kRows, all_rows - first_row);
  // Every row of a family's item sees all of the splits that it shares.
  const Range seen = range_of(work, item, first_row, kIsShared ? 1 : num_rows, num_splits);
  RowsOfThread<kColumns> rows;
  set_rows<kIsShared>(work, item, first_row, num_rows, rows);
  QueriesOf<Kv, kHeadSize, kColumns> queries;
  queries.template load<kIsShared>(work, item, first_row, num_rows, shared + Ring::kQueries, rows);
  float out[kHeadSize / 16][kColumns][4] = {};

  const auto find = [&](int32_t tile) { return find_tile_row(work, item, tile * kTileRows, seen); };
  const int32_t row_of_lane = lane % kTileRows;
  const auto read = [&](int32_t tile) {
    return read_entry(work, item.sequence.index, tile * kTileRows + row_of_lane, seen);
  };
  // Tile n of the sequence is for warp n % kWarps, wherever the range begins.
  const int32_t begin = seen.begin / kTileRows;
  const int32_t end = seen.begin < seen.end ? div_ceil(seen.end, kTileRows) : begin;
  const int32_t first = begin + (warp + kWarps - begin % kWarps) % kWarps;
  const auto start_copy = [&](int32_t tile, int stage, int64_t row) {
    if (tile < end) {
      const Kv* data = static_cast<const Kv*>(work.p.pages.data);
      const PagesParams& pages = work.p.pages;
      unsigned char* keys = ring + stage * Ring::kStageBytes;
      // Thirty-two rows leave no registers for a second way.
      if (kColumns < 4 && is_in_one_block(work, tile * kTileRows, seen)) {
        load_tile_of_block<Kv, kHeadSize>(data, row, 0, pages.token_stride, pages.head_size, keys);
        load_tile_of_block<Kv, kHeadSize>(data, row, kTileRows, pages.value_token_stride,
                                          pages.value_head_size, keys + Ring::kTile);
      } else {
        load_tile_rows<Kv, kHeadSize, kUnroll>(data, row, 0, pages.head_size, keys);
        load_tile_rows<Kv, kHeadSize, kUnroll>(data, row, kTileRows, pages.value_head_size,
                                               keys + Ring::kTile);
      }
    }
    commit_copies();
  };
  // The warp's first tile, from one on, that a row sees, and which rows do. A tile is in one block
  // of a mask. The widest tiles leave no registers for a mask, and have none (attention.cu).
  static_assert(kTileRows == kMaskUnit);
  const auto first_seen = [&](int32_t tile, uint32_t& shown) {
    if constexpr (kIsShared || Ring::kRows > kRowsOfMaskedTile) return tile;
    for (; tile < end; tile += kWarps) {
      shown = rows_that_see(work, item, first_row, num_rows, tile * kTileRows, kTileRows);
      if (shown != 0) break;
    }
    return tile;
  };
  uint32_t shown = kWholeWarp, shown_ahead = kWholeWarp;
  int32_t tile = first_seen(first, shown), ahead = tile;
#pragma unroll
  for (int i = 0; i < Ring::kStages - 1; ++i) {
    start_copy(ahead, i, find(ahead));
    ahead = first_seen(ahead + kWarps, shown_ahead);
  }
  // The next tile's table entries are read while this one's copies are in flight, and only then
  // looked at.
  RawEntry next_entry = read(ahead);
  int stage = 0;
  for (int32_t n = 0; n < num_splits; ++n) {
    const Cut& cut = item.sequence.cut;
    const int32_t next_split = cut.first + item.split + n + 1;
    const int32_t end_of_split =
        n + 1 < num_splits ? min_of(end, next_split * (cut.tokens / kTileRows)) : end;
    for (; tile < end_of_split; tile = first_seen(tile + kWarps, shown)) {
      wait_for_copies<Ring::kStages - 2>();
      __syncwarp();  // Until all lanes' copies have arrived and the stage to be filled has been
                     // read.
      const int64_t row = row_of_entry(work, next_entry, item.kv_head,
                                       ahead * kTileRows + row_of_lane, seen, lane >= kTileRows);
      start_copy(ahead, (stage + Ring::kStages - 1) % Ring::kStages, row);
      ahead = first_seen(ahead + kWarps, shown_ahead);
      next_entry = read(ahead);

      const unsigned char* keys = ring + stage * Ring::kStageBytes;
      const unsigned char* values = keys + Ring::kTile;
      float scores[kColumns][4] = {};
// Unrolled less where reads in flight would take registers that the outputs need.
#pragma unroll(kHeadSize > 256 ? 4 : kReads)
      for (int i = 0; i < kReads; ++i) {
        uint32_t a[kFactors<Kv>][4];
        load_rows<Kv, kHeadSize>(a, keys, i * kReadBytes);
#pragma unroll
        for (int f = 0; f < kFactors<Kv>; ++f) {
          const int k = kFactors<Kv> * i + f;
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            uint32_t b[2];
            queries.get(c, k, b);
            multiply_add<Factor>(scores[c], a[f], b);
          }
        }
      }
      float rescale[kColumns][2];
      online_softmax(work, seen, tile * kTileRows, shown, scores, rows, rescale);
      uint32_t probabilities[kColumns][2];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        probabilities[c][0] = transpose(pack_probabilities<Factor>(scores[c][0], scores[c][1]));
        probabilities[c][1] = transpose(pack_probabilities<Factor>(scores[c][2], scores[c][3]));
      }
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        uint32_t a[kFactors<Kv>][4];
        load_columns<Kv, kHeadSize>(a, values, i * kReadBytes);
#pragma unroll
        for (int f = 0; f < kFactors<Kv>; ++f) {
          const int k = kFactors<Kv> * i + f;
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
#pragma unroll
            for (int j = 0; j < 4; ++j) out[k][c][j] *= rescale[c][j % 2];
            multiply_add<Factor>(out[k][c], a[f], probabilities[c]);
          }
        }
      }
      stage = (stage + 1) % Ring::kStages;
    }
    const int free_stage = (stage + Ring::kStages - 1) % Ring::kStages;
    end_split<Kv, kHeadSize, kColumns, kStages, kIsShared>(work, item, item.split + n, first_row,
                                                           num_rows, shared, free_stage, out, rows);
    begin_rows(rows);
#pragma unroll
    for (auto& of_dims : out) {
#pragma unroll
      for (auto& of_column : of_dims) {
#pragma unroll
        for (float& number : of_column) number = 0.0f;
      }
    }
  }
  wait_for_copies<0>();
}

template <typename Kv, int kHeadSize, int kColumns, int kStages>
__global__ void __launch_bounds__(kShortWarps<Kv, kHeadSize>* kLanesOfWarp, 1)
    attend_short(Work work) {
  using Ring = ShortRing<Kv, kHeadSize, kColumns, kStages>;
  KVPLANE_DYNAMIC_SHARED(unsigned char, shared);
  wait_for_kernel_before();
  let_next_kernel_begin();
  begin_call(work);
  const int32_t num_sequences = static_cast<int32_t>(work.p.num_sequences);
  const int64_t* weights = work.plan.weights;
  const auto before = [&](int32_t s) { return s == 0 ? 0 : weights[s - 1]; };
  // The block's share of all weights: of the items that begin in it.
  const int64_t share_end = weights[num_sequences - 1] * (blockIdx.x + 1) / gridDim.x;
  int64_t at = weights[num_sequences - 1] * blockIdx.x / gridDim.x;
  if (at < share_end) {
    const int32_t s = find_sequence(weights, num_sequences, at);
    const int64_t weight = work.plan.sequences[s].weight;
    at = before(s) + div_ceil(at - before(s), weight) * weight;
  }
  while (at < share_end) {
    const int32_t s = find_sequence(weights, num_sequences, at);
    const Sequence sequence = work.plan.sequences[s];
    int32_t local = static_cast<int32_t>((at - before(s)) / sequence.weight);
    const int64_t num_left = div_ceil<int64_t>(share_end - at, sequence.weight);
    const int32_t own_splits = sequence.cut.splits - sequence.shared_splits;
    const int32_t split = sequence.shared_splits + local % own_splits;
    local /= own_splits;
    const int32_t num_splits =
        static_cast<int32_t>(min_of<int64_t>(sequence.cut.splits - split, num_left));
    const Item item = {
        sequence, local % work.cutting.num_kv_heads, local / work.cutting.num_kv_heads, split, 0, 0,
        0};
    attend_run<Kv, kHeadSize, kColumns, kStages, false>(work, item, num_splits, shared);
    at += int64_t{num_splits} * sequence.weight;
  }
}

template <typename Kv, int kHeadSize, int kColumns, int kStages>
int64_t resident_short_blocks() {
  using Ring = ShortRing<Kv, kHeadSize, kColumns, kStages>;
  if (Ring::kSharedBytes > max_shared_bytes()) return 0;
  constexpr auto kKernel = &attend_short<Kv, kHeadSize, kColumns, kStages>;
  return resident_blocks<kKernel>(Ring::kThreads, Ring::kSharedBytes);
}

template <typename Kv, int kHeadSize, int kColumns, int kStages>
void launch_short_with(const Work& work, const Launch& how) {
  using Ring = ShortRing<Kv, kHeadSize, kColumns, kStages>;
  constexpr auto kKernel = &attend_short<Kv, kHeadSize, kColumns, kStages>;
  const int64_t at_once = resident_short_blocks<Kv, kHeadSize, kColumns, kStages>();
  launch_when<kKernel>(how.begins, {min_of(at_once, how.max_items)}, Ring::kThreads,
                       Ring::kSharedBytes, how.stream, work);
}

// The most stages, unless only fewer leave room for a second block beside the first: a block's
// copies then hide the end of the other's item.
template <typename Kv, int kHeadSize, int kColumns>
void launch_short_of(const Work& work, const Launch& how) {
  constexpr int kMost = kMostStages<Kv, kHeadSize>, kFew = kFewStages<Kv, kHeadSize>;
  if constexpr (kFew < kMost) {
    const int64_t with_most = resident_short_blocks<Kv, kHeadSize, kColumns, kMost>();
    const int64_t with_few = resident_short_blocks<Kv, kHeadSize, kColumns, kFew>();
    if (with_most < 2 * num_multiprocessors() && with_few > with_most) {
      return launch_short_with<Kv, kHeadSize, kColumns, kFew>(work, how);
    }
  }
  launch_short_with<Kv, kHeadSize, kColumns, kMost>(work, how);
}

template <typename Kv, int kHeadSize>
void launch_short_of(const Work& work, const Launch& how) {
  if constexpr (short_tile_rows(32, kHeadSize) == 32) {
    if (work.short_tile_rows == 32) {
      return launch_short_of<Kv, kHeadSize, 4>(work, how);
    }
  }
  if constexpr (short_tile_rows(16, kHeadSize) == 16) {
    if (work.short_tile_rows == 16) {
      return launch_short_of<Kv, kHeadSize, 2>(work, how);
    }
  }
  launch_short_of<Kv, kHeadSize, 1>(work, how);
}

template <typename Kv>
void launch_short(const Work& work, const Launch& how) {
  with_head_size(work.p.pages.head_size,
                 [&](auto head_size) { launch_short_of<Kv, head_size>(work, how); });
}

template <typename Kv>
size_t least_shared_bytes(int64_t head_size) {
  return with_head_size(head_size, [](auto size) -> size_t {
    constexpr int kStages = kFewStages<Kv, size>;
    constexpr int kShort = ShortRing<Kv, size, 1, kStages>::kSharedBytes;
    return max_of(kShort, LongTile<Kv, size>::kSharedBytes);
  });
}

}  // namespace kvplane::cuda
