#include "eviction/lru.h"

namespace kvplane::blocks {
namespace {

constexpr uint32_t kAhead = 8;  // how far blocks are fetched from memory

}  // namespace

LeastRecentlyUsed::LeastRecentlyUsed(uint32_t num_blocks)
    : tree_(num_blocks), links_(num_blocks + 1, {num_blocks, num_blocks}) {}

void LeastRecentlyUsed::publish(const uint32_t* blocks, const uint64_t*, size_t num_blocks,
                                uint32_t parent) {
  for (size_t i = 0; i < num_blocks; ++i) {
    if (i + kAhead < num_blocks) tree_.prefetch(blocks[i + kAhead]);
    tree_.publish(blocks[i], i ? blocks[i - 1] : parent);
  }
}

void LeastRecentlyUsed::set_parent(uint32_t block, uint32_t parent) {
  tree_.set_parent(block, parent);
}

void LeastRecentlyUsed::add_idle(const uint32_t* blocks, size_t num_blocks) {
  // Heads first, as then no block is added below one that is not idle yet.
  for (size_t i = num_blocks; i-- > 0;) {
    if (i >= kAhead) prefetch(blocks[i - kAhead]);
    tree_.add_idle(blocks[i]);
  }
  for (size_t i = 0; i < num_blocks; ++i) push(blocks[i]);
}

void LeastRecentlyUsed::remove_idle(const uint32_t* blocks, size_t num_blocks) {
  // Tails first, for the same reason.
  for (size_t i = num_blocks; i-- > 0;) {
    if (i >= kAhead) prefetch(blocks[i - kAhead]);
    come_next(tree_.remove_idle(blocks[i]));
    remove(blocks[i]);
  }
}

void LeastRecentlyUsed::pop(uint32_t* blocks, size_t num_blocks) {
  const uint32_t end = links_.size() - 1;
  for (size_t i = 0; i < num_blocks; ++i) {
    // An idle block is newer than those below it, unless they were in use without it, by a sequence
    // that had computed a copy of it. Then it comes next once none is idle below it.
    while (!tree_.can_evict(links_[end].newer)) {
      const uint32_t block = links_[end].newer;
      remove(block);
      links_[block] = {block, block};
    }
    const uint32_t block = links_[end].newer;
    blocks[i] = block;
    // Blocks of a sequence mostly lie one after another.
    const uint32_t step = block - last_popped_, later = block + kAhead * step;
    if ((step == 1 || step == uint32_t(-1)) && later < end) prefetch(later);
    last_popped_ = block;
    remove(block);
    come_next(tree_.remove_idle(block));
    tree_.unpublish(block);
  }
}

void LeastRecentlyUsed::unpublish(uint32_t block) { come_next(tree_.unpublish(block)); }

void LeastRecentlyUsed::prefetch(uint32_t block) const {
  tree_.prefetch(block);
  __builtin_prefetch(&links_[block], 1);
}

void LeastRecentlyUsed::push(uint32_t block) {
  const uint32_t end = links_.size() - 1;
  const uint32_t newest = links_[end].older;
  links_[block] = {end, newest};
  links_[newest].newer = block;
  links_[end].older = block;
}

// The idle block is evicted next if it waited until none is idle below it.
void LeastRecentlyUsed::come_next(uint32_t block) {
  if (block == kNoBlock || links_[block].newer != block) return;
  const uint32_t end = links_.size() - 1, oldest = links_[end].newer;
  links_[block] = {oldest, end};
  links_[oldest].older = block;
  links_[end].newer = block;
}

void LeastRecentlyUsed::remove(uint32_t block) {
  const auto [newer, older] = links_[block];
  links_[older].newer = newer;
  links_[newer].older = older;
}

}  // namespace kvplane::blocks
