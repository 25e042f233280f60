// Idle blocks and evicted prefixes by when they were last in use, and which of them LRU would hold.
#pragma once

#include <cstdint>
#include <vector>

namespace kvplane::blocks {

// Members are the blocks, from 0, and behind them the evicted prefixes, each of which stands for
// `weight` of its kind. The newest ones are recent: those that a cache of as many blocks would hold
// if it evicted the least recently used.
class RecencyList {
 public:
  RecencyList(uint32_t num_blocks, uint32_t num_evicted, uint32_t weight)
      : num_blocks_(num_blocks),
        weight_(weight),
        end_(num_blocks + num_evicted),
        boundary_(end_),
        links_(end_ + 1, {end_, end_, 0}) {}

  void push(uint32_t block);  // as the newest; recent
  void remove(uint32_t member);
  void evict(uint32_t block, uint32_t evicted);  // the evicted prefix takes its place
  bool is_recent(uint32_t member) const { return links_[member].recent; }

  // How many blocks the evicted prefixes stand for that are recent.
  uint32_t num_recent_evicted() const { return num_recent_evicted_; }

  // Makes the newest members recent that stand for `num` blocks, and no others; costs as much as it
  // changes.
  void set_num_recent(uint32_t num);

 private:
  struct Link {
    uint32_t newer;
    uint32_t older : 31;
    uint32_t recent : 1;
  };

  void set_recent(uint32_t member, bool recent);

  uint32_t num_blocks_;
  uint32_t weight_;
  uint32_t end_;
  uint32_t boundary_;  // the oldest recent member
  uint32_t num_recent_ = 0;
  uint32_t num_recent_evicted_ = 0;
  std::vector<Link> links_;  // a circle, closed by `end_`
};

}  // namespace kvplane::blocks
