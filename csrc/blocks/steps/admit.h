// Admission: the longest cached prefix, also in the host tier or being computed by a sequence of
// the same session, then blocks for the tokens that are computed now.
#pragma once

#include <utility>
#include <vector>

#include "containers/chunk_hints.h"
#include "core/operations.h"
#include "core/shared.h"
#include "index/prefix_index.h"
#include "memory/block_store.h"
#include "sessions/sessions.h"
#include "steps/append.h"
#include "steps/families.h"
#include "steps/plans.h"
#include "steps/sequences.h"
#include "steps/tables.h"

namespace kvplane::blocks {

// Owns the hints at chunks of tokens that sequences with one prefix can share; any hint is sound,
// so there is no `check` of them. In a new sequence it writes what its hits say, and lets others of
// its session share what it will fill.
//
// Invariant: a hit compares tokens, and is a published block, or one that plans of the same session
// fill before this step's plan; so no admission sees what was not written. The pool finds hits and
// counts blocks in every group before it admits in any.
class Admitter {
 public:
  // A leading full block of a prompt that need not be computed.
  struct Hit {
    enum Kind : uint8_t {
      kShared,    // a published device block
      kHosted,    // in the host tier: copied to a new device block
      kFollowed,  // a block that a sequence of the session fills by plan `plan`; 0: it has
      kNone,      // no block, as no later position needs it
    };
    EntryId entry;
    Kind kind;
    Block block;
    int64_t plan;
  };
  // The work of an admission.
  struct Plan {
    std::vector<Hit> hits;
    int64_t cached = 0;      // tokens
    int64_t end = 0;         // of the tokens that get slots now
    int64_t checkpoint = 0;  // in what is computed now, of a group of states; 0: none
    int64_t needed = 0;      // device blocks
    int64_t available = 0;   // of them
    bool copies_last = false;
  };

  Admitter(Shared& shared, PrefixIndex& index, Stores& stores, SequenceStore& sequences,
           Tables& tables, PlanLog& plans, Growth& growth, Families& families,
           const Lifecycle& lifecycle)
      : shared_(shared),
        index_(index),
        stores_(stores),
        sequences_(sequences),
        tables_(tables),
        plans_(plans),
        growth_(growth),
        families_(families),
        lifecycle_(lifecycle),
        chunk_hints_(uint64_t{2} * shared.config.num_blocks[0] * shared.config.block_size_tokens /
                     Tokens::kItems) {}

  // Whether the admission's fields can be done at all.
  Failure check(const Session& session, const Admission& admission) const;
  // Finds the longest prefix of at most `most` blocks.
  void find_hits(const Session& session, const Admission& admission, int64_t most,
                 std::vector<Hit>& hits) const;
  // Counts the blocks that an admission with these hits needs. Without room for its checkpoint, none
  // is kept.
  void count_needed(const Session& session, const Admission& admission, bool computes,
                    Plan& plan) const;
  // Whether an admission in a group of states has to do with fewer hits.
  bool lacks_room(const Session& session, const Plan& plan) const;
  // Whether the owner would hold too many blocks with those of the admission.
  Failure over_quota(const Session& session, const Plan& plan) const;
  // Returns the new sequence's index.
  uint32_t admit(Session& session, const Admission& admission, int64_t admitted_by, bool computes,
                 const Plan& plan);
  // Where not all blocks are needed: after how many leading blocks of a prompt of num_tokens an
  // admission can begin, and the first of these that it needs, as no later position needs those
  // before. `present`: whether each block is there.
  std::pair<int64_t, int64_t> needed_hits(const std::vector<uint8_t>& present,
                                          int64_t num_tokens) const;
  // Has admissions share nothing that is still to be written.
  void share_written_only() { shares_unwritten_ = false; }

 private:
  bool find_led(const Session& session, EntryId e, int64_t i, std::vector<Hit>& hits) const;
  void take_tokens(Sequence& sequence, Span<int32_t> tokens, const std::vector<Hit>& hits);
  void use_hits(Session& session, Sequence& sequence, const std::vector<Hit>& hits);
  void set_producers(uint32_t index, const int32_t* tokens, EntryId last, int64_t first,
                     int64_t end);

  Shared& shared_;
  const int64_t block_size_ = shared_.config.block_size_tokens;
  PrefixIndex& index_;
  Stores& stores_;
  SequenceStore& sequences_;
  TokenStore& token_store_ = sequences_.tokens();
  Tables& tables_;
  const TableStore& table_store_ = tables_.chunks();
  PlanLog& plans_;
  Growth& growth_;
  Families& families_;
  const Lifecycle& lifecycle_;
  ChunkHints chunk_hints_;
  bool shares_unwritten_ = true;
  std::vector<Block> scratch_;
};

}  // namespace kvplane::blocks
