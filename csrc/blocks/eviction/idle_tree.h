// Which published blocks are idle, and which of these have idle descendants.
#pragma once

#include <cstdint>
#include <vector>

#include "eviction/policy.h"

namespace kvplane::blocks {

// A block can be evicted if it is idle and no block below it is. Each block counts the children
// that are idle or have an idle block below them, so a change climbs only until it changes no
// count to or from zero: over the blocks of a sequence that is the length of its table.
class IdleTree {
 public:
  explicit IdleTree(uint32_t num_blocks) : nodes_(num_blocks) {}

  void publish(uint32_t block, uint32_t parent);

  // The other changes return the ancestor whose can_evict they changed, or kNoBlock: there is at
  // most one.
  uint32_t set_parent(uint32_t block, uint32_t parent);
  uint32_t add_idle(uint32_t block);
  uint32_t remove_idle(uint32_t block);
  uint32_t unpublish(uint32_t block);  // it is not idle

  bool can_evict(uint32_t block) const { return nodes_[block].counts == 1; }
  void prefetch(uint32_t block) const { __builtin_prefetch(&nodes_[block], 1); }
  uint32_t num_idle() const { return num_idle_; }
  uint32_t parent_of(uint32_t block) const { return parent_of(nodes_[block]); }

 private:
  struct Node {
    uint32_t parent;
    uint32_t parent_serial;
    uint32_t serial;  // of its publication; 0 when not published
    // Twice the number of children that are idle or have an idle descendant, and 1 if the block is
    // idle itself. As bit-fields these would be written by the byte, and a CPU that then reads the
    // word waits until the byte is in its cache.
    uint32_t counts;

    bool idle() const { return counts & 1; }
    uint32_t num_idle_children() const { return counts >> 1; }
  };

  // The block that holds the prefix before, if it still does; its number may be reused.
  uint32_t parent_of(const Node& node) const {
    const bool held = node.parent != kNoBlock && nodes_[node.parent].serial == node.parent_serial;
    return held ? node.parent : kNoBlock;
  }
  uint32_t count_up(uint32_t parent);
  uint32_t count_down(uint32_t parent);

  std::vector<Node> nodes_;
  uint32_t num_idle_ = 0;
  uint32_t last_serial_ = 0;
};

}  // namespace kvplane::blocks
