// The blocks that the contents of copies come from.
#pragma once

#include <vector>

#include "containers/id_map.h"
#include "core/types.h"

namespace kvplane::blocks {

// A block as it was when it was allocated.
struct BlockRef {
  Tier tier;
  Block block;
  int64_t generation;

  bool operator==(const BlockRef& other) const {
    return tier == other.tier && block == other.block && generation == other.generation;
  }
};

inline int64_t key_of(Tier tier, Block b) { return int64_t{tier} << 32 | b; }

// Blocks that transfers wrote, and the block whose content each has.
class Origins {
 public:
  bool empty() const { return copies_.empty(); }

  // Makes room for `num` more transfers, so that adding them moves nothing.
  void reserve(size_t num) {
    last_.reserve(num);
    copies_.reserve(copies_.size() + num);
  }

  // Adds a transfer that runs after those added before it.
  void add(const BlockRef& source, const BlockRef& destination) {
    const BlockRef origin = of(source);
    const auto i = static_cast<uint32_t>(copies_.size());
    const int64_t key = key_of(destination.tier, destination.block);
    uint32_t before = kNone;
    if (!last_.insert(key, i)) before = std::exchange(*last_.find(key), i);
    copies_.push_back({destination, origin, before});
  }

  // The block itself, if no transfer wrote it.
  BlockRef of(const BlockRef& ref) const {
    const uint32_t* last = last_.find(key_of(ref.tier, ref.block));
    for (uint32_t i = last ? *last : kNone; i != kNone; i = copies_[i].before)
      if (copies_[i].destination == ref) return copies_[i].origin;
    return ref;
  }

 private:
  static constexpr uint32_t kNone = 0xFFFFFFFF;
  struct Copy {
    BlockRef destination;
    BlockRef origin;
    uint32_t before;  // one to the same place, of an earlier generation
  };

  IdMap last_;  // place -> the last copy to it
  std::vector<Copy> copies_;
};

}  // namespace kvplane::blocks
