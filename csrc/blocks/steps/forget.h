// Forgetting: prefixes leave the index at once, by being moved under a root that has no name; their
// entries are removed later, a few at a time, in the order of forgetting. Idle blocks become free,
// tables keep theirs.
//
// Of a large prefix only the first entry is visited when it is forgotten. Entries below it count as
// the old root's until they are removed, and watchers start again afterwards.
//
// A forgotten prefix must not come back. A live sequence that begins with it, or may once its
// tokens are known, publishes and shares neither the prefix nor blocks after it; nor do sequences
// forked from it, or freed ones whose receipts are missing.
#pragma once

#include <deque>
#include <utility>
#include <vector>

#include "core/operations.h"
#include "core/shared.h"
#include "feeds/watch.h"
#include "index/prefix_index.h"
#include "memory/block_store.h"
#include "memory/retention.h"
#include "sessions/sessions.h"
#include "steps/publish.h"
#include "steps/tables.h"

namespace kvplane::blocks {

// Owns the detached prefixes whose entries are still to be removed, the blocks that data planes are
// to withdraw, and `private_from` of sequences. Invariant: no entry below a detached root is found,
// and no sequence publishes what would bring it back. The pool counts in all groups what tables use
// before it forgets in any.
class Forgetter {
 public:
  Forgetter(Shared& shared, PrefixIndex& index, Stores& stores, Retention& retention,
            ChangeFeed& feed, Sessions& sessions, SequenceStore& sequences, const Tables& tables,
            Publisher& publisher)
      : shared_(shared),
        index_(index),
        stores_(stores),
        retention_(retention),
        feed_(feed),
        sessions_(sessions),
        sequences_(sequences),
        table_store_(tables.chunks()),
        publisher_(publisher) {}

  // What forgetting the prefix would remove; of more than `most_counted` entries the answer counts
  // fewer than there are.
  Forgotten count(EntryId root, Span<int32_t> tokens, int64_t most_counted) const;
  // `result`: what was counted.
  void forget_prefix(EntryId root, Span<int32_t> tokens, const Forgotten& result);
  Forgotten count_roots(const std::vector<EntryId>& roots) const;
  void forget_root(EntryId root);
  // Removes entries; returns whether some are left.
  bool forget_some(int64_t max_entries);
  // Device blocks with their generations, to be withdrawn from data planes.
  std::deque<std::pair<Block, int64_t>>& withdrawn() { return withdrawn_; }
  const std::deque<std::pair<Block, int64_t>>& withdrawn() const { return withdrawn_; }
  // The published blocks are evicted. The plan that takes them may never run, and their prefixes be
  // forgotten by then: no report may bring them back.
  void evicted(Span<Block> blocks) {
    for (int64_t i = 0; i < blocks.size; ++i)
      withdrawn_.emplace_back(blocks[i], stores_[kDevice].generation(blocks[i]));
  }
  // Throws std::logic_error saying what is wrong.
  void check() const;

 private:
  // Entries to be removed. `old_root`: the root that they still name, if there are many.
  struct Forgetting {
    EntryId root;
    uint32_t uid;
    EntryId old_root;
  };

  Forgotten count_below(EntryId top, int64_t most) const;
  int64_t num_in_use(const std::vector<EntryId>& roots, Span<int32_t> tokens, EntryId top) const;
  template <typename Visit>
  void for_pinned(const std::vector<EntryId>& roots, int64_t first, EntryId top,
                  const Visit& visit) const;
  std::vector<uint32_t> keep_private(EntryId root, Span<int32_t> tokens, int64_t num_blocks);
  void take_apart(EntryId e, EntryId root);

  Shared& shared_;
  const int64_t block_size_ = shared_.config.block_size_tokens;
  PrefixIndex& index_;
  Stores& stores_;
  Retention& retention_;
  ChangeFeed& feed_;
  Sessions& sessions_;
  SequenceStore& sequences_;
  const TokenStore& token_store_ = sequences_.tokens();
  const TableStore& table_store_;
  Publisher& publisher_;
  std::deque<Forgetting> forgetting_;
  std::vector<std::pair<EntryId, uint32_t>> path_;  // down in the first of these: (entry, uid)
  std::deque<std::pair<Block, int64_t>> withdrawn_;
};

}  // namespace kvplane::blocks
