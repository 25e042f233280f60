// Evicts the block that became idle longest ago.
#pragma once

#include <vector>

#include "eviction/idle_tree.h"
#include "eviction/policy.h"

namespace kvplane::blocks {

class LeastRecentlyUsed final : public EvictionPolicy {
 public:
  explicit LeastRecentlyUsed(uint32_t num_blocks);

  void publish(const uint32_t* blocks, const uint64_t* keys, size_t num_blocks,
               uint32_t parent) override;
  void set_parent(uint32_t block, uint32_t parent) override;
  void use(const uint32_t*, size_t) override {}
  void add_idle(const uint32_t* blocks, size_t num_blocks) override;
  void remove_idle(const uint32_t* blocks, size_t num_blocks) override;
  void pop(uint32_t* blocks, size_t num_blocks) override;
  void unpublish(uint32_t block) override;
  size_t num_idle() const override { return tree_.num_idle(); }
  uint32_t parent_of(uint32_t block) const override { return tree_.parent_of(block); }
  bool uses_keys() const override { return false; }

 private:
  struct Link {
    uint32_t newer;
    uint32_t older;
  };

  void prefetch(uint32_t block) const;
  void push(uint32_t block);
  void come_next(uint32_t block);
  void remove(uint32_t block);

  IdleTree tree_;
  // A circle of the idle blocks, closed by one link that is no block. Those that wait for idle
  // blocks below them link to themselves.
  std::vector<Link> links_;
  uint32_t last_popped_ = 0;
};

}  // namespace kvplane::blocks
