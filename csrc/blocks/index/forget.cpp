// Forgetting: prefixes leave the index at once, by being moved under a root that has no name; their
// entries are taken apart later, a few at a time. Idle blocks are free then; tables keep theirs.
//
// What was written before must not come back. A live sequence that begins with what is forgotten,
// or may when its tokens are known, publishes nothing of that part and of what follows it, and lets
// nobody share it; nor do sequences forked from it, and freed ones whose receipts are missing.
#include <algorithm>

#include "core/pool.h"

namespace kvplane::blocks {

Forgotten Pool::forget(Groups groups, Slot slot, Span<int32_t> tokens, bool force) {
  const int64_t num = tokens.size / groups[0]->block_size_;
  if (num == 0) return {};
  Forgotten all;
  std::vector<Forgotten> results;
  for (int64_t g = 0; g < groups.size; ++g) {
    const Pool& pool = *groups[g];
    const EntryId top = pool.find_path(pool.sessions_[slot].root, tokens, num);
    results.push_back(top == kNoEntry ? Forgotten{} : pool.count_below(top));
    all.num_blocks += results.back().num_blocks;
    all.num_in_use += results.back().num_in_use;
  }
  if (all.num_in_use && !force) return {0, all.num_in_use};
  if (groups[0]->dry_.on) return all;
  for (int64_t g = 0; g < groups.size; ++g)
    groups[g]->forget_prefix(slot, tokens, results[static_cast<size_t>(g)]);
  return all;
}

void Pool::forget_prefix(Slot slot, Span<int32_t> tokens, const Forgotten& result) {
  const EntryId root = sessions_[slot].root;
  const int64_t num = tokens.size / block_size_;
  const std::vector<uint32_t> kept = keep_private(root, tokens, num);
  const EntryId top = find_path(root, tokens, num);  // it is gone if only leaders needed it
  if (top == kNoEntry) return;
  const EntryId above = index_[top].parent;
  for (const uint32_t i : kept) {
    Sequence& sequence = sequences_[i];
    if (sequence.num_published < num) continue;
    sequence.num_published = num - 1;
    sequence.chain = above;
    sequence.chain_uid = index_[above].uid;
  }
  auto leave = [&](EntryId e) {
    retention_.end_at(e);
    for (const Tier tier : {kDevice, kHost})
      if (index_[e].block(tier) != kNoBlock) changed(Change::kRemoved, e, tier);
  };
  leave(top);
  index_.walk(top, leave);
  const EntryId detached = index_.detach(top);
  forgetting_.emplace_back(detached, index_[detached].uid);
  counters_.num_forgotten += result.num_blocks;
}

Forgotten Pool::forget_roots(Groups groups, const std::vector<std::string_view>& names,
                             bool force) {
  std::vector<std::vector<EntryId>> roots(static_cast<size_t>(groups.size));
  std::vector<Forgotten> results;
  Forgotten all;
  for (int64_t g = 0; g < groups.size; ++g) {
    std::vector<EntryId>& found = roots[static_cast<size_t>(g)];
    for (const std::string_view name : names)
      if (const EntryId root = groups[g]->index_.find_root(name);
          root != kNoEntry && std::find(found.begin(), found.end(), root) == found.end())
        found.push_back(root);
    results.push_back(groups[g]->count_below_roots(found));
    all.num_blocks += results.back().num_blocks;
    all.num_in_use += results.back().num_in_use;
  }
  if (all.num_in_use && !force) return {0, all.num_in_use};
  if (groups[0]->dry_.on) return all;
  for (int64_t g = 0; g < groups.size; ++g) {
    for (const EntryId root : roots[static_cast<size_t>(g)]) groups[g]->forget_root(root);
    groups[g]->counters_.num_forgotten += results[static_cast<size_t>(g)].num_blocks;
  }
  return all;
}

void Pool::forget_root(EntryId root) {
  const std::string name = index_.root_name(root);
  const std::vector<uint32_t> kept = keep_private(root, {}, 1);
  if (index_[root].child == kNoEntry) return;
  changed(Change::kCleared, root, kDevice);
  index_.detach(root);
  forgetting_.emplace_back(root, index_[root].uid);
  const EntryId fresh = index_.find_root(name);
  for (Session& session : sessions_)
    if (session.open && session.root == root) session.root = fresh;
  for (const uint32_t i : kept) {
    Sequence& sequence = sequences_[i];
    sequence.num_published = 0;
    sequence.chain = fresh;
    sequence.chain_uid = index_[fresh].uid;
  }
}

// The entry of the first `num` blocks of the tokens.
EntryId Pool::find_path(EntryId e, Span<int32_t> tokens, int64_t num) const {
  for (int64_t i = 0; i < num && e != kNoEntry; ++i)
    e = index_.find(e, tokens.data + i * block_size_);
  return e;
}

Forgotten Pool::count_below(EntryId top) const {
  Forgotten found;
  auto count = [&](Tier tier, Block b) {
    ++found.num_blocks;
    found.num_in_use += store(tier).ref_count(b) > 0;
  };
  auto visit = [&](EntryId e) {
    const Entry& entry = index_[e];
    for (const Tier tier : {kDevice, kHost})
      if (entry.block(tier) != kNoBlock) count(tier, entry.block(tier));
    for (Block b = entry.spares; b != kNoBlock; b = index_.next_spare(b)) count(kDevice, b);
  };
  visit(top);
  index_.walk(top, visit);
  return found;
}

// One pass over all blocks for those in use: a large root's entries lie all over the memory.
Forgotten Pool::count_below_roots(const std::vector<EntryId>& roots) const {
  Forgotten found;
  if (roots.empty()) return found;
  std::vector<uint8_t> is_one(index_.end());
  for (const EntryId root : roots) {
    is_one[root] = 1;
    found.num_blocks += index_.num_blocks_below(root);
  }
  for (const auto& blocks : stores_) {
    if (!blocks->num_in(State::kHeld)) continue;
    for (Block b = 0; b < blocks->num_blocks; ++b) {
      if (!blocks->ref_count(b)) continue;
      const EntryId e = index_.entry_of(blocks->tier, b);
      found.num_in_use += e != kNoEntry && is_one[index_.root_of(e)];
    }
  }
  return found;
}

// Keeps private what the root's sequences wrote from block num_blocks - 1 on, if they begin with
// the first num_blocks blocks of the tokens, as far as they are known. Returns those sequences.
std::vector<uint32_t> Pool::keep_private(EntryId root, Span<int32_t> tokens, int64_t num_blocks) {
  std::vector<uint32_t> kept;
  for (uint32_t i = 0; i < sequences_.size(); ++i) {
    Sequence& sequence = sequences_[i];
    if (!sequence.live && sequence.ghosts.empty()) continue;
    const Session& session = sessions_[sequence.slot];
    if (!session.open || session.root != root) continue;
    const int64_t num = std::min(sequence.tokens.size, num_blocks * block_size_);
    if (tokens.size && !sequence.tokens.equals(token_store_, 0, tokens.data, num)) continue;
    sequence.private_from = std::min(sequence.private_from, num_blocks - 1);
    clear_leaders(sequence, i, sequence.private_from);
    kept.push_back(i);
  }
  return kept;
}

bool Pool::forget_some(int64_t max_entries) {
  for (; max_entries > 0 && !forgetting_.empty(); --max_entries) {
    const auto [e, uid] = forgetting_.back();
    if (!index_.alive(e, uid)) {
      forgetting_.pop_back();
    } else if (const EntryId child = index_[e].child; child != kNoEntry) {
      forgetting_.emplace_back(child, index_[child].uid);
    } else {
      forgetting_.pop_back();
      take_apart(e);
    }
  }
  return !forgetting_.empty();
}

// Removes a detached entry that nothing is below.
void Pool::take_apart(EntryId e) {
  Entry& entry = index_[e];
  const bool has_blocks = entry.has_blocks();
  entry.num_arriving = 0;  // copies under way are dropped when their plans have run
  while (entry.spares != kNoBlock) index_.clear_block(kDevice, entry.spares);
  const Block blocks[2] = {entry.block(kDevice), entry.block(kHost)};
  if (blocks[0] != kNoBlock)
    forgotten_.emplace_back(blocks[0], store(kDevice).generation(blocks[0]));
  for (const Tier tier : {kDevice, kHost})  // the last takes the entry away
    if (blocks[tier - 1] != kNoBlock) store(tier).unpublish(blocks[tier - 1]);
  if (has_blocks) return;
  if (entry.retention) retention_.lost(e);
  index_.prune(e);
}

}  // namespace kvplane::blocks
