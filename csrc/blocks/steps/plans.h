// Plans: the draft of the next one, and what each plan in flight changes or reads.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "core/shared.h"
#include "index/prefix_index.h"
#include "memory/block_store.h"
#include "memory/retention.h"
#include "sessions/sessions.h"
#include "steps/tables.h"

namespace kvplane::blocks {

// Owns, in a session, the draft with its record, destinations and allocated blocks; `plans` in
// flight and the state of receipts and aborts that are taken in slices; `done` and `last_plan`.
//
// Invariants: the source of a transfer is pinned until its plan has run; no block is allocated
// twice in one plan, as two transfers would write two generations of it; plans in flight are in the
// order of their numbers. Growth, admission and swaps draft; the publisher and the layer group end
// plans.
class PlanLog {
 public:
  PlanLog(Shared& shared, PrefixIndex& index, Stores& stores, Retention& retention,
          SequenceStore& sequences, Tables& tables)
      : shared_(shared),
        index_(index),
        stores_(stores),
        retention_(retention),
        sequences_(sequences),
        tables_(tables) {}

  // The draft
  // Copies a block; it is pinned until the plan has run, so that the plan can run again. Only its
  // first num_tokens matter.
  void transfer(Session& session, BlockRef source, Tier tier, Block copy, uint32_t num_tokens);
  // Copies a cached device block, which is evicted for the session, to the host tier if that has
  // room. The plan's transfers run before anything else writes the block.
  void save(Session& session, Block b);
  // The plan of the draft concerns the sequence; or `plan`, if that is in flight.
  void touch(Session& session, uint32_t index);
  void touch_plan(Session& session, int64_t plan, uint32_t index);
  bool is_empty(const Session& session) const;
  // Writes whole tables to the draft, if they are due; returns whether some are left for the next
  // call.
  bool prepare(Session& session, int64_t max_blocks);
  void complete(Session& session);
  // The draft has become a plan.
  void end_step(Session& session);

  // Receipts: plans up to `plan` have run. Returns whether there is work for `end_receipted`.
  bool begin_receipted(Session& session, int64_t plan);
  // After all sequences of these plans were advanced. Returns whether some work is left.
  bool end_receipted(Session& session, int64_t left);

  // Aborts
  void begin_abort(Session& session);
  // Notes where the transfers of plans in flight copied from. Returns whether some are left.
  bool note_origins(Session& session, int64_t& left);
  // Forgets the plans in flight, which will get no receipt. The blocks that they read may be read
  // until `next_plan` has run. Returns whether some are left.
  bool end_plans(Session& session, int64_t next_plan, int64_t& left);
  // The session ends: its draft and what is receipted in part end as plans in flight do.
  void end_session(Session& session);

  // Throws std::logic_error saying what is wrong; adds what the session's plans use.
  void check(const Session& session, BlockUses& uses) const;

 private:
  void note(Session& session, const Transfer& transfer);
  void end_draft(Session& session);
  bool write_whole_tables(Session& session, int64_t max_blocks);
  void write_whole_table(Session& session, Sequence& sequence);
  bool write_transfers(Session& session, int64_t max_blocks);
  void end_demotions(Session& session, const PlanRecord& record, bool has_run, int64_t next_plan);

  Shared& shared_;
  PrefixIndex& index_;
  Stores& stores_;
  Retention& retention_;
  SequenceStore& sequences_;
  Tables& tables_;
};

}  // namespace kvplane::blocks
