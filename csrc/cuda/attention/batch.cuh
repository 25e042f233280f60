// A batch in the attention kernels: its sequences, and how they are cut into items of work.
//
// - row: one query token at one query head. Row r of a sequence and KV head is the sequence's query
//   token r / group, at query head r % group of the KV head's group.
// - short sequence: one query token, or up to kShortRows rows of a KV head. It is cut into splits,
//   at multiples of split_tokens of its positions, and each split into tiles of rows.
// - long sequence: cut into larger tiles of rows, and into larger splits where its context is much
//   longer than its query.
// - family: decodes whose contexts begin with the same blocks. Whole splits that they share are
//   attended to in items of several of them.
// - item: one KV head of one tile of rows of one split.
//
// How a sequence is cut depends only on its own lengths: cutting.h.
#pragma once

#include <cfloat>
#include <cstdint>

#include "cuda/attention/cutting.h"
#include "cuda/device/device.h"
#include "cuda/device/eight_bits.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/operations.h"
#include "kvplane/params.h"

namespace kvplane::cuda {

constexpr int kMaxHeadSize = 512;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// A sequence whose lengths the plan kernel has checked.
struct alignas(16) Sequence {
  int64_t first_token;    // index into the query tensor
  int64_t first_partial;  // index into the plan's arrays, where there is more than one split
  int32_t index;
  int32_t query_len;
  int32_t context_len;
  Cut cut;
  int32_t weight;         // of each of its items
  int32_t shared_splits;  // the ones attended to together with others of its family

  __device__ int32_t first_position() const { return context_len - query_len; }
};

// A sequence in its family.
struct Kin {
  int32_t first;   // the family's first sequence; -1: of no family
  int32_t rank;    // sequences of the family before it
  int32_t size;    // of the family
  int32_t splits;  // leading splits in the same blocks as those of the first; of itself, 0
};

// The plan kernel's output, which the other kernels read.
struct Plan {
  Sequence* sequences;  // [num_sequences]
  int32_t* short_ends;  // [num_sequences]: items of the short sequences up to this one
  // The sequences that have long items, the ones with the longest first: their indices, and the
  // number of items up to each; after them, the number of all items.
  int32_t* long_order;  // [num_sequences]
  int32_t* long_ends;   // [num_sequences]
  int64_t* weights;     // [num_sequences]: of the items of the short sequences up to this one
  int32_t* split_ends;  // [num_sequences]: query tokens of sequences of more than one split
  // Only where work.shared_rows > 0. Members are sequences, one family's after the other's.
  Kin* kin;                // [num_sequences]
  int32_t* family_starts;  // [num_sequences]: of a family's first sequence: its first member
  int32_t* family_splits;  // [num_sequences]: likewise, the most splits that another one shares
  int32_t* members;        // [num_sequences]
  int32_t* shared_ends;    // [num_sequences]: items of the tiles that begin with members up to this
};

// Buffers that the kernels of one call write and read, in its workspace.
struct Scratch {
  int32_t* num_taken;  // items of long sequences that blocks have taken beside their first
  // One entry for each split, token and query head of a sequence of more than one split.
  float* partial_states;  // [entries, 2]: maximum (base 2) and sum of the exponentials
  float* partial_outs;    // [entries, value_head_size], not yet divided by the sum, nor scaled
};

// The parameter of every attention kernel.
struct Work {
  PagedAttentionParams p;
  Plan plan;
  Scratch scratch;
  Cutting cutting;
  int32_t* faults;
  int64_t max_partials;   // room in the workspace, in query tokens
  int32_t max_query_len;  // 0: not known
  int32_t short_tile_rows;
  int32_t long_tile_rows;  // 0: long sequences are in the list of short items
  int32_t long_parts;      // of the values' dims: a long item attends to one of them
  int32_t shared_rows;     // of a tile of several decodes; 0: nothing is shared
  int32_t block_shift;     // the base-2 logarithm of the block size; -1: it is no power of two
};

struct Item {
  Sequence sequence;
  int32_t kv_head;
  int32_t tile;
  int32_t split;
  int32_t part;  // of the values' dims
  // For a family's item, whose sequence is the family's first:
  int32_t first_member;
  int32_t num_members;
};

// Decodes of a family whose rows share a tile.
__host__ __device__ inline int32_t members_of_tile(const Work& work) {
  return work.shared_rows / work.cutting.group;
}

__device__ inline void report(int32_t* faults, int32_t fault) {
  if (faults != nullptr) atomicOr(faults, fault);
}

// The positions of `splits` splits that rows [first_row, first_row + num_rows) attend to.
__device__ inline Range range_of(const Work& work, const Item& item, int32_t first_row,
                                 int32_t num_rows, int32_t splits = 1) {
  const Sequence& sequence = item.sequence;
  const int32_t group = work.cutting.group;
  const int32_t first = sequence.first_position() + first_row / group;
  const int32_t last = sequence.first_position() + (first_row + num_rows - 1) / group;
  const Range seen = {visible(work.cutting.window, first).begin, last + 1};
  if (sequence.cut.splits == 1) return seen;
  const int64_t begin = int64_t{sequence.cut.first + item.split} * sequence.cut.tokens;
  const int64_t end = begin + int64_t{splits} * sequence.cut.tokens;
  return {static_cast<int32_t>(max_of<int64_t>(seen.begin, begin)),
          static_cast<int32_t>(min_of<int64_t>(seen.end, end))};
}

// The query token and head of a row of an item, and its sequence.
struct RowPlace {
  const Sequence* sequence;
  int32_t token;  // of the sequence's
  int32_t head;
};

template <bool kIsShared>
__device__ inline RowPlace place_of_row(const Work& work, const Item& item, int32_t row) {
  const int32_t index = row / work.cutting.group;
  const int32_t head = item.kv_head * work.cutting.group + row % work.cutting.group;
  if constexpr (!kIsShared) return {&item.sequence, index, head};
  // A row that is missing may be of any sequence.
  const int32_t member = item.first_member + min_of(index, item.num_members - 1);
  return {&work.plan.sequences[work.plan.members[member]], 0, head};
}

// Whether a query of a sequence sees the block of keys that position `key` is in, as far as the
// call's mask of blocks says. Only where there is one.
__device__ inline bool sees_block(const Work& work, int32_t sequence, int32_t head,
                                  int32_t position, int32_t key) {
  const BlockMask& mask = work.p.blocks;
  const int32_t block_tokens = static_cast<int32_t>(mask.block_tokens);
  const int32_t block = key / block_tokens;
  if (position / block_tokens - block < mask.local_blocks) return true;
  return mask.seen[sequence * mask.sequence_stride + head * mask.num_blocks +
                   block % static_cast<int32_t>(mask.num_blocks)] != 0;
}

// By a warp, the same for all of its lanes: a bit for each of up to 32 rows of an item, which says
// whether a mask of blocks shows it a token of a tile. All bits where there is no mask. Tiles of no
// bits are neither copied nor computed.
__device__ inline uint32_t rows_that_see(const Work& work, const Item& item, int32_t first_row,
                                         int32_t num_rows, int32_t first, int32_t num_tokens) {
  if (work.p.blocks.seen == nullptr) return kWholeWarp;
  const int32_t row = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  bool is_seen = false;
  if (row < num_rows) {
    const RowPlace at = place_of_row<false>(work, item, first_row + row);
    const int32_t position = at.sequence->first_position() + at.token;
    for (int32_t key = first; key < first + num_tokens; key += static_cast<int32_t>(kMaskUnit)) {
      is_seen |= sees_block(work, at.sequence->index, at.head, position, key);
    }
  }
  return __ballot_sync(kWholeWarp, is_seen);
}

// The sequence of an item: the first whose end is past it. The lanes of a warp search 32 places at
// once, so a thousand sequences take two steps.
template <typename T>
__device__ inline int32_t find_sequence(const T* ends, int32_t num_sequences, T item) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  int32_t first = 0, count = num_sequences;
  while (count > 1) {
    const int32_t step = div_ceil(count, kLanesOfWarp);
    const int32_t last = min_of((lane + 1) * step, count) - 1;
    const unsigned past = __ballot_sync(kWholeWarp, ends[first + last] > item);
    const int32_t skipped = (__ffs(past) - 1) * step;
    first += skipped;
    count = min_of(step, count - skipped);
  }
  return first;
}

// `order`: the sequences that `ends` are of; null: in the batch's order.
__device__ inline Item find_item(const Work& work, const int32_t* ends, const int32_t* order,
                                 int32_t tile_rows, int32_t num_parts, int32_t item) {
  const int32_t place = find_sequence(ends, static_cast<int32_t>(work.p.num_sequences), item);
  int32_t local = item - (place == 0 ? 0 : ends[place - 1]);
  const Sequence sequence = work.plan.sequences[order == nullptr ? place : order[place]];
  const int32_t num_kv_heads = work.cutting.num_kv_heads;
  const int32_t num_tiles = div_ceil(sequence.query_len * work.cutting.group, tile_rows);
  const int32_t part = num_parts == 1 ? 0 : local % num_parts;
  local /= num_parts;
  // The last tile of rows attends to most, and comes first.
  const int32_t tile = num_tiles - 1 - local / num_kv_heads % num_tiles;
  return {sequence, local % num_kv_heads, tile, local / num_kv_heads / num_tiles, part, 0, 0};
}

// A table's entry as it was read. Nothing depends on its value, so that the code after the read
// does not wait for it.
struct RawEntry {
  uint32_t low;
  uint32_t high;  // of an int64
};

__device__ inline bool is_in(Range range, int32_t position) {
  return position >= range.begin && position < range.end;
}

// Where a position is in its sequence's table, and in its block. Block sizes that are powers of two
// take a shift, since a division takes 30 instructions.
struct PlaceInTable {
  uint32_t entry;
  uint32_t offset;
};

__device__ inline PlaceInTable place_in_table(const Work& work, int32_t position) {
  const uint32_t at = static_cast<uint32_t>(position);
  const uint32_t block_size = static_cast<uint32_t>(work.p.pages.block_size);
  if (work.block_shift >= 0) return {at >> work.block_shift, at & (block_size - 1)};
  return {at / block_size, at % block_size};
}

// Reads the entry of a position; none for a position outside `wanted`.
__device__ inline RawEntry read_entry(const Work& work, int32_t sequence, int32_t position,
                                      Range wanted) {
  RawEntry raw = {0, 0};
  if (!is_in(wanted, position)) return raw;
  const int64_t entry = sequence * work.p.max_blocks + place_in_table(work, position).entry;
  const uint32_t* words = static_cast<const uint32_t*>(work.p.block_tables);
  if (work.p.wide_block_tables) {
    raw = {words[2 * entry], words[2 * entry + 1]};
  } else {
    raw.low = words[entry];
  }
  return raw;
}

// The offset of a position's key or value, in elements from the pages' start; negative for a
// position outside `wanted`, and for an entry that is not the id of a block.
__device__ inline int64_t row_of_entry(const Work& work, RawEntry raw, int32_t kv_head,
                                       int32_t position, Range wanted, bool is_value) {
  if (!is_in(wanted, position)) return -1;
  const PagesParams& pages = work.p.pages;
  const uint32_t offset = place_in_table(work, position).offset;
  const int64_t block = work.p.wide_block_tables
                            ? static_cast<int64_t>(uint64_t{raw.high} << 32 | raw.low)
                            : static_cast<int32_t>(raw.low);
  if (block < 0 || block >= pages.num_blocks) {
    report(work.faults, kBadBlockTables);
    return -1;
  }
  const int64_t head_stride = is_value ? pages.value_head_stride : pages.head_stride;
  const int64_t token_stride = is_value ? pages.value_token_stride : pages.token_stride;
  return block * pages.block_stride + (is_value ? pages.kv_stride : 0) + kv_head * head_stride +
         offset * token_stride;
}

__device__ inline int64_t find_row(const Work& work, int32_t sequence, int32_t kv_head,
                                   int32_t position, Range wanted, bool is_value) {
  const RawEntry raw = read_entry(work, sequence, position, wanted);
  return row_of_entry(work, raw, kv_head, position, wanted, is_value);
}

// Stored keys and values of a head are multiplied by these; 1 where pages have no scales.
__device__ inline float key_scale(const PagesParams& pages, int64_t kv_head) {
  return pages.key_scales == nullptr ? 1.0f : pages.key_scales[kv_head * pages.key_scale_stride];
}

__device__ inline float value_scale(const PagesParams& pages, int64_t kv_head) {
  if (pages.value_scales == nullptr) return 1.0f;
  return pages.value_scales[kv_head * pages.value_scale_stride];
}

__device__ inline bool is_scale(float number) { return number > 0.0f && number <= FLT_MAX; }

__device__ inline void check_scales(const Work& work, const float* scales, int64_t stride,
                                    int32_t fault) {
  if (scales == nullptr) return;
  for (int64_t head = threadIdx.x; head < work.p.pages.num_kv_heads; head += blockDim.x) {
    if (!is_scale(scales[head * stride])) report(work.faults, fault);
  }
}

// The first kernel of a call calls this for all of them: it checks scales and clears a counter.
__device__ inline void begin_call(const Work& work) {
  if (blockIdx.x != 0) return;
  const PagesParams& pages = work.p.pages;
  check_scales(work, pages.key_scales, pages.key_scale_stride, kBadKeyScales);
  check_scales(work, pages.value_scales, pages.value_scale_stride, kBadValueScales);
  if (threadIdx.x == 0) *work.scratch.num_taken = 0;
}

// A factor of scores that is too large for fp32 becomes the largest number: infinity times a zero
// product would be NaN.
__device__ inline float finite(float factor) { return fminf(fmaxf(factor, -FLT_MAX), FLT_MAX); }

// The entry in partial_states and partial_outs of a split, token and query head.
__device__ inline int64_t partial_row(const Work& work, const Sequence& sequence, int32_t split,
                                      int32_t token, int32_t head) {
  return sequence.first_partial + (int64_t{split} * sequence.query_len + token) * work.p.num_heads +
         head;
}

// Writes an element of the output, in the query's type.
__device__ inline void store_number(const PagedAttentionParams& p, int64_t index, float value) {
  if (p.query_dtype == Dtype::kFloat32) {
    static_cast<float*>(p.out)[index] = value;
  } else if (p.query_dtype == Dtype::kFloat16) {
    static_cast<Half*>(p.out)[index] = from_float<Half>(value);
  } else {
    static_cast<Bfloat*>(p.out)[index] = from_float<Bfloat>(value);
  }
}

// Scores are in base 2, so that a probability takes one instruction. Without a visible position the
// maximum is -infinity; any finite number in its place makes the probabilities zero.
__device__ inline float finite_maximum(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

__device__ inline float log_sum_exp(float maximum, float sum) {
  return (maximum + log2f(sum)) * kLn2;
}

// The hyperbolic tangent; its error is a few times that of fp32, relative to the result.
__device__ inline float tanh_fast(float x) {
  const float square = x * x;
  const float of_small = x * (1.0f + square * (square * (2.0f / 15.0f) - 1.0f / 3.0f));
  const float of_large = 1.0f - 2.0f * reciprocal_fast(exp2_fast(x * (2.0f * kLog2E)) + 1.0f);
  return fabsf(x) < 0.1f ? of_small : of_large;
}

// The soft cap of scores in base 2. Without one, scores stay as they are.
struct SoftCap {
  float cap;  // in base 2; 0: none
  float inverse;

  template <bool kIsFast>
  __device__ float of(float score) const {
    if (cap == 0.0f) return score;
    return cap * (kIsFast ? tanh_fast(score * inverse) : tanhf(score * inverse));
  }
};

__device__ inline SoftCap soft_cap(const Work& work) {
  const float cap = finite(work.p.logit_soft_cap * kLog2E);
  return {cap, cap == 0.0f ? 0.0f : 1.0f / cap};
}

// A row's sum with that of its sink, and the factor of its output and of the sum without.
struct Total {
  float maximum;
  float sum;
  float factor;
};

__device__ inline Total with_sink(const Work& work, int64_t head, float maximum, float sum) {
  if (work.p.sinks == nullptr) return {maximum, sum, 1.0f};
  const float sink = finite(work.p.sinks[head] * kLog2E);
  const float largest = fmaxf(maximum, sink);
  const float factor = exp2f(maximum - largest);
  return {largest, sum * factor + exp2f(sink - largest), factor};
}

}  // namespace kvplane::cuda
