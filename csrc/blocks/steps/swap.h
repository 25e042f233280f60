// Swaps: sequences move to the other tier, a few blocks at a time.
#pragma once

#include <vector>

#include "core/operations.h"
#include "core/shared.h"
#include "memory/block_store.h"
#include "sessions/sessions.h"
#include "steps/families.h"
#include "steps/plans.h"
#include "steps/publish.h"
#include "steps/tables.h"

namespace kvplane::blocks {

// Owns a session's `swapping`, and a sequence's tier. Invariants: the copies of a swap in slices
// are held by it until a table refers to them; a block is copied once, however many of the
// sequences share it; blocks are copied once all copies are allocated, and tables move after that.
//
// The pool calls the functions that return whether some work is left in the order in which they are
// declared, each until nothing is left. `left` counts the blocks that may still be handled.
class Swaps {
 public:
  Swaps(Shared& shared, Stores& stores, SequenceStore& sequences, Tables& tables, PlanLog& plans,
        Publisher& publisher, Families& families)
      : shared_(shared),
        stores_(stores),
        sequences_(sequences),
        tables_(tables),
        plans_(plans),
        publisher_(publisher),
        families_(families) {}

  // Begins `plan`, whose destination and headroom are set; changes nothing. The failure of the
  // first sequence that cannot be swapped.
  Failure begin(const Session& session, Span<int64_t> ids, Swapping& plan) const;
  // Notes the blocks of the tables.
  bool note_some(Swapping& plan, int64_t& left) const;
  // Whether there is room for the copies that are not allocated yet.
  Failure check_room(const Session& session, const Swapping& plan) const;
  // Allocates copies; the session has room for them.
  bool allocate_some(Session& session, int64_t& left);
  // Copies blocks, and moves tables.
  bool move_some(Session& session, int64_t& left);
  // In place of the rest, when the swap is refused or the session ends: releases the copies that no
  // table refers to. The session may touch them until `plan` has run.
  bool release_some(Session& session, int64_t plan, int64_t& left);
  // Throws std::logic_error saying what is wrong; adds what a swap in slices uses.
  void check(const Session& session, BlockUses& uses) const;

 private:
  void note_entry(const Sequence& sequence, int64_t i, Swapping& plan) const;
  void move(Session& session, uint32_t index, Swapping& plan);
  void send_table(Session& session, Sequence& sequence, const std::vector<uint8_t>& allocated);

  Shared& shared_;
  const int64_t block_size_ = shared_.config.block_size_tokens;
  Stores& stores_;
  SequenceStore& sequences_;
  Tables& tables_;
  const TableStore& table_store_ = tables_.chunks();
  PlanLog& plans_;
  Publisher& publisher_;
  Families& families_;
};

}  // namespace kvplane::blocks
