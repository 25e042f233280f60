// Waiting prefixes in groups of about the same age, and the blocks among them that can be evicted.
#pragma once

#include <cstdint>
#include <vector>

#include "eviction/reuse/reuse_statistics.h"

namespace kvplane::blocks {

// A prefix that waits for its next use. Times count uses of blocks.
struct Wait {
  uint64_t since : 48;
  uint64_t num_uses : 8;  // before
  uint64_t waits : 1;     // whether it waits

  uint32_t use_class() const { return ReuseStatistics::class_of(num_uses); }
};

// A group holds prefixes that began to wait within some span of time. It is joined with the next
// when their ages have become about the same, so that the number of groups grows with the logarithm
// of the oldest age. For each class of uses a group counts the prefixes that wait, and lists their
// blocks that can be evicted, in the order of eviction.
class AgeGroups {
 public:
  AgeGroups(uint32_t num_blocks, ReuseStatistics& statistics);

  uint64_t now() const { return now_; }

  // Advances the time: counts the waiting time, joins groups, begins a new one.
  void advance(uint64_t now);

  // A prefix begins to wait now.
  void begin(Wait wait) { ++count(groups_.back(), wait.use_class()); }

  // So many more prefixes, or fewer, wait as this one does.
  void add(Wait wait, int32_t num) { count(groups_[find(wait.since)], wait.use_class()) += num; }

  // Blocks that can be evicted, to be evicted after, or `first`, before the rest of its list.
  void list(uint32_t block, Wait wait, bool first);
  void unlist(uint32_t block);

  // A listed block that is worth least; the oldest of these.
  uint32_t worth_least();

  // The listed block that has waited longest. `waits`: of all blocks.
  uint32_t oldest(const std::vector<Wait>& waits);

  // The worth of all has changed.
  void worth_changed() { cheapest_ = kNone; }

 private:
  static constexpr uint32_t kNumClasses = ReuseStatistics::kNumClasses;
  static constexpr uint32_t kMaxGroups = 256;
  static constexpr uint32_t kNone = 0xFFFFFFFF;

  struct Group {
    uint64_t first_since;
    uint64_t last_since;
    uint32_t slot;   // of its counts and lists
    uint32_t range;  // of its age
  };
  struct Link {
    uint32_t next;
    uint32_t previous;
  };

  uint32_t& count(const Group& group, uint32_t use_class) {
    return counts_[group.slot * kNumClasses + use_class];
  }
  uint32_t list_of(const Group& group, uint32_t use_class) const {
    return num_blocks_ + group.slot * kNumClasses + use_class;
  }
  bool is_empty(uint32_t list) const { return links_[list].next == list; }
  uint64_t age_of(const Group& group) const {
    return now_ - (group.first_since + group.last_since) / 2;
  }
  uint32_t find(uint64_t since);
  bool holds(uint32_t group, uint64_t since) const {
    return since >= groups_[group].first_since && since <= groups_[group].last_since;
  }
  void begin_group();
  void join(Group& older, const Group& newer);

  ReuseStatistics& statistics_;
  uint32_t num_blocks_;
  uint64_t now_ = 0;
  uint32_t found_ = 0;  // the groups of the last searches: blocks and evicted prefixes take turns
  uint32_t found_before_ = 0;
  uint32_t cheapest_ = kNone;  // the list that is worth least, if known
  double cheapest_worth_ = 0;  //
  uint32_t oldest_ = 0;        // no older group lists a block
  std::vector<Group> groups_;  // the oldest first
  std::vector<uint32_t> unused_slots_;
  std::vector<uint32_t> counts_;
  std::vector<Link> links_;  // circles of blocks, each closed by a list's own link
};

}  // namespace kvplane::blocks
