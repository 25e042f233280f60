#include "core/block_store.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace kvplane::blocks {

BlockStore::BlockStore(Tier tier, uint32_t num_blocks, std::vector<int64_t> generations,
                       PrefixIndex& index, std::unique_ptr<EvictionPolicy> policy)
    : tier(tier),
      num_blocks(num_blocks),
      index_(index),
      policy_(std::move(policy)),
      generation_(std::move(generations)),
      ref_count_(num_blocks),
      num_pins_(num_blocks),
      num_pending_(num_blocks),
      owner_(num_blocks, kNoSlot),
      pin_owner_(num_blocks, kNoSlot),
      pinned_tokens_(num_blocks),
      state_(num_blocks, State::kFree),
      place_(num_blocks, kNowhere),
      keep_(num_blocks),
      priority_(num_blocks),
      free_(num_blocks),
      links_(num_blocks) {
  generation_.resize(std::max<size_t>(generation_.size(), num_blocks));
  for (uint32_t i = 0; i < num_blocks; ++i) free_[i] = num_blocks - 1 - i;
  num_in_[static_cast<int>(State::kFree)] = num_blocks;
}

int64_t BlockStore::num_obtainable(Slot slot) const {
  return int64_t{num_in(State::kFree)} + num_in(State::kCached) + own_[slot].plain.size +
         own_[slot].kept.size;
}

int64_t BlockStore::num_coming(Slot slot) const {
  return int64_t{num_in(State::kPinned)} + num_in(State::kRetired) - own_[slot].plain.size -
         own_[slot].kept.size;
}

void BlockStore::open(Slot slot) {
  if (own_.size() <= slot) own_.resize(slot + 1);
}

void BlockStore::close(Slot slot) { own_[slot] = Own{}; }

void BlockStore::allocate(Slot slot, int64_t num, std::vector<Block>& out) {
  for (; num > 0; --num) {
    const Block b = take(slot);
    ++generation_[b];
    ref_count_[b] = 1;
    keep_[b] = 0;
    state_[b] = State::kHeld;
    ++num_in_[static_cast<int>(State::kHeld)];
    out.push_back(b);
  }
}

// A block that is in no state any more, and neither published nor a spare.
Block BlockStore::take(Slot slot) {
  Own& own = own_[slot];
  Block b;
  if (!free_.empty()) {
    b = free_.back();
    free_.pop_back();
    --num_in_[static_cast<int>(State::kFree)];
  } else if (own.plain.size) {
    b = own.plain.tail;
    leave(b);
  } else if (policy_->num_idle() + num_retained_) {
    return evict();
  } else {
    b = own.kept.head;
    leave(b);
  }
  if (index_.is_published(tier, b)) {
    ++num_evictions_;
    policy_->unpublish(b);
  }
  forget(b);
  return b;
}

Block BlockStore::evict() {
  const Block b = pop_cached();
  --num_in_[static_cast<int>(State::kCached)];
  ++num_evictions_;
  forget(b);
  return b;
}

// The cached block to be evicted next, in no list any more and no longer known to the policy.
Block BlockStore::pop_cached() {
  Block b;
  if (policy_->num_idle()) {
    b = policy_->pop();
  } else {
    int priority = 1;
    while (!retained_[priority].size) ++priority;
    b = links_.pop_front(retained_[priority]);
    --num_retained_;
    policy_->unpublish(b);
  }
  place_[b] = kNowhere;
  return b;
}

// The block, in no state, no longer holds what it held.
void BlockStore::forget(Block b) {
  const uint8_t priority = std::exchange(priority_[b], 0);
  const Block spare = index_.clear_block(tier, b);
  if (spare == kNoBlock) return;
  priority_[spare] = priority;
  published(spare);
  promoted_.push_back(spare);
}

void BlockStore::published(Block b) {
  publish_to_policy(b);
  settle(b);
}

void BlockStore::unpublish(Block b) {
  leave(b);
  policy_->unpublish(b);
  forget(b);
  enter(b);
}

Block BlockStore::pop_idle() {
  const Block b = pop_cached();
  publish_to_policy(b);
  return b;
}

void BlockStore::publish_to_policy(Block b) {
  const Entry& entry = index_[index_.entry_of(tier, b)];
  uint64_t key;
  std::memcpy(&key, entry.hash.data(), sizeof key);
  policy_->publish(b, key, index_[entry.parent].block(tier));
}

void BlockStore::share(Block b) {
  if (ref_count_[b]++ == 0) settle(b);
}

bool BlockStore::release(Block b, Slot slot, bool pending) {
  if (pending) add_pending(b, slot);
  if (--ref_count_[b]) return false;
  settle(b);
  return true;
}

void BlockStore::add_pending(Block b, Slot slot) {
  if (num_pending_[b]++ == 0) {
    owner_[b] = slot;
  } else if (owner_[b] != slot) {
    owner_[b] = kManySlots;
  }
}

void BlockStore::finished(Block b) {
  if (--num_pending_[b]) return;
  settle(b);
  owner_[b] = kNoSlot;
}

void BlockStore::pin(Block b, Slot slot, uint32_t num_tokens) {
  if (num_pins_[b]++ == 0) {
    pin_owner_[b] = slot;
    pinned_tokens_[b] = static_cast<uint16_t>(num_tokens);
    settle(b);
    return;
  }
  if (pin_owner_[b] != slot) pin_owner_[b] = kManySlots;
  pinned_tokens_[b] = std::max(pinned_tokens_[b], static_cast<uint16_t>(num_tokens));
}

void BlockStore::unpin(Block b) {
  if (--num_pins_[b]) return;
  pin_owner_[b] = kNoSlot;
  settle(b);
}

void BlockStore::keep(Block b) {
  keep_[b] = 1;
  settle(b);
}

void BlockStore::set_priority(Block b, uint8_t priority) {
  const bool cached = state_[b] == State::kCached;
  if (cached) leave(b);
  priority_[b] = priority;
  if (cached) enter(b);
}

// Puts the block in the state that its counts give it.
void BlockStore::settle(Block b) {
  leave(b);
  enter(b);
}

void BlockStore::leave(Block b) {
  --num_in_[static_cast<int>(state_[b])];
  switch (place_[b]) {
    case kNowhere:
      break;
    case kPlain:
      links_.remove(own_[owner_[b]].plain, b);
      break;
    case kKept:
      links_.remove(own_[owner_[b]].kept, b);
      break;
    case kPolicy:
      policy_->remove_idle(b);
      break;
    case kRetained:
      links_.remove(retained_[priority_[b]], b);
      --num_retained_;
      break;
  }
  place_[b] = kNowhere;
}

void BlockStore::enter(Block b) {
  if (ref_count_[b]) {
    state_[b] = State::kHeld;
  } else if (num_pins_[b]) {
    state_[b] = State::kPinned;
  } else if (num_pending_[b]) {
    state_[b] = State::kRetired;
    if (owner_[b] != kManySlots) {
      const bool kept = keep_[b] || index_.is_published(tier, b);
      links_.push_back(kept ? own_[owner_[b]].kept : own_[owner_[b]].plain, b);
      place_[b] = kept ? kKept : kPlain;
    }
  } else if (index_.is_published(tier, b)) {
    state_[b] = State::kCached;
    if (priority_[b]) {
      links_.push_back(retained_[priority_[b]], b);
      ++num_retained_;
      place_[b] = kRetained;
    } else {
      policy_->add_idle(b);
      place_[b] = kPolicy;
    }
  } else {
    state_[b] = State::kFree;
    index_.clear_block(tier, b);  // a spare that nobody holds is lost
    free_.push_back(b);
  }
  ++num_in_[static_cast<int>(state_[b])];
}

size_t BlockStore::num_bytes() const {
  const size_t num_bytes_each =
      sizeof(generation_[0]) + sizeof(ref_count_[0]) + sizeof(num_pins_[0]) +
      sizeof(num_pending_[0]) + sizeof(owner_[0]) + sizeof(pin_owner_[0]) +
      sizeof(pinned_tokens_[0]) + sizeof(state_[0]) + sizeof(place_[0]) + sizeof(keep_[0]) +
      sizeof(priority_[0]) + sizeof(free_[0]) + 2 * sizeof(Block);  // the links
  return num_blocks * num_bytes_each;
}

void BlockStore::check() const {
  const std::string name = tier == kDevice ? "device" : "host";
  auto require = [&](bool ok, Block b, const char* what) {
    if (!ok) throw std::logic_error(name + " block " + std::to_string(b) + ": " + what);
  };
  uint32_t num_in[kNumStates] = {};
  uint32_t num_policy = 0, num_retained = 0;
  std::vector<uint32_t> num_plain(own_.size()), num_kept(own_.size());
  for (Block b = 0; b < num_blocks; ++b) {
    const bool published = index_.is_published(tier, b);
    const State want = ref_count_[b]     ? State::kHeld
                       : num_pins_[b]    ? State::kPinned
                       : num_pending_[b] ? State::kRetired
                       : published       ? State::kCached
                                         : State::kFree;
    require(state_[b] == want, b, "in another state than its counts say");
    ++num_in[static_cast<int>(want)];
    require((num_pending_[b] == 0) == (owner_[b] == kNoSlot), b, "pending for nobody");
    const bool kept = keep_[b] || published;
    const Place place = want == State::kRetired && owner_[b] != kManySlots ? (kept ? kKept : kPlain)
                        : want != State::kCached                           ? kNowhere
                        : priority_[b]                                     ? kRetained
                                                                           : kPolicy;
    require(place_[b] == place, b, "in another list than its state says");
    num_policy += place == kPolicy;
    num_retained += place == kRetained;
    if (place == kPlain) ++num_plain[owner_[b]];
    if (place == kKept) ++num_kept[owner_[b]];
    require(want != State::kFree || index_.entry_of(tier, b) == kNoEntry, b, "free and a spare");
  }
  for (int s = 0; s < kNumStates; ++s) require(num_in[s] == num_in_[s], 0, "states are miscounted");
  require(free_.size() == num_in[static_cast<int>(State::kFree)], 0, "the free list differs");
  for (const Block b : free_) require(state_[b] == State::kFree, b, "listed as free");
  require(policy_->num_idle() == num_policy, 0, "the policy has other blocks");
  require(num_retained == num_retained_, 0, "retained blocks are miscounted");
  for (size_t slot = 0; slot < own_.size(); ++slot)
    require(own_[slot].plain.size == num_plain[slot] && own_[slot].kept.size == num_kept[slot], 0,
            "what a session could allocate at once differs");
}

}  // namespace kvplane::blocks
