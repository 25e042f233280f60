// How sequences begin as forks, are cut and end.
#pragma once

#include "core/operations.h"
#include "core/shared.h"
#include "memory/block_store.h"
#include "sessions/sessions.h"
#include "steps/families.h"
#include "steps/plans.h"
#include "steps/publish.h"
#include "steps/tables.h"

namespace kvplane::blocks {

// Owns no state of its own, so it has no `check`: it keeps what the other classes know of a
// sequence consistent where the sequence begins, loses tokens or ends.
//
// Invariants: a fork has all that its parent has, and waits for the same receipts; a cut drops
// tokens, table and what is to be published together, and publishes what is complete first; an
// ended sequence that receipts may still publish is kept until they come. The pool calls `check_…`
// first, which change nothing.
class Lifecycle {
 public:
  Lifecycle(const Shared& shared, Stores& stores, PrefixIndex& index, SequenceStore& sequences,
            Tables& tables, PlanLog& plans, Publisher& publisher, Families& families)
      : shared_(shared),
        stores_(stores),
        index_(index),
        sequences_(sequences),
        tables_(tables),
        plans_(plans),
        publisher_(publisher),
        families_(families) {}

  // Counts what `max_table_entries` bounds: table entries, also those that known tokens will need.
  int64_t num_entries(const Session& session) const;
  Failure check_new_id(const Session& session, int64_t id, int64_t num_more, int64_t item) const;
  Failure check_fork(const Session& session, int64_t parent, int64_t id, int64_t item) const;
  void fork(Session& session, uint32_t parent, int64_t id, int64_t admitted_by);
  Failure check_free(const Session& session, int64_t id, int64_t item) const;
  // Ends a live sequence, whose blocks the session may touch until `plan` has run. Returns how many
  // blocks no table refers to any more. Blocks that later receipts say it wrote are published all
  // the same, unless they have been allocated again.
  int64_t end(Session& session, uint32_t index, int64_t plan);
  // Ends a live sequence outside of a step; one that no plan in flight concerns at once.
  int64_t finish(Session& session, uint32_t index);
  // Ends a live sequence outside of a step.
  int64_t cut(Session& session, uint32_t index);
  // Ends the sequence of a session that has ended.
  void release(Session& session, int64_t id, uint32_t index);
  Failure check_truncate(const Session& session, int64_t id, int64_t num, int64_t item) const;
  int64_t truncate(Session& session, uint32_t index, int64_t num);

  // Aborts
  // Whether the next position after the written ones, by receipts, would need trimmed blocks.
  bool is_lost(const Sequence& sequence) const;
  // Nothing is left of the sequence.
  void begin_again(const Session& session, Sequence& sequence) const;
  // Cuts a sequence to what is written. Returns how many blocks it releases; the sequence itself
  // counts as one.
  int64_t abort(Session& session, int64_t id, int64_t next_plan, bool keeps);

 private:
  int64_t fewest_tokens(const Sequence& sequence) const;
  void cut_to_written(Session& session, uint32_t index, const Origins& origins, int64_t next_plan);

  const Shared& shared_;
  const int64_t block_size_ = shared_.config.block_size_tokens;
  Stores& stores_;
  PrefixIndex& index_;
  SequenceStore& sequences_;
  TokenStore& token_store_ = sequences_.tokens();
  Tables& tables_;
  const TableStore& table_store_ = tables_.chunks();
  PlanLog& plans_;
  Publisher& publisher_;
  Families& families_;
};

}  // namespace kvplane::blocks
