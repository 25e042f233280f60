// Cuts a call of attention into items; paged_attention.cpp defines them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "kvplane/checks.h"
#include "kvplane/params.h"
#include "row_ops.h"

namespace kvplane {

constexpr int64_t kSplitTokens = 512;
constexpr int64_t kItemsOfThread = 4;  // with fewer, the splits of an item go to several threads
constexpr int64_t kLeastHeads = 16;    // of an item: fewer would load tiles too often

struct Item {
  int64_t sequence;
  int64_t first_token;  // index into the query tensor
  int64_t num_tokens;
  int64_t first_position;  // of first_token in its sequence
  int64_t first_kv_head;
  int64_t num_kv_heads;
  int64_t first_head;  // of the query heads of each of these KV heads
  int64_t num_heads;
};

// Half-open range of positions, or of splits.
struct Range {
  int64_t begin;
  int64_t end;
};

inline int64_t block_at(const PagedAttentionParams& p, int64_t sequence, int64_t index) {
  const int64_t i = sequence * p.max_blocks + index;
  return p.wide_block_tables ? static_cast<const int64_t*>(p.block_tables)[i]
                             : static_cast<const int32_t*>(p.block_tables)[i];
}

inline Range visible(const PagedAttentionParams& p, int64_t position) {
  const int64_t window = p.sliding_window_tokens;
  return {window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0, position + 1};
}

// Returns whether a query at `position` sees the block of keys that `key_position` is in.
inline bool sees_block(const PagedAttentionParams& p, int64_t sequence, int64_t head,
                       int64_t position, int64_t key_position) {
  const BlockMask& mask = p.blocks;
  const int64_t block = key_position / mask.block_tokens;
  if (position / mask.block_tokens - block < mask.local_blocks) return true;
  return mask.seen[sequence * mask.sequence_stride + head * mask.num_blocks +
                   block % mask.num_blocks] != 0;
}

// The tokens of a tile, from position `tile` on, that a row attends to, counted from there: one
// range, because a tile is in two blocks of a mask at most.
inline Range seen_of_tile(const PagedAttentionParams& p, int64_t sequence, int64_t head,
                          int64_t position, int64_t tile) {
  static_assert(kTileTokens == 2 * kMaskUnit);
  const Range seen = visible(p, position);
  Range tokens = {std::max<int64_t>(0, seen.begin - tile), std::min(kTileTokens, seen.end - tile)};
  if (p.blocks.seen == nullptr) return tokens;
  const auto hides = [&](int64_t key) { return !sees_block(p, sequence, head, position, key); };
  if (tokens.begin < kMaskUnit && hides(tile)) tokens.begin = kMaskUnit;
  if (tokens.end > kMaskUnit && hides(tile + kMaskUnit)) tokens.end = kMaskUnit;
  return tokens;
}

inline int64_t first_position(const PagedAttentionParams& p, int64_t sequence) {
  const int64_t query_len = p.query_starts[sequence + 1] - p.query_starts[sequence];
  return p.context_lens[sequence] - query_len;
}

inline int64_t rows_of_kv_head(const Item& item) { return item.num_tokens * item.num_heads; }

// The positions that any of the item's rows attends to.
inline Range positions_of(const PagedAttentionParams& p, const Item& item) {
  return {visible(p, item.first_position).begin, item.first_position + item.num_tokens};
}

// Checks that starts ascend to num_tokens, that contexts cover their query tokens, and that every
// table entry that a query token needs is the id of a block.
inline void check_batch(const PagedAttentionParams& p) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const int64_t* starts = p.query_starts;
  require_in_range(starts[0], 0, 1, [] { return at("query_starts", 0); });
  for (int64_t s = 0; s < p.num_sequences; ++s) {
    require_in_range(starts[s + 1], starts[s], p.num_tokens + 1,
                     [&] { return at("query_starts", s + 1); });
    const int64_t query_len = starts[s + 1] - starts[s];
    const int64_t room = p.max_blocks * p.pages.block_size;
    require_in_range(p.context_lens[s], query_len, query_len == 0 ? kMax : room + 1,
                     [&] { return at("context_lens", s); });
    if (query_len == 0) continue;
    const int64_t begin = visible(p, first_position(p, s)).begin / p.pages.block_size;
    const int64_t last = (p.context_lens[s] - 1) / p.pages.block_size;
    for (int64_t b = begin; b <= last; ++b) {
      require_in_range(block_at(p, s, b), 0, p.pages.num_blocks,
                       [&] { return at("block_tables", s, b); });
    }
  }
  require_in_range(starts[p.num_sequences], p.num_tokens, p.num_tokens + 1,
                   [&] { return at("query_starts", p.num_sequences); });
}

// The size of items: query tokens, KV heads, and query heads of each KV head.
struct ItemSize {
  int64_t num_tokens;
  int64_t num_kv_heads;
  int64_t num_heads;
};

// Each KV head of an item reads its rows of the same blocks, so an item with many KV heads reads
// memory in longer runs. But all threads need items: where there are too few, the query heads of a
// KV head are divided among several items too.
inline ItemSize size_of_items(const PagedAttentionParams& p) {
  const int64_t all = p.pages.num_kv_heads, group = p.num_heads / all;
  const int64_t item_tokens = std::max<int64_t>(1, kAttendRows / group);
  int64_t num_splits = 0, most_tokens = 1;
  for (int64_t s = 0; s < p.num_sequences; ++s) {
    const int64_t query_len = p.query_starts[s + 1] - p.query_starts[s];
    if (query_len == 0) continue;
    const int64_t seen = p.context_lens[s] - visible(p, first_position(p, s)).begin;
    const int64_t chunks = (query_len + item_tokens - 1) / item_tokens;
    num_splits += chunks * ((seen + kSplitTokens - 1) / kSplitTokens);
    most_tokens = std::max(most_tokens, std::min(item_tokens, query_len));
  }
  const int64_t wanted = kItemsOfThread * p.num_threads;
  int64_t kv_heads = std::max<int64_t>(1, std::min(all, kAttendRows / (most_tokens * group)));
  while (kv_heads > 1 && num_splits * (all / kv_heads) < wanted) kv_heads /= 2;
  int64_t heads = std::min(group, kAttendRows);
  if (kv_heads == 1) {
    while (heads >= 2 * kLeastHeads && num_splits * all * (group / heads) < wanted) heads /= 2;
  }
  return {item_tokens, kv_heads, heads};
}

inline std::vector<Item> cut_items(const PagedAttentionParams& p) {
  const ItemSize size = size_of_items(p);
  const int64_t group = p.num_heads / p.pages.num_kv_heads;
  std::vector<Item> items;
  for (int64_t s = 0; s < p.num_sequences; ++s) {
    const int64_t begin = p.query_starts[s], end = p.query_starts[s + 1];
    for (int64_t token = begin; token < end; token += size.num_tokens) {
      const int64_t num_tokens = std::min(size.num_tokens, end - token);
      const int64_t position = first_position(p, s) + token - begin;
      for (int64_t h = 0; h < p.pages.num_kv_heads; h += size.num_kv_heads) {
        const int64_t num_kv_heads = std::min(size.num_kv_heads, p.pages.num_kv_heads - h);
        for (int64_t g = 0; g < group; g += size.num_heads) {
          const int64_t num_heads = std::min(size.num_heads, group - g);
          items.push_back({s, token, num_tokens, position, h, num_kv_heads, g, num_heads});
        }
      }
    }
  }
  return items;
}

}  // namespace kvplane
