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

  // The blocks hold published prefixes now, each one block longer than the one before it, the first
  // one longer than that of `parent`, or kNoBlock where there is none. None is idle yet. `keys`:
  // 64 bits of each prefix's chained hash; a prefix that is published again has the same key. Null
  // unless the policy uses them.
  virtual void publish(const uint32_t* blocks, const uint64_t* keys, size_t num_blocks,
                       uint32_t parent) = 0;

  // The prefix before that of `block`, which had been evicted, is held by `parent` now.
  virtual void set_parent(uint32_t block, uint32_t parent) = 0;

  // An admission was granted that found these blocks, heads first; `num_blocks` may be 0. Called
  // once an admission, before remove_idle for those that are idle.
  virtual void use(const uint32_t* blocks, size_t num_blocks) = 0;

  // Nothing refers to the blocks any more. Those of one sequence come tails first.
  virtual void add_idle(const uint32_t* blocks, size_t num_blocks) = 0;

  // Something refers to the idle blocks again, or they are about to be unpublished.
  virtual void remove_idle(const uint32_t* blocks, size_t num_blocks) = 0;

  // Removes the blocks to evict, in that order; they are no longer published. At least as many are
  // idle.
  virtual void pop(uint32_t* blocks, size_t num_blocks) = 0;

  // The block, which is not idle, is no longer published.
  virtual void unpublish(uint32_t block) = 0;

  virtual size_t num_idle() const = 0;

  // The block that holds the prefix before that of `block`, or kNoBlock.
  virtual uint32_t parent_of(uint32_t block) const = 0;

  virtual bool uses_keys() const = 0;
};

}  // namespace kvplane::blocks
