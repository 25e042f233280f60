// Idle blocks and evicted prefixes by when they were last in use, and which of them LRU would hold.
#pragma once

#include <cstdint>
#include <vector>

namespace kvplane::blocks {

// Members are indices below `num_members`. The newest ones are recent: those that a cache of as
// many blocks would hold if it evicted the least recently used.
class RecencyList {
 public:
  explicit RecencyList(uint32_t num_members)
      : end_(num_members), boundary_(num_members), links_(num_members + 1, {end_, end_, 0}) {}

  void push(uint32_t member);  // as the newest; recent
  void remove(uint32_t member);
  void replace(uint32_t member, uint32_t by);  // `by` takes its place
  bool is_recent(uint32_t member) const { return links_[member].recent; }

  // Makes the newest `num` members recent and no others; costs as much as it changes.
  void set_num_recent(uint32_t num);

 private:
  struct Link {
    uint32_t newer;
    uint32_t older : 31;
    uint32_t recent : 1;
  };

  uint32_t end_;
  uint32_t boundary_;  // the oldest recent member
  uint32_t num_recent_ = 0;
  std::vector<Link> links_;  // a circle, closed by `end_`
};

}  // namespace kvplane::blocks
