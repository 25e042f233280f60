#include "eviction/reuse/recency_list.h"

namespace kvplane::blocks {

void RecencyList::push(uint32_t block) {
  const uint32_t newest = links_[end_].older;
  links_[block] = {end_, newest, 0};
  links_[newest].newer = block;
  links_[end_].older = block;
  if (num_recent_ == 0) boundary_ = block;
  set_recent(block, true);
}

void RecencyList::remove(uint32_t member) {
  const Link link = links_[member];
  if (link.recent) {
    if (boundary_ == member) boundary_ = link.newer;
    set_recent(member, false);
  }
  links_[link.older].newer = link.newer;
  links_[link.newer].older = link.older;
}

void RecencyList::evict(uint32_t block, uint32_t evicted) {
  const Link link = links_[block];
  links_[evicted] = {link.newer, link.older, 0};
  links_[link.older].newer = evicted;
  links_[link.newer].older = evicted;
  if (boundary_ == block) boundary_ = evicted;
  if (link.recent) {
    set_recent(block, false);
    set_recent(evicted, true);
  }
}

void RecencyList::set_num_recent(uint32_t num) {
  while (num_recent_ > num) {
    const uint32_t member = boundary_;
    boundary_ = links_[member].newer;
    set_recent(member, false);
  }
  while (num_recent_ < num && links_[boundary_].older != end_) {
    boundary_ = links_[boundary_].older;
    set_recent(boundary_, true);
  }
}

void RecencyList::set_recent(uint32_t member, bool recent) {
  links_[member].recent = recent;
  const bool is_evicted = member >= num_blocks_;
  const uint32_t weight = is_evicted ? weight_ : 1;
  num_recent_ += recent ? weight : -weight;
  if (is_evicted) num_recent_evicted_ += recent ? weight : -weight;
}

}  // namespace kvplane::blocks
