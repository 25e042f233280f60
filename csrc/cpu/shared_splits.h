// Finds splits that several sequences have in the same blocks, as after a common prefix: they are
// read once, for the rows of all these sequences.
//
//   sequence 0   |5 8 2 9|4 1 7 3|6 . . .|     blocks of each split
//   sequence 1   |5 8 2 9|4 1 7 3|0 . . .|     split 0: sequences 0, 1 and 2 together
//   sequence 2   |5 8 2 9|4 1 . .|             split 1: 0 and 1; sequence 2 does not have all of it
//
// Which sequences share is decided for each split separately. So windows and trimmed blocks do not
// matter, and a state is computed from the same tiles as without sharing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "attention_items.h"

namespace kvplane {

// Two or more items with equal blocks in a split, at the same KV heads and query heads.
struct SharedSplit {
  int64_t split;
  std::vector<size_t> items;
};

// The table entries of a split.
inline Range blocks_of(const PagedAttentionParams& p, int64_t split) {
  const int64_t size = p.pages.block_size;
  return {split * kSplitTokens / size, ((split + 1) * kSplitTokens + size - 1) / size};
}

inline bool have_equal_blocks(const PagedAttentionParams& p, int64_t sequence, int64_t other,
                              int64_t split) {
  const Range blocks = blocks_of(p, split);
  for (int64_t b = blocks.begin; b < blocks.end; ++b) {
    if (block_at(p, sequence, b) != block_at(p, other, b)) return false;
  }
  return true;
}

// Adds the groups of items that have equal blocks, each of at most kAttendRows rows, with which one
// thread attends at a time. `items`: all with the same first block in the split; used up.
inline void group_items(const PagedAttentionParams& p, const std::vector<Item>& all, int64_t split,
                        std::vector<size_t>* items, std::vector<SharedSplit>* groups) {
  while (items->size() > 1) {
    const int64_t sequence = all[items->front()].sequence;
    const auto others = std::stable_partition(items->begin() + 1, items->end(), [&](size_t i) {
      return have_equal_blocks(p, sequence, all[i].sequence, split);
    });
    int64_t num_rows = kAttendRows;
    for (auto i = items->begin(); i != others; ++i) {
      const int64_t more = rows_of_kv_head(all[*i]);
      if (num_rows + more > kAttendRows) {
        groups->push_back({split, {}});
        num_rows = 0;
      }
      groups->back().items.push_back(*i);
      num_rows += more;
    }
    items->erase(items->begin(), others);
  }
}

// `items`: as cut_items returns them. Items so large that two have too many rows are left alone:
// arithmetic is their limit.
inline std::vector<SharedSplit> find_shared_splits(const PagedAttentionParams& p,
                                                   const std::vector<Item>& items) {
  // For each split that an item attends to all of: the split, its first block, and the item.
  std::vector<std::tuple<int64_t, int64_t, size_t>> found;
  size_t num_cuts = 0;  // items of the same query tokens: all have as many
  while (num_cuts < items.size() && items[num_cuts].first_token == items[0].first_token) ++num_cuts;
  for (size_t i = 0; i < items.size(); i += num_cuts) {
    if (2 * rows_of_kv_head(items[i]) > kAttendRows) continue;
    const Range seen = positions_of(p, items[i]);
    const int64_t begin = (seen.begin + kSplitTokens - 1) / kSplitTokens;
    for (int64_t split = begin; (split + 1) * kSplitTokens <= seen.end; ++split) {
      const int64_t block = block_at(p, items[i].sequence, blocks_of(p, split).begin);
      found.emplace_back(split, block, i);
    }
  }
  std::sort(found.begin(), found.end());
  std::vector<SharedSplit> groups;
  std::vector<size_t> same;
  for (size_t i = 0; i < found.size(); ++i) {
    const auto [split, block, item] = found[i];
    same.push_back(item);
    const bool last = i + 1 == found.size() || std::get<0>(found[i + 1]) != split ||
                      std::get<1>(found[i + 1]) != block;
    if (!last) continue;
    group_items(p, items, split, &same, &groups);
    same.clear();
  }
  const auto alone = [](const SharedSplit& group) { return group.items.size() == 1; };
  groups.erase(std::remove_if(groups.begin(), groups.end(), alone), groups.end());
  const size_t num_groups = groups.size();
  for (size_t cut = 1; cut < num_cuts; ++cut) {
    for (size_t g = 0; g < num_groups; ++g) {
      SharedSplit group = groups[g];
      for (size_t& item : group.items) item += cut;
      groups.push_back(std::move(group));
    }
  }
  return groups;
}

}  // namespace kvplane
