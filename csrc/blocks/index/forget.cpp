// Forgetting: prefixes leave the index at once, by being moved under a root that has no name; their
// entries are removed later, a few at a time, in the order of forgetting. Idle blocks become free,
// tables keep theirs.
//
// Of a large prefix only the first entry is visited when it is forgotten. Entries below it count as
// the old root's until they are removed, and followers start again afterwards.
//
// A forgotten prefix must not come back. A live sequence that begins with it, or may once its
// tokens are known, publishes and shares neither the prefix nor blocks after it; nor do sequences
// forked from it, or freed ones whose receipts are missing.
#include <algorithm>

#include "core/pool.h"

namespace kvplane::blocks {

Forgotten Pool::forget(Groups groups, std::string_view root_name, Span<int32_t> tokens, bool force,
                       int64_t most_counted) {
  const int64_t num = tokens.size / groups[0]->block_size_;
  if (num == 0) return {};
  Forgotten all;
  std::vector<Forgotten> results;
  for (int64_t g = 0; g < groups.size; ++g) {
    const Pool& pool = *groups[g];
    const EntryId root = pool.index_.find_root(root_name),
                  top = pool.index_.find_path(root, tokens, num);
    results.emplace_back();
    if (top != kNoEntry) {
      results.back() = pool.count_below(top, most_counted);
      results.back().num_in_use = pool.num_in_use({root}, tokens, top);
    }
    all.num_blocks += results.back().num_blocks;
    all.num_in_use += results.back().num_in_use;
  }
  if (all.num_in_use && !force) return {0, all.num_in_use};
  all.num_blocks = std::max(all.num_blocks, all.num_in_use);  // where not all were counted
  for (int64_t g = 0; g < groups.size; ++g)
    if (const EntryId root = groups[g]->index_.find_root(root_name); root != kNoEntry)
      groups[g]->forget_prefix(root, tokens, results[static_cast<size_t>(g)]);
  return all;
}

void Pool::forget_prefix(EntryId root, Span<int32_t> tokens, const Forgotten& result) {
  const int64_t num = tokens.size / block_size_;
  const std::vector<uint32_t> kept = keep_private(root, tokens, num);
  const EntryId top =
      index_.find_path(root, tokens, num);  // it is gone if only producers needed it
  if (top == kNoEntry) return;
  const EntryId above = index_[top].parent;
  for (const uint32_t i : kept) {
    Sequence& sequence = sequences_[i];
    if (sequence.num_published < num) continue;
    sequence.num_published = num - 1;
    sequence.chain = above;
    sequence.chain_uid = index_[above].uid;
  }
  retention_.end_below(top);
  auto leave = [&](EntryId e) {
    for (const Tier tier : {kDevice, kHost})
      if (index_[e].block(tier) != kNoBlock) feed_.changed(Change::kRemoved, e, tier);
  };
  if (result.is_large) {
    index_.hold_root(root);
    feed_.pause();
  } else {
    leave(top);
    index_.walk(top, leave);
  }
  const EntryId detached = index_.detach(top, !result.is_large);
  forgetting_.push_back({detached, index_[detached].uid, result.is_large ? root : kNoEntry});
}

Forgotten Pool::forget_roots(Groups groups, const std::vector<std::string_view>& names,
                             bool force) {
  std::vector<std::vector<EntryId>> roots(static_cast<size_t>(groups.size));
  Forgotten all;
  for (int64_t g = 0; g < groups.size; ++g) {
    std::vector<EntryId>& found = roots[static_cast<size_t>(g)];
    for (const std::string_view name : names)
      if (const EntryId root = groups[g]->index_.find_root(name);
          root != kNoEntry && std::find(found.begin(), found.end(), root) == found.end())
        found.push_back(root);
    for (const EntryId root : found) all.num_blocks += groups[g]->index_.num_blocks_below(root);
    all.num_in_use += groups[g]->num_in_use(found, {}, kNoEntry);
  }
  if (all.num_in_use && !force) return {0, all.num_in_use};
  for (int64_t g = 0; g < groups.size; ++g)
    for (const EntryId root : roots[static_cast<size_t>(g)]) groups[g]->forget_root(root);
  return all;
}

void Pool::forget_root(EntryId root) {
  const std::string name = index_.root_name(root);
  const std::vector<uint32_t> kept = keep_private(root, {}, 1);
  if (index_[root].child == kNoEntry) return;
  feed_.changed(Change::kCleared, root, kDevice);
  index_.detach(root, false);
  forgetting_.push_back({root, index_[root].uid, kNoEntry});
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

// The blocks of an entry and of those below it, if they are at most `most` entries.
Forgotten Pool::count_below(EntryId top, int64_t most) const {
  Forgotten found;
  std::vector<EntryId> stack{top};
  for (; !stack.empty(); --most) {
    if (most <= 0) {
      found.is_large = true;
      break;
    }
    const EntryId e = stack.back();
    stack.pop_back();
    found.num_blocks += index_.num_blocks_of(e);
    for (EntryId c = index_[e].child; c != kNoEntry; c = index_[c].next) stack.push_back(c);
  }
  return found;
}

// Blocks at entries of the roots to which tables refer; with tokens, at the entry `top`, where
// these end, and below it. Tables of the roots' sequences are all that can refer to them.
int64_t Pool::num_in_use(const std::vector<EntryId>& roots, Span<int32_t> tokens,
                         EntryId top) const {
  int64_t num = 0;
  std::vector<uint8_t> is_counted[2];
  for (const BlockStore& blocks : stores_) is_counted[blocks.tier - 1].resize(blocks.num_blocks);
  const int64_t first = std::max<int64_t>(0, tokens.size / block_size_ - 1);
  for (uint32_t i = 0; i < sequences_.size(); ++i) {
    const Sequence& sequence = sequences_[i];
    const EntryId root = sequence.live ? sessions_[sequence.handle].root : kNoEntry;
    if (std::find(roots.begin(), roots.end(), root) == roots.end()) continue;
    const int64_t num_same = std::min(sequence.tokens.size, tokens.size);
    if (!sequence.tokens.equals(token_store_, 0, tokens.data, num_same)) continue;
    const int64_t end = std::min(sequence.table.size, sequence.private_from);
    for (int64_t k = std::max(first, sequence.num_trimmed); k < end; ++k) {
      const Block b = sequence.table.at(table_store_, k);
      EntryId e = index_.entry_of(sequence.tier, b);
      if (e == kNoEntry || is_counted[sequence.tier - 1][b]) continue;
      if (num_same < tokens.size) {  // its last blocks may hold other tokens
        for (int64_t up = first; up < k; ++up) e = index_[e].parent;
        if (e != top) continue;
      }
      is_counted[sequence.tier - 1][b] = 1;
      ++num;
    }
  }
  return num;
}

// Keeps blocks from num_blocks - 1 on private to the root's sequences that begin with the first
// num_blocks blocks of the tokens, as far as they are known. Returns those sequences.
std::vector<uint32_t> Pool::keep_private(EntryId root, Span<int32_t> tokens, int64_t num_blocks) {
  std::vector<uint32_t> kept;
  for (uint32_t i = 0; i < sequences_.size(); ++i) {
    Sequence& sequence = sequences_[i];
    if (!sequence.live && sequence.ghosts.empty()) continue;
    const Session& session = sessions_[sequence.handle];
    if (!session.open || session.root != root) continue;
    const int64_t num = std::min(sequence.tokens.size, num_blocks * block_size_);
    if (tokens.size && !sequence.tokens.equals(token_store_, 0, tokens.data, num)) continue;
    sequence.private_from = std::min(sequence.private_from, num_blocks - 1);
    clear_producers(sequence, i, sequence.private_from);
    kept.push_back(i);
  }
  return kept;
}

bool Pool::forget_some(int64_t max_entries) {
  for (; max_entries > 0 && !forgetting_.empty(); --max_entries) {
    const Forgetting now = forgetting_.front();
    if (path_.empty()) path_.emplace_back(now.root, now.uid);
    const auto [e, uid] = path_.back();
    const bool is_alive = index_.alive(e, uid);
    if (const EntryId child = is_alive ? index_[e].child : kNoEntry; child != kNoEntry) {
      path_.emplace_back(child, index_[child].uid);
      continue;
    }
    path_.pop_back();
    if (is_alive) take_apart(e, now.root);
    if (!path_.empty()) continue;
    forgetting_.pop_front();
    if (now.old_root == kNoEntry) continue;
    index_.drop_root(now.old_root);
    if (!index_.names_former_roots()) feed_.resume();
  }
  return !forgetting_.empty();
}

// Removes an entry below a detached root, or that root, when nothing is below it.
void Pool::take_apart(EntryId e, EntryId root) {
  if (!index_.is_root(e)) index_.move(e, root);
  Entry& entry = index_[e];
  const bool has_blocks = entry.has_blocks();
  counters_.num_forgotten += index_.num_blocks_of(e);
  entry.num_arriving = 0;  // copies under way are dropped when their plans have run
  // A sequence of a session that has ended, and is still to be released: nobody shares with it.
  entry.producer = kNoEntry;
  while (entry.spares != kNoBlock) index_.clear_block(kDevice, entry.spares);
  const Block blocks[2] = {entry.block(kDevice), entry.block(kHost)};
  if (blocks[0] != kNoBlock)
    forgotten_.emplace_back(blocks[0], stores_[kDevice].generation(blocks[0]));
  for (const Tier tier : {kDevice, kHost})  // the last takes the entry away
    if (blocks[tier - 1] != kNoBlock) stores_[tier].unpublish(blocks[tier - 1]);
  if (has_blocks) return;
  if (entry.retention) retention_.lost(e);
  index_.prune(e);
}

}  // namespace kvplane::blocks
