// Evicts the block whose expected reuse is worth least for the time that it occupies the block.
#pragma once

#include <vector>

#include "eviction/idle_tree.h"
#include "eviction/policy.h"
#include "eviction/reuse/age_groups.h"
#include "eviction/reuse/evicted_prefixes.h"
#include "eviction/reuse/recency_list.h"
#include "eviction/reuse/reuse_statistics.h"

namespace kvplane::blocks {

// Learns from the traffic, evicted prefixes included, at what rate prefixes are used again, given
// how often they were used and how long they have waited (ReuseStatistics). Time is counted in uses
// of blocks. In large pools a sample of the evicted prefixes stands for all. Besides, counts what
// LRU would have found, and evicts as LRU does while more is lost against it than is allowed.
class ReuseRate final : public EvictionPolicy {
 public:
  explicit ReuseRate(uint32_t num_blocks);

  void publish(const uint32_t* blocks, const uint64_t* keys, size_t num_blocks,
               uint32_t parent) override;
  void set_parent(uint32_t block, uint32_t parent) override;
  void use(const uint32_t* blocks, size_t num_blocks) override;
  void add_idle(const uint32_t* blocks, size_t num_blocks) override;
  void remove_idle(const uint32_t* blocks, size_t num_blocks) override;
  void pop(uint32_t* blocks, size_t num_blocks) override;
  void unpublish(uint32_t block) override;
  size_t num_idle() const override { return tree_.num_idle(); }
  uint32_t parent_of(uint32_t block) const override { return tree_.parent_of(block); }
  bool uses_keys() const override { return true; }

 private:
  bool must_be_lru() const;
  void learn();
  bool is_sampled(uint64_t key) const { return (key & (weight_ - 1)) == 0; }
  uint32_t meet_again(uint32_t slot);
  void end_wait(uint32_t member, uint32_t weight, bool reused);
  void ancestor_changed(uint32_t block);
  void remember(uint32_t block);

  uint32_t num_blocks_;
  uint32_t weight_;  // how many evicted prefixes one stands for that is remembered
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
  // Of the past that counts: uses, how many of these LRU would have found, and LRU's hits less the
  // actual hits.
  double num_counted_ = 0;
  double num_lru_hits_ = 0;
  double num_lost_ = 0;
};

}  // namespace kvplane::blocks
