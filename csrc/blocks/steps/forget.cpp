#include "steps/forget.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "core/require.h"

namespace kvplane::blocks {

Forgotten Forgetter::count(EntryId root, Span<int32_t> tokens, int64_t most_counted) const {
  const EntryId top = index_.find_path(root, tokens, tokens.size / block_size_);
  if (top == kNoEntry) return {};
  Forgotten found = count_below(top, most_counted);
  found.num_in_use = num_in_use({root}, tokens, top);
  return found;
}

void Forgetter::forget_prefix(EntryId root, Span<int32_t> tokens, const Forgotten& result) {
  const int64_t num = tokens.size / block_size_;
  const std::vector<uint32_t> kept = keep_private(root, tokens, num);
  const EntryId top =
      index_.find_path(root, tokens, num);  // it is gone if only producers needed it
  if (top == kNoEntry) return;
  const EntryId above = index_[top].parent;
  for (const uint32_t i : kept) {
    Sequence& sequence = sequences_[i];
    if (sequence.num_published < num) continue;
    publisher_.set_chain(sequence, num - 1, above);
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
  assert(index_[top].parent == above);
  const EntryId detached = index_.detach(top, !result.is_large);
  forgetting_.push_back({detached, index_[detached].uid, result.is_large ? root : kNoEntry});
}

Forgotten Forgetter::count_roots(const std::vector<EntryId>& roots) const {
  Forgotten found;
  for (const EntryId root : roots) found.num_blocks += index_.num_blocks_below(root);
  found.num_in_use = num_in_use(roots, {}, kNoEntry);
  return found;
}

void Forgetter::forget_root(EntryId root) {
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
    publisher_.set_chain(sequence, 0, fresh);
  }
}

// The blocks of an entry and of those below it, if they are at most `most` entries.
Forgotten Forgetter::count_below(EntryId top, int64_t most) const {
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

// Visits the blocks that pins hold at entries of the roots; with `top`, from this entry on, which
// has the block `first` of a prompt. What was forgotten since is no longer of a root.
template <typename Visit>
void Forgetter::for_pinned(const std::vector<EntryId>& roots, int64_t first, EntryId top,
                           const Visit& visit) const {
  for (const Session& session : sessions_) {
    if (!session.open || std::find(roots.begin(), roots.end(), session.root) == roots.end())
      continue;
    for (const auto& [id, pin] : session.pins) {
      EntryId before = session.root;
      for (size_t k = 0; k < pin.blocks.size(); ++k) {
        const auto& [e, uid, tier, block] = pin.blocks[k];
        if (!index_.alive(e, uid) || index_[e].parent != before) break;
        if (top != kNoEntry && static_cast<int64_t>(k) == first && e != top) break;
        if (block != kNoBlock && static_cast<int64_t>(k) >= first) visit(tier, block);
        before = e;
      }
    }
  }
}

// Blocks at entries of the roots to which tables or pins refer; with tokens, at the entry `top`,
// where these end, and below it. Those of the roots' sessions are all that can refer to them.
int64_t Forgetter::num_in_use(const std::vector<EntryId>& roots, Span<int32_t> tokens,
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
      EntryId e = b == kNoBlock ? kNoEntry : index_.entry_of(sequence.tier, b);
      if (e == kNoEntry || is_counted[sequence.tier - 1][b]) continue;
      if (num_same < tokens.size) {  // its last blocks may hold other tokens
        for (int64_t up = first; up < k; ++up) e = index_[e].parent;
        if (e != top) continue;
      }
      is_counted[sequence.tier - 1][b] = 1;
      ++num;
    }
  }
  for_pinned(roots, first, top,
             [&](Tier tier, Block b) { num += !std::exchange(is_counted[tier - 1][b], 1); });
  return num;
}

// Keeps blocks from num_blocks - 1 on private to the root's sequences that begin with the first
// num_blocks blocks of the tokens, as far as they are known. Returns those sequences.
std::vector<uint32_t> Forgetter::keep_private(EntryId root, Span<int32_t> tokens,
                                              int64_t num_blocks) {
  std::vector<uint32_t> kept;
  for (uint32_t i = 0; i < sequences_.size(); ++i) {
    Sequence& sequence = sequences_[i];
    if (!sequence.live && sequence.ghosts.empty()) continue;
    const Session& session = sessions_[sequence.handle];
    if (!session.open || session.root != root) continue;
    const int64_t num = std::min(sequence.tokens.size, num_blocks * block_size_);
    if (tokens.size && !sequence.tokens.equals(token_store_, 0, tokens.data, num)) continue;
    sequence.private_from = std::min(sequence.private_from, num_blocks - 1);
    publisher_.clear_producers(sequence, i, sequence.private_from);
    kept.push_back(i);
  }
  return kept;
}

bool Forgetter::forget_some(int64_t max_entries) {
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
void Forgetter::take_apart(EntryId e, EntryId root) {
  if (!index_.is_root(e)) index_.move(e, root);
  Entry& entry = index_[e];
  const bool has_blocks = entry.has_blocks();
  shared_.counters.num_forgotten += index_.num_blocks_of(e);
  entry.num_arriving = 0;  // copies under way are dropped when their plans have run
  // A sequence of a session that has ended, and is still to be released: nobody shares with it.
  entry.producer = kNoEntry;
  while (entry.spares != kNoBlock) index_.clear_block(kDevice, entry.spares);
  const Block blocks[2] = {entry.block(kDevice), entry.block(kHost)};
  if (blocks[0] != kNoBlock)
    withdrawn_.emplace_back(blocks[0], stores_[kDevice].generation(blocks[0]));
  for (const Tier tier : {kDevice, kHost})  // the last takes the entry away
    if (blocks[tier - 1] != kNoBlock) stores_[tier].unpublish(blocks[tier - 1]);
  // A data plane may hear of a plan that writes the block before it hears that it is withdrawn.
  if (blocks[0] != kNoBlock && stores_[kDevice].ref_count(blocks[0]))
    stores_[kDevice].keep(blocks[0]);
  if (has_blocks) return;
  if (entry.retention) retention_.lost(e);
  index_.prune(e);
}

void Forgetter::check() const {
  const Require require("forgetting");
  int64_t num_held = 0;
  for (const Forgetting& each : forgetting_) {
    require(!index_.alive(each.root, each.uid) ||
                (index_.is_root(each.root) && !index_.is_named(each.root)),
            "a prefix is not detached");
    num_held += each.old_root != kNoEntry;
  }
  require(num_held == index_.num_holds(), "former roots are kept for nothing");
  require(path_.empty() || (!forgetting_.empty() && path_[0].first == forgetting_.front().root),
          "the path is in another prefix");
  for (const auto& [b, generation] : withdrawn_)
    require(generation <= stores_[kDevice].generation(b), "a block to withdraw is to come", b);
}

}  // namespace kvplane::blocks
