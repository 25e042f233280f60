// Evicts the block whose expected reuse is worth least for the time that it occupies the block.
#pragma once

#include <vector>

#include "age_groups.h"
#include "evicted_prefixes.h"
#include "idle_tree.h"
#include "policy.h"
#include "recency_list.h"
#include "reuse_statistics.h"

namespace kvplane::blocks {

// Learns from the traffic, evicted prefixes included, at what rate prefixes are used again, given
// how often they were used and how long they have waited (ReuseStatistics). Time is counted in uses
// of blocks. Besides, counts what LRU would have found: while more was lost against it than is
// allowed, evicts as LRU does.
class ReuseRate final : public EvictionPolicy {
 public:
  explicit ReuseRate(uint32_t num_blocks);

  void publish(uint32_t block, uint64_t key, uint32_t parent) override;
  void set_parent(uint32_t block, uint32_t parent) override;
  void use(const uint32_t* blocks, size_t num_blocks) override;
  void add_idle(uint32_t block) override;
  void remove_idle(uint32_t block) override;
  uint32_t pop() override;
  void unpublish(uint32_t block) override;
  size_t num_idle() const override { return tree_.num_idle(); }

 private:
  void learn();
  void end_wait(uint32_t member, bool reused);
  void ancestor_changed(uint32_t block);
  void remember(uint32_t block);

  uint32_t num_blocks_;
  IdleTree tree_;
  ReuseStatistics statistics_;
  AgeGroups groups_;
  EvictedPrefixes evicted_;
  // Members are blocks, and behind them the slots of evicted prefixes.
  RecencyList recency_;
  std::vector<Wait> waits_;
  std::vector<uint64_t> keys_;
  uint64_t num_uses_ = 0;    // of blocks: the time
  uint64_t learned_at_ = 0;  // of that time
  double num_counted_ = 0;   // uses in which the loss was counted
  double num_lost_ = 0;      // blocks that LRU would have found, less those that were
};

}  // namespace kvplane::blocks
