// Which idle block is evicted next: the interface of all policies.
#pragma once

#include "core/types.h"

namespace kvplane::blocks {

// Sees the published blocks of one tier. A block is idle when nothing refers to it. Invariant: a
// block is not evicted before an idle block whose prefix continues its own. Policies read no clock:
// what they call time is the order of the calls. No call allocates memory.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // `block` holds a published prefix now; it is not idle yet. `key`: 64 bits of the prefix's
  // chained hash; the same prefix published again later has the same key. `parent`: the block
  // that holds the prefix before it, kNoBlock if there is none.
  virtual void publish(uint32_t block, uint64_t key, uint32_t parent) = 0;

  // The prefix before that of `block`, which had been evicted, is held by `parent` now.
  virtual void set_parent(uint32_t block, uint32_t parent) = 0;

  // An admission was granted that found these blocks, heads first; `num_blocks` may be 0. Called
  // before remove_idle for those that are idle, and once an admission.
  virtual void use(const uint32_t* blocks, size_t num_blocks) = 0;

  // Nothing refers to the block any more. Blocks of one sequence come tails first.
  virtual void add_idle(uint32_t block) = 0;

  // Something refers to the idle block again, or it is about to be unpublished.
  virtual void remove_idle(uint32_t block) = 0;

  // Removes and returns the block to evict; it is no longer published. At least one is idle.
  virtual uint32_t pop() = 0;

  // The block, which is not idle, is no longer published.
  virtual void unpublish(uint32_t block) = 0;

  virtual size_t num_idle() const = 0;
};

}  // namespace kvplane::blocks
