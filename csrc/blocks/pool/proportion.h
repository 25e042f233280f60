// Blocks of one layer group, counted as those of all groups of a pool.
#pragma once

#include <algorithm>

#include "pool/layer_group.h"

namespace kvplane::blocks {

// Converts numbers of blocks of one tier between a pool's groups.
class Proportion {
 public:
  Proportion(Groups groups, Tier tier) : tier_(tier), smallest_(kMany) {
    for (int64_t g = 0; g < groups.size; ++g)
      if (!groups[g]->config.holds_states)
        smallest_ = std::min<int64_t>(smallest_, groups[g]->stores[tier].num_blocks);
  }
  // Blocks of a group as blocks of the smallest one, rounded up or down.
  int64_t up(const LayerGroup& group, int64_t num) const {
    const int64_t size = size_of(group);
    return size == smallest_ || num <= 0 ? num : div_ceil(std::min(num, kMany) * smallest_, size);
  }
  int64_t down(const LayerGroup& group, int64_t num) const {
    const int64_t size = size_of(group);
    return size == smallest_ || num <= 0 ? num : std::min(num, kMany) * smallest_ / size;
  }
  // Blocks of the smallest group as blocks of a group, rounded up.
  int64_t of_group(const LayerGroup& group, int64_t num) const {
    const int64_t size = size_of(group);
    if (group.config.holds_states) return 0;  // none is kept back
    if (size == smallest_ || num <= 0) return num;
    return smallest_ ? div_ceil(std::min(num, kMany) * size, smallest_) : size;
  }
  int64_t smallest() const { return smallest_; }

 private:
  // More than any pool has, and few enough to be multiplied by the blocks of any.
  static constexpr int64_t kMany = int64_t{1} << 32;

  int64_t size_of(const LayerGroup& group) const { return group.stores[tier_].num_blocks; }

  Tier tier_;
  int64_t smallest_;
};

}  // namespace kvplane::blocks
