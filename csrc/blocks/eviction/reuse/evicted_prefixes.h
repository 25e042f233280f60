// A bounded memory of evicted prefixes.
#pragma once

#include <cstdint>
#include <vector>

namespace kvplane::blocks {

// A ring of slots, with a hash table over it: when it is full, the prefix that was evicted longest
// ago is forgotten. Found by 32 bits of the key: two prefixes that are taken for one spoil a
// statistic, nothing else.
class EvictedPrefixes {
 public:
  static constexpr uint32_t kNone = 0xFFFFFFFF;

  explicit EvictedPrefixes(uint32_t num_slots);

  uint32_t num_slots() const { return tags_.size(); }

  // The slot of a prefix, or kNone.
  uint32_t find(uint64_t key) const;

  // The slot that `add` will use; `is_used` says whether it holds a prefix, to be removed first.
  uint32_t next_slot() const { return next_slot_; }
  bool is_used(uint32_t slot) const { return tags_[slot] != 0; }

  void add(uint64_t key);  // at next_slot(), which is not used
  void remove(uint32_t slot);

  // `key` will be looked up or added soon.
  void prefetch(uint64_t key) const { __builtin_prefetch(&table_[place_of(tag_of(key))]); }

 private:
  struct Entry {
    uint32_t tag;  // 0 where there is none
    uint32_t slot;
  };

  static uint32_t tag_of(uint64_t key) {
    const uint32_t tag = key * 0x9E3779B97F4A7C15 >> 32;
    return tag ? tag : 1;
  }
  uint32_t place_of(uint32_t tag) const { return tag >> shift_; }
  uint32_t after(uint32_t place) const { return (place + 1) & (table_.size() - 1); }

  std::vector<uint32_t> tags_;  // of each slot
  uint32_t next_slot_ = 0;
  uint32_t shift_ = 32;
  // A power of two of entries: each at the first free place from that of its tag on.
  std::vector<Entry> table_;
};

}  // namespace kvplane::blocks
