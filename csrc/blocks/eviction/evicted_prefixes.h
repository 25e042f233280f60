// A bounded memory of evicted prefixes.
#pragma once

#include <cstdint>
#include <vector>

namespace kvplane::blocks {

// A ring of slots with a hash table over it: when it is full, the prefix that was evicted longest
// ago is forgotten. Found by 32 bits of the key and its place in the table: two prefixes that are
// taken for one spoil a statistic, nothing else.
class EvictedPrefixes {
 public:
  static constexpr uint32_t kNone = 0xFFFFFFFF;

  explicit EvictedPrefixes(uint32_t num_slots);

  uint32_t num_slots() const { return slots_.size(); }

  // The slot of a prefix, or kNone.
  uint32_t find(uint64_t key) const;

  // The slot that `add` will use; `is_used` says whether it holds a prefix, to be removed first.
  uint32_t next_slot() const { return next_slot_; }
  bool is_used(uint32_t slot) const { return slots_[slot].bucket != kNone; }

  void add(uint64_t key);  // at next_slot(), which is not used
  void remove(uint32_t slot);

 private:
  struct Slot {
    uint32_t tag;
    uint32_t bucket;  // kNone when not used
    uint32_t next;    // of the same bucket
  };

  uint32_t bucket_of(uint64_t key) const { return (key >> 32) & (buckets_.size() - 1); }

  std::vector<Slot> slots_;
  std::vector<uint32_t> buckets_;  // the first slot of each; a power of two of them
  uint32_t next_slot_ = 0;
};

}  // namespace kvplane::blocks
