#include "recency_list.h"

namespace kvplane::blocks {

void RecencyList::push(uint32_t block) {
  const uint32_t newest = links_[end_].older;
  links_[block] = {end_, newest, 1};
  links_[newest].newer = block;
  links_[end_].older = block;
  if (num_recent_++ == 0) boundary_ = block;
}

void RecencyList::remove(uint32_t member) {
  const Link link = links_[member];
  if (link.recent) {
    --num_recent_;
    num_recent_evicted_ -= is_evicted(member);
    if (boundary_ == member) boundary_ = link.newer;
  }
  links_[link.older].newer = link.newer;
  links_[link.newer].older = link.older;
}

void RecencyList::evict(uint32_t block, uint32_t evicted) {
  const Link link = links_[block];
  links_[evicted] = link;
  links_[link.older].newer = evicted;
  links_[link.newer].older = evicted;
  if (boundary_ == block) boundary_ = evicted;
  num_recent_evicted_ += link.recent;
}

void RecencyList::set_num_recent(uint32_t num) {
  for (; num_recent_ > num; --num_recent_) {
    links_[boundary_].recent = 0;
    num_recent_evicted_ -= is_evicted(boundary_);
    boundary_ = links_[boundary_].newer;
  }
  for (; num_recent_ < num && links_[boundary_].older != end_; ++num_recent_) {
    boundary_ = links_[boundary_].older;
    links_[boundary_].recent = 1;
    num_recent_evicted_ += is_evicted(boundary_);
  }
}

}  // namespace kvplane::blocks
