#include "eviction/reuse/evicted_prefixes.h"

#include <cstddef>

namespace kvplane::blocks {

EvictedPrefixes::EvictedPrefixes(uint32_t num_slots) : tags_(num_slots) {
  size_t num_places = 2;
  for (shift_ = 31; num_places < num_slots * size_t{5} / 4; num_places *= 2) --shift_;
  table_.resize(num_places);
}

uint32_t EvictedPrefixes::find(uint64_t key) const {
  const uint32_t tag = tag_of(key);
  uint32_t place = place_of(tag);
  while (table_[place].tag && table_[place].tag != tag) place = after(place);
  return table_[place].tag ? table_[place].slot : kNone;
}

void EvictedPrefixes::add(uint64_t key) {
  const uint32_t tag = tag_of(key);
  uint32_t place = place_of(tag);
  while (table_[place].tag) place = after(place);
  table_[place] = {tag, next_slot_};
  tags_[next_slot_] = tag;
  if (++next_slot_ == tags_.size()) next_slot_ = 0;
  // One that will be forgotten soon.
  const uint32_t ahead = next_slot_ + 16;
  if (ahead < tags_.size()) __builtin_prefetch(&table_[place_of(tags_[ahead])]);
}

void EvictedPrefixes::remove(uint32_t slot) {
  uint32_t hole = place_of(tags_[slot]);
  while (table_[hole].tag != tags_[slot] || table_[hole].slot != slot) hole = after(hole);
  tags_[slot] = 0;
  // Later entries move up, unless they would come before the place of their tag.
  const uint32_t mask = table_.size() - 1;
  for (uint32_t place = after(hole); table_[place].tag; place = after(place)) {
    if (((place - place_of(table_[place].tag)) & mask) >= ((place - hole) & mask)) {
      table_[hole] = table_[place];
      hole = place;
    }
  }
  table_[hole].tag = 0;
}

}  // namespace kvplane::blocks
