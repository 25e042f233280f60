// Growth: in most decode steps a sequence writes one slot of a block that nothing else uses, which
// costs a few comparisons. Only a sequence that crosses a block boundary, or writes a shared block,
// costs more.
#pragma once

#include <vector>

#include "core/operations.h"
#include "core/shared.h"
#include "memory/block_store.h"
#include "sessions/sessions.h"
#include "steps/plans.h"
#include "steps/tables.h"

namespace kvplane::blocks {

// Owns how far each sequence is scheduled: `num_scheduled` and `computed_by`, and the draft's
// spans. It alone lets a sequence write blocks.
//
// Invariant: a block that a plan writes is of the sequence's table alone, holds no published prefix
// from there on, and no transfer reads what is written; others are copied first. Appends and
// admissions call it: `check` first, which changes nothing.
class Growth {
 public:
  // What an item of an append takes, besides the blocks that are obtained for it.
  struct Need {
    uint32_t index = 0;      // of the sequence
    int64_t num_spare = 0;   // blocks at the end of its table, which it gives back
    bool trims = false;      // whether it gives back those that no position can see
    int64_t checkpoint = 0;  // of states: the one that is kept, if there is room for it
  };

  Growth(Shared& shared, const Stores& stores, SequenceStore& sequences, Tables& tables,
         PlanLog& plans)
      : shared_(shared), stores_(stores), sequences_(sequences), tables_(tables), plans_(plans) {}

  // The most tokens that any sequence may have.
  int64_t max_tokens() const;
  // Whether the slots lie in one block that the sequence may write as it is.
  bool is_in_place(const Session& session, const Sequence& sequence, int64_t first,
                   int64_t num_slots) const;
  // Appends where `is_in_place`.
  void append_in_place(Session& session, uint32_t index, const int32_t* tokens, int64_t num_tokens,
                       int64_t num_slots);
  // Whether a sequence can be extended, and what that takes.
  Failure check(const Session& session, const AppendColumns& columns, int64_t item,
                const int32_t* tokens, Need& need) const;
  // Extends a sequence as `check` found; returns how many blocks its table has.
  int64_t append(Session& session, const AppendColumns& columns, int64_t item,
                 const int32_t* tokens, const Need& need);
  // Blocks that each item would take now; 0 for one that would be refused for another reason.
  std::vector<int32_t> needs(const Session& session, const AppendColumns& columns) const;
  bool can_reserve(const Session& session, const Sequence& sequence, int64_t num_blocks) const;
  // Allocates blocks ahead, outside of a step.
  void reserve(Session& session, uint32_t index, int64_t num_blocks);
  // Makes [first, end) writable, and has blocks up to `cover`; of states only the last of these.
  void grow(Session& session, uint32_t index, int64_t first, int64_t end, int64_t cover);
  // The draft computes the next slots.
  void schedule(Session& session, uint32_t index, int64_t num_slots);
  // Throws std::logic_error saying what is wrong.
  void check(const Session& session) const;

 private:
  void check_checkpoint(const Session& session, const Sequence& sequence, int64_t checkpoint,
                        Need& need) const;
  int64_t num_needed(const Session& session, const Sequence& sequence, int64_t first, int64_t end,
                     int64_t cover) const;
  bool may_write(const Session& session, const Sequence& sequence, int64_t i, int64_t first) const;
  int64_t count_needed(const Session& session, const Sequence& sequence, int64_t first, int64_t end,
                       int64_t cover, Need& need) const;
  bool comes_back(const Session& session, const Sequence& sequence, int64_t i) const;
  int64_t num_unseen(const Sequence& sequence) const;
  int64_t num_replaced(const Session& session, const Sequence& sequence, int64_t first,
                       int64_t end) const;
  void add_checkpoint(Session& session, Sequence& sequence, int64_t i);
  void copy_on_write(Session& session, uint32_t index, int64_t i, int64_t first);
  void trim(Session& session, Sequence& sequence);

  Shared& shared_;
  const int64_t block_size_ = shared_.config.block_size_tokens;
  const int block_shift_ = __builtin_ctz(shared_.config.block_size_tokens);  // its logarithm
  const Stores& stores_;
  SequenceStore& sequences_;
  TokenStore& token_store_ = sequences_.tokens();
  Tables& tables_;
  const TableStore& table_store_ = tables_.chunks();
  PlanLog& plans_;
  std::vector<Block> scratch_;
};

}  // namespace kvplane::blocks
