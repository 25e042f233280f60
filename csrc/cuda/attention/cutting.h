// How a sequence is cut into splits: by its own lengths, the model's heads and the settings, never
// by the rest of the batch, so that no bit of a result depends on the batch. On the device for the
// kernels, and on the host to know how much memory the partial results of a batch need.
#pragma once

#include <cstdint>

#include "cuda/attention/tile_sizes.h"
#include "cuda/device/device.h"
#include "kvplane/params.h"

namespace kvplane::cuda {

// A long sequence is cut until it has about so many items: two for each block that a large GPU runs
// at once. Then one sequence keeps the GPU busy, and its partial results stay within 40 MB.
constexpr int kItemsOfLongSequence = 512;
// The least split of a long sequence, in short splits. A row's partial result is written and read
// once for each split: with these splits, about 5 % of the time of its products.
constexpr int kLeastLongSplits = 4;

// Half-open range of positions in a sequence.
struct Range {
  int32_t begin;
  int32_t end;
};

struct Cutting {
  int32_t group;  // query heads of a KV head
  int32_t num_kv_heads;
  int32_t split_tokens;
  int64_t window;  // 0: none
};

__host__ __device__ inline int64_t group_of(const PagedAttentionParams& p) {
  return p.num_heads / p.pages.num_kv_heads;
}

__host__ __device__ inline Cutting cutting_of(const PagedAttentionParams& p, int64_t split_tokens) {
  return {static_cast<int32_t>(group_of(p)), static_cast<int32_t>(p.pages.num_kv_heads),
          static_cast<int32_t>(split_tokens), p.sliding_window_tokens};
}

__host__ __device__ inline bool is_short(int64_t query_len, int64_t group) {
  return query_len == 1 || query_len * group <= kShortRows;
}

// The most tokens of a short sequence.
__host__ __device__ inline int64_t max_short_tokens(int64_t group) {
  return max_of<int64_t>(1, kShortRows / group);
}

// The positions that a query token attends to.
__host__ __device__ inline Range visible(int64_t window, int32_t position) {
  const int64_t begin = window > 0 ? position + 1 - window : 0;
  return {static_cast<int32_t>(max_of<int64_t>(0, begin)), position + 1};
}

// The splits that a long sequence of so many query tokens is cut into at most.
__host__ __device__ inline int32_t max_long_splits(const Cutting& c, int32_t query_len) {
  const int64_t tiles = div_ceil<int64_t>(int64_t{query_len} * c.group, kRowsOfLongTile);
  const int64_t splits = kItemsOfLongSequence / (tiles * c.num_kv_heads);
  return static_cast<int32_t>(max_of<int64_t>(1, splits));
}

// A sequence is cut at the multiples of `tokens` of its positions.
struct Cut {
  int32_t tokens;
  int32_t first;  // index of the first split that is attended to
  int32_t splits;
};

__host__ __device__ inline Cut cut_of(const Cutting& c, int32_t query_len, int32_t context_len) {
  if (query_len == 0) return {c.split_tokens, 0, 1};
  const Range all = {visible(c.window, context_len - query_len).begin, context_len};
  int32_t tokens = c.split_tokens;
  if (!is_short(query_len, c.group)) {
    const int32_t most = max_long_splits(c, query_len);
    if (most == 1) return {context_len, 0, 1};
    const int64_t wanted = div_ceil(div_ceil(all.end - all.begin, most), tokens);
    tokens = static_cast<int32_t>(
        min_of<int64_t>(max_of<int64_t>(kLeastLongSplits, wanted) * tokens, int64_t{1} << 30));
  }
  const int32_t first = all.begin / tokens;
  return {tokens, first, div_ceil(all.end, tokens) - first};
}

constexpr int kTokensOfWeight = 64;

// The relative time of an item of a sequence: its tokens in 64s, and one for its fixed cost.
__host__ __device__ inline int32_t weight_of(const Cut& cut, int32_t context_len) {
  const int32_t tokens = cut.splits > 1 ? cut.tokens : context_len;
  return tokens / kTokensOfWeight + 1;
}

// Partial results of a sequence, in query tokens; each is as large as the output of the token.
__host__ __device__ inline int64_t num_partials(const Cut& cut, int32_t query_len) {
  return cut.splits > 1 ? int64_t{cut.splits} * query_len : 0;
}

}  // namespace kvplane::cuda
