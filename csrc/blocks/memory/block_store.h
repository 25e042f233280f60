// The blocks of one tier: references, pins, plans that may still touch each, and reuse.
//
// Every block is in exactly one state:
//
//     FREE --allocate--> HELD --its last reference is released--> PINNED    a transfer reads it
//      ^                  ^                                         |
//      |                  | share (a prefix hit)                    v  the transfer has run
//      |                  +------------------------------------- RETIRED    an unfinished plan may
//      |                  |                                         |       touch it
//      |                  |                                         |
//      +-- not published <------------------------------------------+  those plans have finished
//      |                  |                                         v
//      |                  +------------------------------------- CACHED     published: evicted when
//      |                                                            |       free blocks run short
//      +------------------------ allocate <-------------------------+
//
// A release is remembered with the session's plan until that plan has finished: `num_pending`
// counts them, one integer a block however many sessions share it. A retired block that a single
// session released can be allocated by that session at once, since its plans run in order.
//
// Callers check for room first; nothing here fails. O(1) a block.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "containers/lists.h"
#include "core/block_times.h"
#include "core/types.h"
#include "eviction/policy.h"
#include "index/prefix_index.h"

namespace kvplane::blocks {

// What blocks are used for, as the classes of a group know it.
struct BlockUses {
  std::vector<uint32_t> refs[2], pins[2], pending[2];  // by tier and block
  std::vector<int64_t> held;                           // by owner
};

enum class State : uint8_t { kFree, kCached, kRetired, kPinned, kHeld };
constexpr int kNumStates = 5;

class BlockStore {
 public:
  BlockStore(Tier tier, uint32_t num_blocks, std::vector<int64_t> generations, PrefixIndex& index,
             std::unique_ptr<EvictionPolicy> policy);

  const Tier tier;
  const uint32_t num_blocks;

  // Called with blocks that are about to be evicted for a session, still published.
  std::function<void(SessionHandle, Span<Block>, Eviction)> on_evict;

  // Queries
  int64_t generation(Block b) const { return infos_[b].generation; }
  std::vector<int64_t> generations() const;  // also of blocks beyond num_blocks
  uint32_t ref_count(Block b) const { return infos_[b].ref_count; }
  uint32_t num_pins(Block b) const { return infos_[b].num_pins; }
  uint32_t num_pending(Block b) const { return infos_[b].num_pending; }
  State state(Block b) const { return infos_[b].state; }
  void prefetch(Block b) const { __builtin_prefetch(&infos_[b], 1); }
  uint32_t num_in(State state) const { return num_in_[static_cast<int>(state)]; }
  // How often operations have visited a block so far. A visit reads this block and at most the two
  // beside it in a list.
  uint64_t num_touched() const { return num_touched_; }
  // Counts `num` further visits.
  void touched(size_t num) const { num_touched_ += num; }
  EvictionPolicy& policy() { return *policy_; }
  // Blocks that the session could allocate now, and those that it could after receipts and fences.
  int64_t num_obtainable(SessionHandle handle) const;
  int64_t num_coming(SessionHandle handle) const;
  // Retired blocks that this session alone could allocate at once.
  int64_t num_own_retired(SessionHandle handle) const {
    return retired_[handle].plain.size + retired_[handle].kept.size;
  }
  // Whether `num_obtainable` counts the block.
  bool is_obtainable(Block b, SessionHandle handle) const {
    return infos_[b].state == State::kFree || infos_[b].state == State::kCached ||
           (infos_[b].state == State::kRetired && infos_[b].owner == handle);
  }
  // Whether `num_obtainable` counts the block once the session drops its reference.
  bool comes_back(Block b, SessionHandle handle) const {
    const Info& info = infos_[b];
    return info.ref_count == 1 && info.num_pins == 0 &&
           (info.owner == kNoSession || info.owner == handle);
  }
  // Whether a session whose table alone refers to the block may write it from `offset` tokens on:
  // it holds no published prefix nor may soon, and transfers read at most tokens before `offset`,
  // for earlier plans of the same session.
  bool is_writable(Block b, SessionHandle handle, uint32_t offset) const {
    const Info& info = infos_[b];
    return info.ref_count == 1 && !info.keep &&
           (info.num_pins == 0 || (info.pin_owner == handle && info.pinned_tokens <= offset)) &&
           index_.entry_of(tier, b) == kNoEntry;
  }

  // Sessions
  void open(SessionHandle handle);
  void close(SessionHandle handle);  // nothing of it is pending or promised

  // Changes
  // Keeps `num` of the obtainable blocks from other sessions until this one has allocated as many;
  // ends an earlier promise to it.
  void promise(SessionHandle handle, int64_t num);
  // Appends blocks for one table, each of a new generation.
  void allocate(SessionHandle handle, int64_t num, std::vector<Block>& out);
  // Adds a reference to each. Idle blocks become held.
  void share(const Block* blocks, size_t num);
  // Removes a reference from each. If `pending`, the session's plan may touch the blocks:
  // `finished` follows. Returns how many have no reference left. Tails come first.
  size_t release(const Block* blocks, size_t num, SessionHandle handle, bool pending);
  // The plan that a `release` was pending for has finished.
  void finished(const Block* blocks, size_t num);
  // A transfer of the session's plan reads the first num_tokens of the block.
  void pin(Block b, SessionHandle handle, uint32_t num_tokens);
  void unpin(Block b);
  // The session may touch the block, which is pinned, until a later plan has finished.
  void add_pending(Block b, SessionHandle handle);
  // The block is published now, or no longer.
  void published(Block b);
  // Marks held blocks as published, the prefix of each one block longer than that of the one before
  // it; nothing else below them is published.
  void published(const std::vector<Block>& blocks);
  // It is published no longer; a spare takes its place if there is one.
  void unpublish(Block b);
  // Spares that took the place of blocks allocated since the last call.
  std::vector<Block> take_promoted() { return std::exchange(promoted_, {}); }
  // Receipts may still publish the block, or data planes take it for published: when it is retired
  // it is reused last, and sessions that refer to it do not write it.
  void keep(Block b);
  // The published block is evicted after all that are not retained, and of these after those of a
  // lower priority and those of this one so far; 0: it is not retained.
  void set_priority(Block b, uint8_t priority);
  uint8_t priority(Block b) const { return infos_[b].priority; }
  // Gives each block that is not published, or each block, another generation: a report of what it
  // held does not count in the store that follows.
  void outdate(bool all) {
    for (Info& info : infos_) info.generation += all || !info.published;
  }
  // While a pool is rebuilt: `restored` for each block that was entered in the index; then
  // `restored_idle` for each, in the order of eviction; then `restored_rest` for every block of the
  // tier, the last first.
  void start_restoring() { free_.clear(); }
  void restored(Block b) { publish_to_policy(b, index_.entry_of(tier, b)); }
  void restored_idle(Block b) {
    --num_in_[static_cast<int>(State::kFree)];
    ++num_in_[static_cast<int>(State::kCached)];
    infos_[b].state = State::kCached;
    infos_[b].place = kPolicy;
    policy_->add_idle(&b, 1);
    ++num_idle_;
  }
  void restored_rest(Block b) {
    if (!infos_[b].published) free_.push_back(b);
  }
  size_t num_bytes() const {
    return infos_.capacity() * sizeof(Info) + free_.capacity() * sizeof(Block);
  }
  // Throws std::logic_error saying what is wrong. `uses`: all of its blocks.
  void check(const BlockUses& uses) const;

 private:
  static constexpr int kNumPriorities = 101;
  // Retired blocks that one session may allocate at once: `plain` ones first; `kept` ones, which
  // hold a published prefix or may soon, after idle blocks and before retained ones. And blocks
  // promised to it.
  struct RetiredBlocks {
    List plain;
    List kept;
    int64_t num_promised = 0;
  };
  enum Place : uint8_t { kNowhere, kPlain, kKept, kPolicy, kRetained };
  // A block: the fields that an operation needs lie together.
  struct Info {
    int64_t generation = 0;
    uint32_t ref_count = 0;
    uint32_t num_pins = 0;
    uint32_t num_pending = 0;
    SessionHandle owner = kNoSession;      // pending for: kNoSession, one session, kManySessions
    SessionHandle pin_owner = kNoSession;  // whose transfers read it; values as of `owner`
    uint32_t next = kEnd;                  // in the list of its place
    uint32_t prev = kEnd;
    uint16_t pinned_tokens = 0;
    State state = State::kFree;
    Place place = kNowhere;
    bool keep = false;
    bool published = false;  // as the index has it
    uint8_t priority = 0;    // 0: not retained
  };
  static_assert(sizeof(Info) == 48, "a block's record has grown");

  void forget(Block b);
  void publish_to_policy(Block b, EntryId e);
  uint64_t key_of(EntryId e) const;
  void push_back(List& list, Block b);
  void remove(List& list, Block b);
  void settle(Block b);
  void leave(Block b);
  void enter(Block b);
  void tell_policy();
  int64_t take(SessionHandle handle, Block* blocks, int64_t most);
  int64_t evict(SessionHandle handle, Block* blocks, int64_t most);
  int64_t pop_cached(Block* blocks, int64_t most);

  PrefixIndex& index_;
  std::unique_ptr<EvictionPolicy> policy_;
  const bool policy_uses_keys_;
  std::vector<Info> infos_;
  std::vector<int64_t> more_generations_;  // of blocks beyond num_blocks
  std::vector<Block> free_;
  std::vector<RetiredBlocks> retired_;  // by handle
  int64_t num_promised_ = 0;            // to all sessions
  List retained_[kNumPriorities];       // cached ones, oldest first
  uint32_t num_retained_ = 0;
  uint32_t num_idle_ = 0;  // of the policy
  uint32_t num_in_[kNumStates] = {};
  mutable uint64_t num_touched_ = 0;
  std::vector<Block> promoted_;
  std::vector<uint64_t> keys_;  // scratch of published
  // For the policy, once an operation has settled its blocks.
  std::vector<Block> no_longer_idle_;
  std::vector<Block> idle_;
};

// The blocks of both tiers.
class Stores {
 public:
  Stores(BlockStore device, BlockStore host) : stores_{std::move(device), std::move(host)} {}

  BlockStore& operator[](Tier tier) { return stores_[tier - 1]; }
  const BlockStore& operator[](Tier tier) const { return stores_[tier - 1]; }
  BlockStore* begin() { return stores_; }
  BlockStore* end() { return stores_ + 2; }
  const BlockStore* begin() const { return stores_; }
  const BlockStore* end() const { return stores_ + 2; }

 private:
  BlockStore stores_[2];
};

}  // namespace kvplane::blocks
