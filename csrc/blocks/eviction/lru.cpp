#include "lru.h"

namespace kvplane::blocks {

LeastRecentlyUsed::LeastRecentlyUsed(uint32_t num_blocks)
    : tree_(num_blocks), links_(num_blocks + 1, {num_blocks, num_blocks}) {}

void LeastRecentlyUsed::publish(uint32_t block, uint64_t, uint32_t parent) {
  tree_.publish(block, parent);
}

void LeastRecentlyUsed::set_parent(uint32_t block, uint32_t parent) {
  tree_.set_parent(block, parent);
}

void LeastRecentlyUsed::add_idle(uint32_t block) {
  tree_.add_idle(block);
  push(block);
}

void LeastRecentlyUsed::remove_idle(uint32_t block) {
  tree_.remove_idle(block);
  remove(block);
}

uint32_t LeastRecentlyUsed::pop() {
  const uint32_t end = links_.size() - 1;
  // An idle block is newer than those below it, unless they were in use without it, by a sequence
  // that had computed a copy of it. Then it was needed as recently as they were.
  while (!tree_.can_evict(links_[end].newer)) {
    const uint32_t block = links_[end].newer;
    remove(block);
    push(block);
  }
  const uint32_t block = links_[end].newer;
  remove_idle(block);
  tree_.unpublish(block);
  return block;
}

void LeastRecentlyUsed::unpublish(uint32_t block) { tree_.unpublish(block); }

void LeastRecentlyUsed::push(uint32_t block) {
  const uint32_t end = links_.size() - 1;
  const uint32_t newest = links_[end].older;
  links_[block] = {end, newest};
  links_[newest].newer = block;
  links_[end].older = block;
}

void LeastRecentlyUsed::remove(uint32_t block) {
  const auto [newer, older] = links_[block];
  links_[older].newer = newer;
  links_[newer].older = older;
}

}  // namespace kvplane::blocks
