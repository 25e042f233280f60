// One engine's sequences and plans in flight, and the draft of its next plan.
#pragma once

#include <algorithm>
#include <deque>
#include <limits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "containers/chunks.h"
#include "containers/id_map.h"
#include "core/operations.h"
#include "core/types.h"
#include "sessions/block_set.h"
#include "sessions/draft.h"
#include "sessions/origins.h"

namespace kvplane::blocks {

using TableStore = ChunkStore<Block, 64>;
using Table = ChunkedArray<TableStore>;

// A sequence, live or freed before its last receipts.
//
//     0 ............ num_written ............ num_scheduled ............ table.size * block size
//     | receipted    | some plan in flight    | blocks allocated ahead
//     |              | writes these           |
//
// The tokens [0, tokens.size) are known: to anywhere up to the end of the table, or beyond what is
// scheduled.
//
// Invariant: num_cached, num_written <= num_scheduled <= table.size * block size; pending ends rise
// with their plans.
struct Sequence {
  int64_t id = 0;
  int64_t admitted_by = 0;  // number of the step that admitted or forked it
  SessionHandle handle = kNoSession;
  uint32_t uid = 0;  // counts the sequences that were kept here
  bool live = false;
  bool table_sent = false;  // the data plane will have a table for it once the last plan has run
  int64_t copied_by = 0;    // the last plan that copies blocks of its table from elsewhere
  // Leading entries that the data plane has, by receipts, until `changed_by` has run: the first
  // plan with the table's last change, or one before that plan. From then on it has all.
  int64_t num_sent = 0;
  int64_t changed_by = 0;
  Tier tier = kDevice;
  int64_t family = 0;          // counted from 1 in a session; 0 where families are not counted
  uint32_t family_place = 0;   // in its members
  bool claims_device = false;  // it is on the device, or a swap is bringing it there
  Table table;                 // blocks; the first num_trimmed are kNoBlock
  int64_t num_trimmed = 0;
  Tokens tokens;
  int64_t num_cached = 0;
  int64_t num_written = 0;
  int64_t num_scheduled = 0;
  int64_t num_published = 0;  // leading blocks that the index has, or has in another block
  EntryId chain = kNoEntry;   // the entry of the last of them; the root's for none
  uint32_t chain_uid = 0;
  // Blocks from this one on are not published: the prefix was forgotten after it was admitted.
  int64_t private_from = std::numeric_limits<int64_t>::max();
  // Entries that may say that this sequence fills them, for the blocks from `first_produced` on.
  std::vector<EntryId> produced;
  int64_t first_produced = 0;
  int64_t moved_by = 0;     // the plan whose transfers fill the table
  int64_t computed_by = 0;  // the last plan that computes tokens of it
  double progress_s = 0;    // when it was last scheduled, receipted, moved or given blocks
  int64_t filled_by = 0;    // the last plan in which another sequence computes blocks of its table
  std::vector<std::pair<int64_t, int64_t>> pending;  // (plan, end of what it writes)
  // Of a freed one: blocks from num_published on that receipts may still publish.
  std::vector<std::pair<Block, int64_t>> ghosts;  // (block, generation)
  int64_t first_ghost = 0;                        // place in the table of the first
  int64_t num_checked = 0;                        // scratch of deferred_tokens, as is the next
  int64_t last_given = -1;
};

// An admission's sequences and all forks of them, as one claim to device blocks. `reported`: where
// it was by the last event of it. `members`: indices of its live sequences.
struct Family {
  enum class Reported : uint8_t { kNothing, kOnDevice, kOnHost };
  std::vector<uint32_t> members;
  int64_t num_on_device = 0;
  Reported reported = Reported::kNothing;
  bool has_changed = false;  // since the last event
};

// A cached block that a pin holds, and the entry whose prefix it has; kNoBlock behind the attention
// window.
struct PinnedBlock {
  EntryId entry;
  uint32_t uid;
  Tier tier;
  Block block;
};

// Leading blocks of a prompt, which a session holds for reading.
struct Pin {
  std::vector<PinnedBlock> blocks;
  double expires_at_s = 0;
};

// A copy in the host tier that keeps an entry's prefix.
struct Demotion {
  EntryId entry;
  uint32_t uid;
  Block copy;
};

// Other blocks whose handling takes as long as following a block to where it was copied from.
constexpr int64_t kOriginBlocks = 4;

struct Transfer {
  BlockRef source;
  BlockRef destination;
  bool pins = true;  // the source, until the plan has run; not one that is evicted
};

// Changes that a plan in flight makes once it has run, or undoes when it is aborted.
struct PlanRecord {
  int64_t number = 0;
  std::vector<std::pair<uint32_t, uint32_t>> touched;  // (sequence, uid): have spans or transfers
  std::vector<Transfer> transfers;
  std::vector<Demotion> demotions;
};

// Table references released while the session's plan may touch the blocks.
struct Release {
  int64_t plan;
  double since_s;                // when the first of them was released
  std::vector<Block> blocks[2];  // by tier
};

// Plans that have run. Their sequences are advanced some at a time; then the blocks that they read
// are unpinned, and those that they released are freed. There may be releases and no plans.
struct Receipting {
  bool begun = false;
  std::vector<PlanRecord> plans;
  size_t next_plan = 0;
  size_t next_touched = 0;  // of this plan
};

// An abort in slices: the copies of transfers are noted in each layer group, sequences are cut in
// all groups together, and the plans of each group end.
struct Aborting {
  bool begun = false;
  size_t next_plan = 0;
  size_t next_transfer = 0;  // of this plan
  Origins origins;
  std::vector<int64_t> ids;  // of the sequences, in the first group
  size_t next_id = 0;
};

// A swap in slices: its blocks are noted, the new ones allocated, the contents copied, and then the
// tables moved.
struct Swapping {
  Tier destination = kHost;
  int64_t headroom = 0;           // blocks of the destination that it leaves
  std::vector<uint32_t> indices;  // of the sequences
  std::vector<uint32_t> places;   // of the blocks of one table after the other, in these columns:
  std::vector<Block> blocks;      // old ones, each once
  std::vector<Block> copies;      // new ones, as many as have been allocated
  std::vector<uint8_t> is_ahead;  // whether they hold nothing yet, for any sequence
  std::vector<uint8_t> is_used;   // whether a table refers to the new one
  IdMap shared;                   // a block that several tables may have -> its place
  Failure refused{0, Code::kOk};  // why the new ones are released again
  bool has_all = false;           // the new ones
  size_t next_noted = 0;          // of the sequences
  int64_t next_entry = 0;         // of its table
  size_t next_block = 0;
  size_t next_sequence = 0;
  size_t next_place = 0;
};

// All tables, written to the draft some at a time: how many entries the data plane keeps, and the
// others; then the transfers that fill blocks of them.
struct WholeTables {
  bool begun = false;
  std::vector<uint32_t> indices;  // of the sequences
  size_t next = 0;
  std::unordered_map<uint32_t, const Sequence*> sent;  // first chunk -> a table that begins with it
  BlockSet in_tables;                                  // blocks that the draft's transfers write
  Origins origins;
  size_t next_transfer = 0;
};

struct Session {
  // Of the layer group.
  SessionHandle handle = kNoSession;
  bool open = false;
  bool ended = false;  // and not fenced
  EntryId root = kNoEntry;
  uint32_t owner = 0;
  int64_t number = 0;  // of the step that runs, or ran last
  // Of an ended session: the sequences still to be released, once its plans have ended.
  std::vector<std::pair<int64_t, uint32_t>> ending;  // (id, index)

  // Of the sequence store and those who end sequences.
  IdMap sequences{0};      // id -> index
  int64_t num_tokens = 0;  // known ones of its live sequences, shared or not

  // Of Families.
  std::unordered_map<int64_t, Family> families;
  std::vector<int64_t> changed_families;
  int64_t last_family = 0;

  // Of Tables.
  std::deque<Release> releases;
  int64_t num_held = 0;     // blocks of chunks of its tables, both tiers
  int64_t num_entries = 0;  // of its tables, shared or not

  // Of Pins.
  std::unordered_map<int64_t, Pin> pins;
  int64_t num_pinned = 0;  // blocks of all of them

  // Of Swaps.
  Swapping swapping;  // begun only between two slices of a swap

  // Of PlanLog; those who draft write to the draft.
  std::deque<PlanRecord> plans;
  Receipting receipting;  // begun only between two slices of a receipt
  Aborting aborting;      // the same for an abort
  bool resync_due = false;
  int64_t done = 0;  // highest plan receipted
  int64_t last_plan = 0;
  Draft draft;
  PlanRecord record;   // of the draft
  WholeTables tables;  // of the draft
  // Of the draft: blocks that its transfers write, which are not allocated twice in one plan; those
  // of them that nothing refers to any more, pinned until the plan is made; its allocated blocks.
  BlockSet destinations;
  std::vector<std::pair<Tier, Block>> kept;
  BlockSet allocated;
};

// Leading entries of the table that the data plane has, whichever plans in flight have reached it.
inline int64_t num_sent(const Session& session, const Sequence& sequence) {
  const int64_t size = sequence.table.size;
  return sequence.changed_by <= session.done ? size : std::min(sequence.num_sent, size);
}

// Notes that entries from `first` on differ from the data plane's until a plan made from now on has
// run. An aborted plan may or may not have reached the data plane. A table that is cut needs no
// note: the data plane has as many of the remaining entries as before.
inline void note_change(const Session& session, Sequence& sequence, int64_t first) {
  sequence.num_sent = std::min(num_sent(session, sequence), first);
  sequence.changed_by = session.last_plan + 1;
}

}  // namespace kvplane::blocks
