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
// sequences share it; tables move after all blocks were copied. The pool calls `plan` first, which
// changes nothing.
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

  Failure plan(const Session& session, Span<int64_t> ids, int64_t headroom, Swapping& plan) const;
  // Allocates the blocks that a swap copies to.
  void begin(Session& session, Swapping& plan);
  // Returns whether some are left.
  bool swap_some(Session& session, int64_t& left);
  // The session ends within it.
  void end(Session& session);
  // Throws std::logic_error saying what is wrong; adds what a swap in slices uses.
  void check(const Session& session, BlockUses& uses) const;

 private:
  void add_to_swap(const Sequence& sequence, int64_t i, IdMap& shared, Swapping& plan) const;
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
