#include "evicted_prefixes.h"

#include <cstddef>

namespace kvplane::blocks {

EvictedPrefixes::EvictedPrefixes(uint32_t num_slots) : slots_(num_slots, {0, kUnused}) {
  size_t num_buckets = 1;
  while (num_buckets < num_slots) num_buckets *= 2;
  buckets_.assign(num_buckets, kNone);
}

uint32_t EvictedPrefixes::find(uint64_t key) const {
  const uint32_t tag = tag_of(key);
  uint32_t slot = buckets_[bucket_of(tag)];
  while (slot != kNone && slots_[slot].tag != tag) slot = slots_[slot].next;
  return slot;
}

void EvictedPrefixes::add(uint64_t key) {
  const uint32_t tag = tag_of(key);
  uint32_t& first = buckets_[bucket_of(tag)];
  slots_[next_slot_] = {tag, first};
  first = next_slot_;
  next_slot_ = next_slot_ + 1 < slots_.size() ? next_slot_ + 1 : 0;
  // It will be forgotten soon.
  const uint32_t ahead = (next_slot_ + 16) % slots_.size();
  __builtin_prefetch(&buckets_[bucket_of(slots_[ahead].tag)]);
}

void EvictedPrefixes::remove(uint32_t slot) {
  uint32_t* link = &buckets_[bucket_of(slots_[slot].tag)];
  while (*link != slot) link = &slots_[*link].next;
  *link = slots_[slot].next;
  slots_[slot].next = kUnused;
}

}  // namespace kvplane::blocks
