// Tables of sequences, and the blocks that they refer to.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "core/operations.h"
#include "core/shared.h"
#include "feeds/announcements.h"
#include "memory/block_store.h"
#include "sessions/sessions.h"

namespace kvplane::blocks {

// Owns the chunks of tables, and how many device blocks tables and pins of each owner refer to.
// Keeps, in a session, `releases` with the blocks that a plan may still touch, `num_held` and
// `num_entries`.
//
// Invariants: a reference of a chunk is counted once, however many sequences share the chunk; a
// chunk with several owners is copied before it is changed; a change is noted, so that a plan after
// an abort sends it. Growth, admission, swaps and the ends of sequences call it.
class Tables {
 public:
  Tables(const Shared& shared, Stores& stores, Announcements& announcements)
      : shared_(shared), stores_(stores), announcements_(announcements) {}

  const TableStore& chunks() const { return table_store_; }
  size_t num_owners() const { return held_.size(); }
  // Before the owner's first session.
  void add_owner(uint32_t owner) {
    if (held_.size() <= owner) held_.resize(owner + 1);
  }

  // Changes of a table
  void own_chunk(Session& session, Sequence& sequence, size_t chunk);
  // Adds entries for blocks whose references the caller holds.
  void push(Session& session, Sequence& sequence, const std::vector<Block>& blocks);
  // Replaces an entry of a chunk that the sequence owns alone; the caller counts the references.
  void put(Session& session, Sequence& sequence, int64_t i, Block b);
  // How many leading entries the sequence keeps when it is cut to num_tokens: those of its slots,
  // or up to the last checkpoint there.
  int64_t num_to(const Sequence& sequence, int64_t num_tokens) const;
  // Cuts the table to its first `num` entries; the session may touch released blocks until `plan`
  // has run. Returns how many blocks no table refers to any more. Tails first.
  int64_t cut(Session& session, Sequence& sequence, int64_t num, int64_t plan);
  // Releases the entries before `num`: no later position needs them.
  void trim(Session& session, Sequence& sequence, int64_t num, int64_t plan);
  // Gives a new sequence the table of `parent`.
  void share_table(Session& session, Sequence& child, const Sequence& parent);

  // Blocks
  // Adds a reference to each, which may have none.
  void share(Session& session, Tier tier, const std::vector<Block>& blocks);
  // Removes a reference from each block, which the session may touch until `plan` has run. Returns
  // how many have none left.
  int64_t release(Session& session, Tier tier, const Block* blocks, size_t num, int64_t plan);
  // Remembers that the session may touch the blocks until `plan` has run; false if it has.
  bool remember(Session& session, Tier tier, const Block* blocks, size_t num, int64_t plan);
  // The session's plans have run or are fenced.
  void end_releases(Session& session);
  void allocate(Session& session, Tier tier, int64_t num, std::vector<Block>& out);
  // Allocates blocks; the caller notes them as allocated, if a resync is due.
  void obtain(Session& session, Tier tier, int64_t num, std::vector<Block>& out);

  // The draft: table entries [first, end), but not whether they are allocated.
  void add_entries(const Sequence& sequence, int64_t first, int64_t end,
                   TableChanges& changes) const;
  // Sends table entries [first, end) to the data plane. allocated[i] is 1 for an entry that this
  // plan allocates; null: all are.
  void set_entries(Session& session, Sequence& sequence, ChangeKind kind, int64_t first,
                   int64_t end, const std::vector<uint8_t>* allocated) const;

  // Room
  // Blocks that tables and pins of the owner's sessions may refer to beside those that they do.
  int64_t num_allowed(const Session& session) const;
  // The failure when the item needs more blocks than the tier has.
  Failure never_fits(Tier tier, int64_t item, int64_t needed) const;
  // The failure when it needs more than are available to the session now.
  Failure no_room(const Session& session, Tier tier, int64_t item, int64_t needed,
                  int64_t available, int64_t headroom) const;

  std::vector<Block> blocks_of(const Sequence& sequence) const;
  // Counts the device blocks of these sequences, each once.
  int64_t num_different(const std::vector<const Sequence*>& sequences) const;
  // Device blocks that tables and pins of the owner's sessions refer to.
  int64_t num_owned(uint32_t owner) const { return owner < held_.size() ? held_[owner] : 0; }

  // Throws std::logic_error saying what is wrong with the tables of these sequences, which are
  // all; adds what they use.
  void check(const Sessions& sessions, const SequenceStore& sequences, BlockUses& uses) const;

 private:
  const Shared& shared_;
  Stores& stores_;
  Announcements& announcements_;
  TableStore table_store_;
  std::vector<int64_t> held_;  // by owner
  std::vector<Block> cut_;     // scratch of `cut`
};

}  // namespace kvplane::blocks
