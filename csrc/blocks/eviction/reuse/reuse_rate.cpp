#include "eviction/reuse/reuse_rate.h"

#include <algorithm>
#include <cmath>

namespace kvplane::blocks {
namespace {

constexpr uint32_t kEvictedPerBlock = 8;   // prefixes that are remembered
constexpr uint32_t kMaxEvicted = 1 << 16;  // of them in memory: a sample in larger pools
constexpr uint32_t kUpdatesPerPool = 16;   // the statistics are brought up to date so often
constexpr double kPoolsRemembered = 64;    // uses, in sizes of the pool, that count as the past
constexpr double kLossAllowed = 0.003;     // of all uses, against LRU
constexpr uint32_t kMaxUses = 255;
constexpr size_t kPrefetch = 16;  // blocks that are looked up ahead, for the cache of the CPU

// One of how many evicted prefixes is remembered: a power of two.
uint32_t weight_for(uint32_t num_blocks) {
  uint32_t weight = 1;
  while (uint64_t{num_blocks} * kEvictedPerBlock / weight > kMaxEvicted) weight *= 2;
  return weight;
}

}  // namespace

ReuseRate::ReuseRate(uint32_t num_blocks)
    : num_blocks_(num_blocks),
      weight_(weight_for(num_blocks)),
      tree_(num_blocks),
      groups_(num_blocks, statistics_),
      evicted_(uint64_t{num_blocks} * kEvictedPerBlock / weight_),
      recency_(num_blocks, evicted_.num_slots(), weight_),
      waits_(num_blocks + evicted_.num_slots()),
      keys_(num_blocks) {}

void ReuseRate::publish(const uint32_t* blocks, const uint64_t* keys, size_t num_blocks,
                        uint32_t parent) {
  num_uses_ += num_blocks;
  num_counted_ += static_cast<double>(num_blocks);
  for (size_t i = 0; i < num_blocks; ++i) {
    tree_.publish(blocks[i], i ? blocks[i - 1] : parent);
    keys_[blocks[i]] = keys[i];
  }
  // A use of a prefix is one of those before it too, so they have at least its number of uses.
  uint32_t num_uses = 0;
  for (size_t i = num_blocks; i-- > 0;) {
    if (i >= kPrefetch && is_sampled(keys[i - kPrefetch])) evicted_.prefetch(keys[i - kPrefetch]);
    if (is_sampled(keys[i])) {
      const uint32_t slot = evicted_.find(keys[i]);
      if (slot != EvictedPrefixes::kNone) num_uses = std::max(num_uses, meet_again(slot));
    }
    waits_[blocks[i]].num_uses = std::min(num_uses + 1, kMaxUses);
  }
}

void ReuseRate::set_parent(uint32_t block, uint32_t parent) {
  ancestor_changed(tree_.set_parent(block, parent));
}

void ReuseRate::use(const uint32_t* blocks, size_t num_blocks) {
  groups_.advance(num_uses_);
  recency_.set_num_recent(tree_.num_idle());
  if (num_uses_ - learned_at_ > num_blocks_ / kUpdatesPerPool) learn();
  for (size_t i = 0; i < num_blocks; ++i) {
    const uint32_t block = blocks[i];
    if (waits_[block].waits) {
      num_lru_hits_ += recency_.is_recent(block);
      num_lost_ -= !recency_.is_recent(block);
      end_wait(block, 1, true);
    }
    if (waits_[block].num_uses < kMaxUses) ++waits_[block].num_uses;
  }
  num_uses_ += num_blocks;
  num_counted_ += static_cast<double>(num_blocks);
  // Old gains do not allow losses without end.
  num_lost_ = std::max(num_lost_, -static_cast<double>(num_blocks_));
}

void ReuseRate::add_idle(const uint32_t* blocks, size_t num_blocks) {
  for (size_t i = 0; i < num_blocks; ++i) {
    const uint32_t block = blocks[i];
    waits_[block].since = groups_.now();
    waits_[block].waits = 1;
    groups_.begin(waits_[block]);
    recency_.push(block);
    ancestor_changed(tree_.add_idle(block));
    if (tree_.can_evict(block)) groups_.list(block, waits_[block], false);
  }
}

void ReuseRate::remove_idle(const uint32_t* blocks, size_t num_blocks) {
  for (size_t i = 0; i < num_blocks; ++i) {
    const uint32_t block = blocks[i];
    if (tree_.can_evict(block)) groups_.unlist(block);
    ancestor_changed(tree_.remove_idle(block));
    if (waits_[block].waits) end_wait(block, 1, false);
  }
}

void ReuseRate::pop(uint32_t* blocks, size_t num_blocks) {
  for (size_t i = 0; i < num_blocks; ++i) {
    const uint32_t block = must_be_lru() ? groups_.oldest(waits_) : groups_.worth_least();
    blocks[i] = block;
    if (is_sampled(keys_[block])) evicted_.prefetch(keys_[block]);
    groups_.unlist(block);
    // The parent follows at once: the blocks of a sequence are evicted together.
    ancestor_changed(tree_.remove_idle(block));
    tree_.unpublish(block);
    if (i >= kPrefetch) remember(blocks[i - kPrefetch]);
  }
  for (size_t i = num_blocks - std::min(num_blocks, kPrefetch); i < num_blocks; ++i) {
    remember(blocks[i]);
  }
}

void ReuseRate::unpublish(uint32_t block) { ancestor_changed(tree_.unpublish(block)); }

// Updates the lists for a block, if any, that has become evictable or has ceased to be.
void ReuseRate::ancestor_changed(uint32_t block) {
  if (block == kNoBlock) return;
  if (tree_.can_evict(block)) {
    groups_.list(block, waits_[block], true);
  } else {
    groups_.unlist(block);
  }
}

void ReuseRate::end_wait(uint32_t member, uint32_t weight, bool reused) {
  Wait& wait = waits_[member];
  if (reused) statistics_.add_reuse(wait.use_class(), groups_.now() - wait.since, weight);
  groups_.add(wait, -static_cast<int32_t>(weight));
  recency_.remove(member);
  wait.waits = 0;
}

// An evicted prefix is published again; returns how often it had been used.
uint32_t ReuseRate::meet_again(uint32_t slot) {
  const uint32_t member = num_blocks_ + slot;
  if (recency_.is_recent(member)) {
    num_lru_hits_ += weight_;
    num_lost_ += weight_;
  }
  end_wait(member, weight_, true);
  evicted_.remove(slot);
  return waits_[member].num_uses;
}

// Lets the prefix of an idle block wait on as an evicted one, if it is in the sample.
void ReuseRate::remember(uint32_t block) {
  if (!is_sampled(keys_[block])) return end_wait(block, 1, false);
  const uint32_t slot = evicted_.next_slot();
  const uint32_t member = num_blocks_ + slot;
  if (evicted_.is_used(slot)) {
    end_wait(member, weight_, false);
    evicted_.remove(slot);
  }
  evicted_.add(keys_[block]);
  waits_[member] = waits_[block];
  groups_.add(waits_[member], weight_ - 1);
  waits_[block].waits = 0;
  recency_.evict(block, member);
}

// Evicted prefixes that LRU would still hold count as half lost, at LRU's ratio of hits: becoming
// the same as LRU takes long, and the blocks held instead are found now and then as well.
bool ReuseRate::must_be_lru() const {
  const double allowed = kLossAllowed * num_counted_ - num_lost_;
  return 0.5 * recency_.num_recent_evicted() * num_lru_hits_ > allowed * num_counted_;
}

void ReuseRate::learn() {
  const double keep =
      std::exp(-static_cast<double>(num_uses_ - learned_at_) / (kPoolsRemembered * num_blocks_));
  learned_at_ = num_uses_;
  statistics_.update(keep);
  groups_.worth_changed();
  num_counted_ *= keep;
  num_lru_hits_ *= keep;
  num_lost_ *= keep;
}

}  // namespace kvplane::blocks
