#include "eviction/reuse/age_groups.h"

#include <cstddef>
#include <utility>

namespace kvplane::blocks {

AgeGroups::AgeGroups(uint32_t num_blocks, ReuseStatistics& statistics)
    : statistics_(statistics),
      num_blocks_(num_blocks),
      counts_(kMaxGroups * kNumClasses),
      links_(num_blocks + kMaxGroups * kNumClasses) {
  groups_.reserve(kMaxGroups);
  for (uint32_t slot = kMaxGroups; slot-- > 0;) unused_slots_.push_back(slot);
  for (uint32_t i = num_blocks; i < links_.size(); ++i) links_[i] = {i, i};
  begin_group();
}

void AgeGroups::advance(uint64_t now) {
  if (now == now_) return;
  const double passed = static_cast<double>(now - now_);
  now_ = now;
  size_t last = 0;
  for (size_t i = 0; i < groups_.size(); ++i) {
    Group& group = groups_[i];
    for (uint32_t c = 0; c < kNumClasses; ++c) {
      if (count(group, c)) statistics_.add_wait(c, group.range, passed * count(group, c));
    }
    if (i == 0) continue;
    // Joined at ages that differ by less than a fifth: ranges of ages differ by 1.4.
    Group& older = groups_[last];
    const double oldest_age = now - older.first_since;
    if (oldest_age <= 1.19 * (now - group.last_since) || (groups_.size() == kMaxGroups && i == 1)) {
      join(older, group);
    } else {
      groups_[++last] = group;
    }
  }
  groups_.resize(last + 1);
  for (Group& group : groups_) group.range = ReuseStatistics::range_of(age_of(group));
  begin_group();
  found_ = found_before_ = oldest_ = 0;
  cheapest_ = kNone;
}

void AgeGroups::list(uint32_t block, Wait wait, bool first) {
  const uint32_t index = find(wait.since);
  const Group& group = groups_[index];
  const uint32_t list = list_of(group, wait.use_class());
  const uint32_t previous = first ? list : links_[list].previous;
  const uint32_t next = first ? links_[list].next : list;
  links_[block] = {next, previous};
  links_[previous].next = links_[next].previous = block;
  if (index < oldest_) oldest_ = index;
  if (cheapest_ != kNone && statistics_.worth(wait.use_class(), group.range) < cheapest_worth_) {
    cheapest_ = kNone;
  }
}

void AgeGroups::unlist(uint32_t block) {
  const auto [next, previous] = links_[block];
  links_[previous].next = next;
  links_[next].previous = previous;
}

uint32_t AgeGroups::worth_least() {
  if (cheapest_ == kNone || is_empty(cheapest_)) {
    cheapest_ = kNone;
    for (const Group& group : groups_) {
      for (uint32_t c = 0; c < kNumClasses; ++c) {
        const double worth = statistics_.worth(c, group.range);
        if ((cheapest_ == kNone || worth < cheapest_worth_) && !is_empty(list_of(group, c))) {
          cheapest_ = list_of(group, c);
          cheapest_worth_ = worth;
        }
      }
    }
  }
  return links_[cheapest_].next;
}

uint32_t AgeGroups::oldest(const std::vector<Wait>& waits) {
  for (;; ++oldest_) {
    uint32_t found = kNone;
    for (uint32_t c = 0; c < kNumClasses; ++c) {
      const uint32_t list = list_of(groups_[oldest_], c);
      const uint32_t block = links_[list].next;
      if (block != list && (found == kNone || waits[block].since < waits[found].since)) {
        found = block;
      }
    }
    if (found != kNone) return found;
  }
}

uint32_t AgeGroups::find(uint64_t since) {
  if (holds(found_, since)) return found_;
  std::swap(found_, found_before_);
  if (holds(found_, since)) return found_;
  uint32_t low = 0;
  uint32_t high = groups_.size() - 1;
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (groups_[middle].first_since <= since) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return found_ = low;
}

void AgeGroups::begin_group() {
  groups_.push_back({now_, now_, unused_slots_.back(), 0});
  unused_slots_.pop_back();
}

void AgeGroups::join(Group& older, const Group& newer) {
  for (uint32_t c = 0; c < kNumClasses; ++c) {
    count(older, c) += count(newer, c);
    count(newer, c) = 0;
    const uint32_t from = list_of(newer, c);
    const uint32_t to = list_of(older, c);
    if (is_empty(from)) continue;
    const Link moved = links_[from];
    const uint32_t end = links_[to].previous;
    links_[end].next = moved.next;
    links_[moved.next].previous = end;
    links_[moved.previous].next = to;
    links_[to].previous = moved.previous;
    links_[from] = {from, from};
  }
  older.last_since = newer.last_since;
  unused_slots_.push_back(newer.slot);
}

}  // namespace kvplane::blocks
