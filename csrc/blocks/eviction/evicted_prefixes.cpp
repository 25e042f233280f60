#include "evicted_prefixes.h"

#include <cstddef>

namespace kvplane::blocks {

EvictedPrefixes::EvictedPrefixes(uint32_t num_slots) : slots_(num_slots, {0, kNone, kNone}) {
  size_t num_buckets = 1;
  while (num_buckets < num_slots) num_buckets *= 2;
  buckets_.assign(num_buckets, kNone);
}

uint32_t EvictedPrefixes::find(uint64_t key) const {
  uint32_t slot = buckets_[bucket_of(key)];
  while (slot != kNone && slots_[slot].tag != static_cast<uint32_t>(key)) slot = slots_[slot].next;
  return slot;
}

void EvictedPrefixes::add(uint64_t key) {
  const uint32_t bucket = bucket_of(key);
  slots_[next_slot_] = {static_cast<uint32_t>(key), bucket, buckets_[bucket]};
  buckets_[bucket] = next_slot_;
  next_slot_ = next_slot_ + 1 < slots_.size() ? next_slot_ + 1 : 0;
}

void EvictedPrefixes::remove(uint32_t slot) {
  uint32_t* link = &buckets_[slots_[slot].bucket];
  while (*link != slot) link = &slots_[*link].next;
  *link = slots_[slot].next;
  slots_[slot].bucket = kNone;
}

}  // namespace kvplane::blocks
