// Publish after write: a block enters the prefix index when it is full, its tokens are known, and
// receipts say that every slot of it was written. Where the prefix has a block already, the new one
// is its spare.
#pragma once

#include <vector>

#include "core/operations.h"
#include "core/shared.h"
#include "feeds/announcements.h"
#include "index/prefix_index.h"
#include "memory/block_store.h"
#include "sessions/sessions.h"
#include "steps/plans.h"
#include "steps/tables.h"

namespace kvplane::blocks {

// Owns how far each sequence is written and published: in a sequence `num_written`, `pending`,
// `num_published` with the chain of entries, and `produced`. No block is in the index but through
// it, copies in the host tier and rebuilt pools apart.
//
// Invariants: what is published was written, by receipts; the chain is the entry of the last
// published block, or has been removed since. Receipts and tokens that become known advance a
// sequence; its other changes publish what is complete first.
class Publisher {
 public:
  Publisher(Shared& shared, PrefixIndex& index, BlockStore& device, Sessions& sessions,
            SequenceStore& sequences, const Tables& tables, Announcements& announcements,
            PlanLog& plans)
      : shared_(shared),
        index_(index),
        device_(device),
        sessions_(sessions),
        sequences_(sequences),
        tables_(tables),
        announcements_(announcements),
        plans_(plans) {}

  // Records that plans up to `plan` have run. Returns whether some of the work is left for the next
  // call, which must then come before any other call of the session.
  bool receipted(SessionHandle handle, int64_t plan, int64_t max_blocks);
  // Takes tokens that steps left open. The failure of the first item that is refused, and then
  // nothing is taken.
  std::vector<Failure> deferred_tokens(SessionHandle handle, const DeferredColumns& columns);
  // Publishes the complete blocks of the sequence.
  void publish(Session& session, uint32_t index);
  // Begins the sequence's publishing again, from its first block on.
  void restart(const Session& session, Sequence& sequence) const {
    set_chain(sequence, 0, session.root);
  }
  // The first `num_published` blocks are published; `e` is the entry of the last of them.
  void set_chain(Sequence& sequence, int64_t num_published, EntryId e) const {
    sequence.num_published = num_published;
    sequence.chain = e;
    sequence.chain_uid = index_[e].uid;
  }
  // Has no other sequence share the blocks from the from-th on before they are published.
  void clear_producers(Sequence& sequence, uint32_t index, int64_t from);

  // Throws std::logic_error saying what is wrong.
  void check(const Session& session) const;

 private:
  // Tokens of [begin, end) that an item of a call gives a sequence, which had none there; `before`:
  // the earlier item's entry for the same sequence, or -1.
  struct Given {
    int64_t begin, end;
    const int32_t* tokens;
    int64_t before;
  };

  void advance(Session& session, uint32_t index, int64_t done);
  bool find_chain(Session& session, Sequence& sequence);
  void enter(Session& session, Sequence& sequence, uint32_t index, Block b);
  EntryId entry_for(const Sequence& sequence, uint32_t index);
  void publish_fresh();
  Failure check_deferred(Session& session, const DeferredColumns& columns, int64_t item,
                         const int32_t* tokens, std::vector<Given>& given);

  Shared& shared_;
  const int64_t block_size_ = shared_.config.block_size_tokens;
  PrefixIndex& index_;
  BlockStore& device_;
  Sessions& sessions_;
  SequenceStore& sequences_;
  TokenStore& token_store_ = sequences_.tokens();
  const Tables& tables_;
  const TableStore& table_store_ = tables_.chunks();
  Announcements& announcements_;
  PlanLog& plans_;
  std::vector<Block> entered_;  // scratch of `publish`
  std::vector<Block> fresh_;    // entered and not known to the store, each after the one before it
};

}  // namespace kvplane::blocks
