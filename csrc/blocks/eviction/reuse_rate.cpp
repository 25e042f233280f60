#include "reuse_rate.h"

#include <algorithm>
#include <cmath>

namespace kvplane::blocks {
namespace {

constexpr uint32_t kEvictedPerBlock = 4;  // prefixes that are remembered
constexpr uint32_t kUpdatesPerPool = 16;  // the statistics are brought up to date so often
constexpr double kPoolsRemembered = 64;   // uses, in sizes of the pool, that count as the past
constexpr double kLossAllowed = 0.0025;   // of all uses, against LRU
constexpr uint32_t kMaxUses = 255;

}  // namespace

ReuseRate::ReuseRate(uint32_t num_blocks)
    : num_blocks_(num_blocks),
      tree_(num_blocks),
      groups_(num_blocks, statistics_),
      evicted_(num_blocks * kEvictedPerBlock),
      recency_(num_blocks + evicted_.num_slots()),
      waits_(num_blocks + evicted_.num_slots()),
      keys_(num_blocks) {}

void ReuseRate::publish(uint32_t block, uint64_t key, uint32_t parent) {
  tree_.publish(block, parent);
  keys_[block] = key;
  ++num_uses_;
  num_counted_ += 1;
  waits_[block].num_uses = 1;
  const uint32_t slot = evicted_.find(key);
  if (slot == EvictedPrefixes::kNone) return;
  const uint32_t member = num_blocks_ + slot;
  num_lost_ += recency_.is_recent(member);
  waits_[block].num_uses = std::min<uint32_t>(waits_[member].num_uses + 1, kMaxUses);
  end_wait(member, true);
  evicted_.remove(slot);
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
      num_lost_ -= !recency_.is_recent(block);
      end_wait(block, true);
    }
    if (waits_[block].num_uses < kMaxUses) ++waits_[block].num_uses;
  }
  num_uses_ += num_blocks;
  num_counted_ += static_cast<double>(num_blocks);
  // What was gained long ago does not allow losses without end.
  num_lost_ = std::max(num_lost_, -static_cast<double>(num_blocks_));
}

void ReuseRate::add_idle(uint32_t block) {
  waits_[block].since = groups_.now();
  waits_[block].waits = 1;
  groups_.begin(waits_[block]);
  recency_.push(block);
  ancestor_changed(tree_.add_idle(block));
  if (tree_.can_evict(block)) groups_.list(block, waits_[block], false);
}

void ReuseRate::remove_idle(uint32_t block) {
  if (tree_.can_evict(block)) groups_.unlist(block);
  ancestor_changed(tree_.remove_idle(block));
  if (waits_[block].waits) end_wait(block, false);
}

uint32_t ReuseRate::pop() {
  const bool as_lru = num_lost_ > kLossAllowed * num_counted_;
  const uint32_t block = as_lru ? groups_.oldest(waits_) : groups_.worth_least();
  groups_.unlist(block);
  remember(block);
  // The parent follows at once: the blocks of a sequence are evicted together.
  ancestor_changed(tree_.remove_idle(block));
  tree_.unpublish(block);
  return block;
}

void ReuseRate::unpublish(uint32_t block) { ancestor_changed(tree_.unpublish(block)); }

// The block, if any, can be evicted since just now, or no longer.
void ReuseRate::ancestor_changed(uint32_t block) {
  if (block == kNoBlock) return;
  if (tree_.can_evict(block)) {
    groups_.list(block, waits_[block], true);
  } else {
    groups_.unlist(block);
  }
}

void ReuseRate::end_wait(uint32_t member, bool reused) {
  Wait& wait = waits_[member];
  if (reused) statistics_.add_reuse(wait.use_class(), groups_.now() - wait.since);
  groups_.end(wait);
  recency_.remove(member);
  wait.waits = 0;
}

// The prefix of an idle block goes on to wait as an evicted one.
void ReuseRate::remember(uint32_t block) {
  const uint32_t slot = evicted_.next_slot();
  const uint32_t member = num_blocks_ + slot;
  if (evicted_.is_used(slot)) {
    end_wait(member, false);
    evicted_.remove(slot);
  }
  evicted_.add(keys_[block]);
  waits_[member] = waits_[block];
  waits_[block].waits = 0;
  recency_.replace(block, member);
}

void ReuseRate::learn() {
  const double keep =
      std::exp(-static_cast<double>(num_uses_ - learned_at_) / (kPoolsRemembered * num_blocks_));
  learned_at_ = num_uses_;
  statistics_.update(keep);
  groups_.worth_changed();
  num_counted_ *= keep;
  num_lost_ *= keep;
}

}  // namespace kvplane::blocks
