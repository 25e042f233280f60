#include "memory/block_store.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <string>

#include "core/require.h"

namespace kvplane::blocks {

namespace {

// How far ahead blocks are fetched from memory.
constexpr uint32_t kAhead = 8;
// Blocks that are taken, and perhaps evicted, together.
constexpr int64_t kAtOnce = 32;

}  // namespace

BlockStore::BlockStore(Tier tier, uint32_t num_blocks, std::vector<int64_t> generations,
                       PrefixIndex& index, std::unique_ptr<EvictionPolicy> policy)
    : tier(tier),
      num_blocks(num_blocks),
      index_(index),
      policy_(std::move(policy)),
      policy_uses_keys_(policy_->uses_keys()),
      infos_(num_blocks),
      free_(num_blocks) {
  generations.resize(std::max<size_t>(generations.size(), num_blocks));
  for (Block b = 0; b < num_blocks; ++b) infos_[b].generation = generations[b];
  more_generations_.assign(generations.begin() + num_blocks, generations.end());
  for (uint32_t i = 0; i < num_blocks; ++i) free_[i] = num_blocks - 1 - i;
  num_in_[static_cast<int>(State::kFree)] = num_blocks;
}

int64_t BlockStore::num_obtainable(SessionHandle handle) const {
  const RetiredBlocks& own = retired_[handle];
  const int64_t num = int64_t{num_in(State::kFree)} + num_in(State::kCached) + own.plain.size +
                      own.kept.size - (num_promised_ - own.num_promised);
  return std::max<int64_t>(0, num);
}

int64_t BlockStore::num_coming(SessionHandle handle) const {
  return int64_t{num_in(State::kPinned)} + num_in(State::kRetired) - retired_[handle].plain.size -
         retired_[handle].kept.size;
}

void BlockStore::open(SessionHandle handle) {
  if (retired_.size() <= handle) retired_.resize(handle + 1);
}

void BlockStore::close(SessionHandle handle) {
  assert(!num_own_retired(handle) && !retired_[handle].num_promised);
  retired_[handle] = RetiredBlocks{};
}

void BlockStore::promise(SessionHandle handle, int64_t num) {
  num_promised_ += num - std::exchange(retired_[handle].num_promised, num);
}

void BlockStore::allocate(SessionHandle handle, int64_t num, std::vector<Block>& out) {
  if (const int64_t num_promised = retired_[handle].num_promised)
    promise(handle, std::max<int64_t>(0, num_promised - num));
  num_in_[static_cast<int>(State::kHeld)] += static_cast<uint32_t>(num);
  touched(static_cast<size_t>(num));
  out.resize(out.size() + static_cast<size_t>(num));
  for (Block* blocks = out.data() + out.size() - num; num > 0;) {
    const int64_t num_taken = take(handle, blocks, std::min(num, kAtOnce));
    for (const Block* const end = blocks + num_taken; blocks < end; ++blocks) {
      Info& info = infos_[*blocks];
      assert(info.ref_count == 0 && info.num_pins == 0 && !info.published);
      ++info.generation;
      info.ref_count = 1;
      info.keep = false;
      info.state = State::kHeld;
    }
    num -= num_taken;
  }
}

// Removes up to `most` blocks from their states, so that they are neither published nor spares; the
// caller sets their new state. Returns how many, at least one.
int64_t BlockStore::take(SessionHandle handle, Block* blocks, int64_t most) {
  RetiredBlocks& own = retired_[handle];
  Block b;
  if (!free_.empty()) {
    b = free_.back();
    free_.pop_back();
    --num_in_[static_cast<int>(State::kFree)];
  } else if (own.plain.size) {
    b = own.plain.tail;
    leave(b);
  } else if (own.kept.size && !num_idle_) {
    b = own.kept.head;
    leave(b);
  } else {
    assert(num_idle_ + num_retained_);  // callers check for room first
    return evict(handle, blocks, most);
  }
  if (infos_[b].published) {
    if (on_evict) on_evict(handle, {&b, 1}, Eviction::kOwn);
    policy_->unpublish(b);
  }
  forget(b);
  blocks[0] = b;
  return 1;
}

int64_t BlockStore::evict(SessionHandle handle, Block* blocks, int64_t most) {
  const int64_t num = pop_cached(blocks, most);
  touched(static_cast<size_t>(num));
  for (int64_t i = 0; i < num; ++i) {
    prefetch(blocks[i]);
    index_.prefetch(index_.entry_of(tier, blocks[i]));
  }
  num_in_[static_cast<int>(State::kCached)] -= static_cast<uint32_t>(num);
  if (on_evict)
    on_evict(handle, {blocks, num},
             infos_[blocks[0]].priority ? Eviction::kRetained : Eviction::kPolicy);
  for (int64_t i = 0; i < num; ++i) {
    infos_[blocks[i]].place = kNowhere;
    forget(blocks[i]);
  }
  return num;
}

// Removes the cached blocks to be evicted next from the policy; one by one if a spare may take the
// place of one, which the policy must know before it chooses another.
int64_t BlockStore::pop_cached(Block* blocks, int64_t most) {
  if (num_idle_) {
    const int64_t num = index_.num_spares() ? 1 : std::min(most, int64_t{num_idle_});
    policy_->pop(blocks, static_cast<size_t>(num));
    num_idle_ -= static_cast<uint32_t>(num);
    return num;
  }
  int priority = 1;
  while (!retained_[priority].size) ++priority;
  const Block b = retained_[priority].head;
  remove(retained_[priority], b);
  --num_retained_;
  policy_->unpublish(b);
  blocks[0] = b;
  return 1;
}

// Drops the contents of a block that is in no state.
void BlockStore::forget(Block b) {
  infos_[b].published = false;
  const uint8_t priority = std::exchange(infos_[b].priority, 0);
  const Block spare = index_.clear_block(tier, b);
  if (spare == kNoBlock) return;
  infos_[spare].priority = priority;
  published(spare);
  promoted_.push_back(spare);
}

void BlockStore::published(Block b) {
  publish_to_policy(b, index_.entry_of(tier, b));
  if (infos_[b].state == State::kHeld) return;
  settle(b);
  tell_policy();
}

void BlockStore::published(const std::vector<Block>& blocks) {
  keys_.clear();
  touched(blocks.size());
  for (const Block b : blocks) {
    infos_[b].published = true;
    if (policy_uses_keys_) keys_.push_back(key_of(index_.entry_of(tier, b)));
  }
  const EntryId first = index_.entry_of(tier, blocks[0]);
  policy_->publish(blocks.data(), policy_uses_keys_ ? keys_.data() : nullptr, blocks.size(),
                   index_[index_[first].parent].block(tier));
}

void BlockStore::unpublish(Block b) {
  leave(b);
  tell_policy();
  policy_->unpublish(b);
  forget(b);
  enter(b);
}

void BlockStore::publish_to_policy(Block b, EntryId e) {
  infos_[b].published = true;
  touched(1);
  const uint64_t key = policy_uses_keys_ ? key_of(e) : 0;
  policy_->publish(&b, policy_uses_keys_ ? &key : nullptr, 1, index_[index_[e].parent].block(tier));
  for (EntryId c = index_[e].child; c != kNoEntry; c = index_[c].next, touched(1))
    if (index_[c].block(tier) != kNoBlock) policy_->set_parent(index_[c].block(tier), b);
}

uint64_t BlockStore::key_of(EntryId e) const {
  uint64_t key;
  std::memcpy(&key, index_.hash(e).data(), sizeof key);
  return key;
}

void BlockStore::share(const Block* blocks, size_t num) {
  touched(num);
  for (size_t i = 0; i < num; ++i) {
    if (i + kAhead < num) prefetch(blocks[i + kAhead]);
    if (infos_[blocks[i]].ref_count++ == 0) settle(blocks[i]);
  }
  tell_policy();
}

size_t BlockStore::release(const Block* blocks, size_t num, SessionHandle handle, bool pending) {
  size_t num_released = 0;
  touched(num);
  for (size_t i = 0; i < num; ++i) {
    const Block b = blocks[i];
    assert(infos_[b].ref_count > 0);
    if (pending) add_pending(b, handle);
    if (--infos_[b].ref_count) continue;
    settle(b);
    ++num_released;
  }
  tell_policy();
  return num_released;
}

void BlockStore::add_pending(Block b, SessionHandle handle) {
  if (infos_[b].num_pending++ == 0) {
    infos_[b].owner = handle;
  } else if (infos_[b].owner != handle) {
    infos_[b].owner = kManySessions;
  }
}

void BlockStore::finished(const Block* blocks, size_t num) {
  touched(num);
  for (size_t i = 0; i < num; ++i) {
    if (i + kAhead < num) prefetch(blocks[i + kAhead]);
    const Block b = blocks[i];
    assert(infos_[b].num_pending > 0);
    if (--infos_[b].num_pending) continue;
    settle(b);
    infos_[b].owner = kNoSession;
  }
  tell_policy();
}

void BlockStore::pin(Block b, SessionHandle handle, uint32_t num_tokens) {
  if (infos_[b].num_pins++ == 0) {
    infos_[b].pin_owner = handle;
    infos_[b].pinned_tokens = static_cast<uint16_t>(num_tokens);
    if (infos_[b].state == State::kHeld) return touched(1);
    settle(b);
    tell_policy();
    return;
  }
  if (infos_[b].pin_owner != handle) infos_[b].pin_owner = kManySessions;
  infos_[b].pinned_tokens = std::max(infos_[b].pinned_tokens, static_cast<uint16_t>(num_tokens));
}

void BlockStore::unpin(Block b) {
  assert(infos_[b].num_pins > 0);
  if (--infos_[b].num_pins) return;
  infos_[b].pin_owner = kNoSession;
  settle(b);
  tell_policy();
}

void BlockStore::keep(Block b) {
  infos_[b].keep = true;
  settle(b);
  tell_policy();
}

void BlockStore::set_priority(Block b, uint8_t priority) {
  const bool cached = infos_[b].state == State::kCached;
  if (cached) leave(b);
  infos_[b].priority = priority;
  if (cached) enter(b);
  tell_policy();
}

std::vector<int64_t> BlockStore::generations() const {
  std::vector<int64_t> generations;
  for (const Info& info : infos_) generations.push_back(info.generation);
  generations.insert(generations.end(), more_generations_.begin(), more_generations_.end());
  return generations;
}

void BlockStore::push_back(List& list, Block b) {
  infos_[b].next = kEnd;
  infos_[b].prev = list.tail;
  (list.tail == kEnd ? list.head : infos_[list.tail].next) = b;
  list.tail = b;
  ++list.size;
}

void BlockStore::remove(List& list, Block b) {
  const Info& info = infos_[b];
  (info.prev == kEnd ? list.head : infos_[info.prev].next) = info.next;
  (info.next == kEnd ? list.tail : infos_[info.next].prev) = info.prev;
  --list.size;
}

// Puts the block in the state that its counts give it; `tell_policy` follows.
void BlockStore::settle(Block b) {
  leave(b);
  enter(b);
}

void BlockStore::tell_policy() {
  if (!no_longer_idle_.empty()) {
    policy_->remove_idle(no_longer_idle_.data(), no_longer_idle_.size());
    num_idle_ -= static_cast<uint32_t>(no_longer_idle_.size());
    no_longer_idle_.clear();
  }
  if (!idle_.empty()) {
    policy_->add_idle(idle_.data(), idle_.size());
    num_idle_ += static_cast<uint32_t>(idle_.size());
    idle_.clear();
  }
}

void BlockStore::leave(Block b) {
  touched(1);
  --num_in_[static_cast<int>(infos_[b].state)];
  switch (infos_[b].place) {
    case kNowhere:
      break;
    case kPlain:
      remove(retired_[infos_[b].owner].plain, b);
      break;
    case kKept:
      remove(retired_[infos_[b].owner].kept, b);
      break;
    case kPolicy:
      no_longer_idle_.push_back(b);
      break;
    case kRetained:
      remove(retained_[infos_[b].priority], b);
      --num_retained_;
      break;
  }
  infos_[b].place = kNowhere;
}

void BlockStore::enter(Block b) {
  if (infos_[b].ref_count) {
    infos_[b].state = State::kHeld;
  } else if (infos_[b].num_pins) {
    infos_[b].state = State::kPinned;
  } else if (infos_[b].num_pending) {
    infos_[b].state = State::kRetired;
    if (infos_[b].owner != kManySessions) {
      const bool kept = infos_[b].keep || infos_[b].published;
      push_back(kept ? retired_[infos_[b].owner].kept : retired_[infos_[b].owner].plain, b);
      infos_[b].place = kept ? kKept : kPlain;
    }
  } else if (infos_[b].published) {
    infos_[b].state = State::kCached;
    if (infos_[b].priority) {
      push_back(retained_[infos_[b].priority], b);
      ++num_retained_;
      infos_[b].place = kRetained;
    } else {
      idle_.push_back(b);
      infos_[b].place = kPolicy;
    }
  } else {
    infos_[b].state = State::kFree;
    index_.clear_block(tier, b);  // a spare that nobody holds is lost
    free_.push_back(b);
  }
  ++num_in_[static_cast<int>(infos_[b].state)];
}

void BlockStore::check(const BlockUses& uses) const {
  const Require require(tier == kDevice ? "device block" : "host block");
  uint32_t num_in[kNumStates] = {};
  uint32_t num_policy = 0, num_retained = 0;
  std::vector<uint32_t> num_plain(retired_.size()), num_kept(retired_.size());
  for (Block b = 0; b < num_blocks; ++b) {
    require(infos_[b].ref_count == uses.refs[tier - 1][b], "references differ", b);
    require(infos_[b].num_pins == uses.pins[tier - 1][b], "pins differ", b);
    require(infos_[b].num_pending == uses.pending[tier - 1][b], "pending releases differ", b);
    const bool published = index_.is_published(tier, b);
    const State want = infos_[b].ref_count     ? State::kHeld
                       : infos_[b].num_pins    ? State::kPinned
                       : infos_[b].num_pending ? State::kRetired
                       : published             ? State::kCached
                                               : State::kFree;
    require(infos_[b].state == want, "in another state than its counts say", b);
    require(infos_[b].published == published, "published, or not, and does not know it", b);
    if (published) {
      const EntryId parent = index_[index_.entry_of(tier, b)].parent;  // a root, if it was detached
      require(index_.is_root(parent) || policy_->parent_of(b) == index_[parent].block(tier),
              "the policy has another parent", b);
    }
    ++num_in[static_cast<int>(want)];
    require((infos_[b].num_pending == 0) == (infos_[b].owner == kNoSession), "pending for nobody",
            b);
    const bool kept = infos_[b].keep || published;
    const Place place = want == State::kRetired && infos_[b].owner != kManySessions
                            ? (kept ? kKept : kPlain)
                        : want != State::kCached ? kNowhere
                        : infos_[b].priority     ? kRetained
                                                 : kPolicy;
    require(infos_[b].place == place, "in another list than its state says", b);
    num_policy += place == kPolicy;
    num_retained += place == kRetained;
    if (place == kPlain) ++num_plain[infos_[b].owner];
    if (place == kKept) ++num_kept[infos_[b].owner];
    require(want != State::kFree || index_.entry_of(tier, b) == kNoEntry, "free and a spare", b);
  }
  for (int s = 0; s < kNumStates; ++s) require(num_in[s] == num_in_[s], "states are miscounted");
  require(free_.size() == num_in[static_cast<int>(State::kFree)], "the free list differs");
  for (const Block b : free_) require(infos_[b].state == State::kFree, "listed as free", b);
  require(num_idle_ == num_policy && policy_->num_idle() == num_policy,
          "the policy has other blocks");
  require(num_retained == num_retained_, "retained blocks are miscounted");
  require(promoted_.empty(), "a spare took a place, and is not announced");
  int64_t num_promised = 0;
  for (size_t handle = 0; handle < retired_.size(); ++handle) {
    require(retired_[handle].plain.size == num_plain[handle] &&
                retired_[handle].kept.size == num_kept[handle],
            "what a session could allocate at once differs");
    num_promised += retired_[handle].num_promised;
  }
  require(num_promised == num_promised_, "promised blocks are miscounted");
}

}  // namespace kvplane::blocks
