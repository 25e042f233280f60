// A map from ids that clients choose to indices.
//
// Open addressing with linear probing in an array of 16-byte slots, so that a look-up mostly reads
// one cache line. Removal moves later keys back instead of leaving a mark: Knuth, The Art of
// Computer Programming, volume 3, section 6.4, algorithm R. So the time of a look-up depends only
// on the keys in the map, not on removed ones. Keys are spread by the finaliser of SplitMix64
// (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) with a seed: clients
// that do not know it cannot choose keys that all share a slot.

#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "containers/zeros.h"

namespace kvplane::blocks {

class IdMap {
 public:
  IdMap() : IdMap(0) {}
  explicit IdMap(uint64_t seed) : seed_(seed) {}

  size_t size() const { return size_; }

  // The value of `key`, to read or to change; null if absent. Valid until the next insert, erase or
  // clear.
  uint32_t* find(int64_t key) {
    if (size_ == 0 || key == kEmpty) return nullptr;
    Slot& slot = slots_[slot_of(key)];
    return slot.key == key ? &slot.value : nullptr;
  }
  const uint32_t* find(int64_t key) const { return const_cast<IdMap*>(this)->find(key); }
  bool contains(int64_t key) const { return find(key) != nullptr; }

  // Returns whether `key` was new; if not, nothing changes.
  bool insert(int64_t key, uint32_t value) {
    assert(key > 0);
    reserve(1);
    Slot& slot = slots_[slot_of(key)];
    if (slot.key == key) return false;
    slot = {key, value};
    ++size_;
    return true;
  }

  // Makes room for `num` more keys, so that inserting them moves no entry.
  void reserve(size_t num) {
    size_t num_slots = slots_.size() ? slots_.size() : kMinSlots;
    while (4 * (size_ + num) > 3 * num_slots) num_slots *= 2;
    if (num_slots != slots_.size()) grow(num_slots);
  }

  // Returns whether `key` was there.
  bool erase(int64_t key) {
    if (size_ == 0 || key == kEmpty) return false;
    const size_t mask = slots_.size() - 1;
    size_t hole = slot_of(key);
    if (slots_[hole].key != key) return false;
    // A later key of the run may fill the hole unless its home lies after the hole.
    for (size_t next = (hole + 1) & mask; slots_[next].key != kEmpty; next = (next + 1) & mask) {
      const size_t home = home_of(slots_[next].key);
      if (((next - home) & mask) < ((next - hole) & mask)) continue;
      slots_[hole] = slots_[next];
      hole = next;
    }
    slots_[hole].key = kEmpty;
    --size_;
    return true;
  }

  // Also frees the memory.
  void clear() {
    slots_ = {};
    size_ = 0;
  }

  // Calls visit(key, value) for every entry, in no order; `visit` must not change the map.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (size_t i = 0; i < slots_.size(); ++i)
      if (slots_[i].key != kEmpty) visit(slots_[i].key, slots_[i].value);
  }

 private:
  struct Slot {
    int64_t key;
    uint32_t value;
  };

  static constexpr int64_t kEmpty = 0;  // as slots begin
  static constexpr size_t kMinSlots = 8;

  size_t home_of(int64_t key) const {
    uint64_t x = static_cast<uint64_t>(key) ^ seed_;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (x ^ (x >> 31)) & (slots_.size() - 1);
  }

  // Where `key` is, or where it would go: a quarter of the slots is empty, so the search ends.
  size_t slot_of(int64_t key) const {
    const size_t mask = slots_.size() - 1;
    size_t slot = home_of(key);
    while (slots_[slot].key != key && slots_[slot].key != kEmpty) slot = (slot + 1) & mask;
    return slot;
  }

  void grow(size_t num_slots) {
    const Zeros<Slot> old = std::exchange(slots_, Zeros<Slot>(num_slots));
    for (size_t i = 0; i < old.size(); ++i)
      if (old[i].key != kEmpty) slots_[slot_of(old[i].key)] = old[i];
  }

  Zeros<Slot> slots_;  // as many as a power of two, or none
  size_t size_ = 0;
  uint64_t seed_;
};

}  // namespace kvplane::blocks
