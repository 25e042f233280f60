#include "recency_list.h"

namespace kvplane::blocks {

void RecencyList::push(uint32_t member) {
  const uint32_t newest = links_[end_].older;
  links_[member] = {end_, newest, 1};
  links_[newest].newer = member;
  links_[end_].older = member;
  if (num_recent_++ == 0) boundary_ = member;
}

void RecencyList::remove(uint32_t member) {
  const Link link = links_[member];
  if (link.recent) {
    --num_recent_;
    if (boundary_ == member) boundary_ = link.newer;
  }
  links_[link.older].newer = link.newer;
  links_[link.newer].older = link.older;
}

void RecencyList::replace(uint32_t member, uint32_t by) {
  const Link link = links_[member];
  links_[by] = link;
  links_[link.older].newer = by;
  links_[link.newer].older = by;
  if (boundary_ == member) boundary_ = by;
}

void RecencyList::set_num_recent(uint32_t num) {
  for (; num_recent_ > num; --num_recent_) {
    links_[boundary_].recent = 0;
    boundary_ = links_[boundary_].newer;
  }
  for (; num_recent_ < num && links_[boundary_].older != end_; ++num_recent_) {
    boundary_ = links_[boundary_].older;
    links_[boundary_].recent = 1;
  }
}

}  // namespace kvplane::blocks
