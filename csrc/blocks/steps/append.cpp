#include "steps/append.h"

#include <algorithm>
#include <cassert>

#include "core/require.h"

namespace kvplane::blocks {

int64_t Growth::max_tokens() const {
  if (shared_.config.holds_states) return kMaxPositions;
  const int64_t num_blocks = stores_[kDevice].num_blocks, quota = shared_.config.max_owner_blocks;
  return (quota ? std::min(num_blocks, quota) : num_blocks) * block_size_;
}

bool Growth::is_in_place(const Session& session, const Sequence& sequence, int64_t first,
                         int64_t num_slots) const {
  const int64_t i = first >> block_shift_;
  if (sequence.num_scheduled != first || (first + num_slots - 1) >> block_shift_ != i ||
      sequence.tier != kDevice || sequence.computed_by == session.number)
    return false;
  // Checkpoints, which are behind all slots, are left as they are.
  if (i >= sequence.table.size) return shared_.config.holds_states;
  const auto& chunk = table_store_[sequence.table.chunks[static_cast<size_t>(i / Table::kItems)]];
  const Block b = chunk.items[i % Table::kItems];
  return chunk.num_owners == 1 &&
         stores_[kDevice].is_writable(b, session.handle,
                                      static_cast<uint32_t>(first & (block_size_ - 1)));
}

void Growth::append_in_place(Session& session, uint32_t index, const int32_t* tokens,
                             int64_t num_tokens, int64_t num_slots) {
  sequences_[index].tokens.append(token_store_, tokens, num_tokens);
  session.num_tokens += num_tokens;
  schedule(session, index, num_slots);
}

Failure Growth::check(const Session& session, const AppendColumns& columns, int64_t item,
                      const int32_t* tokens, Need& need) const {
  const int64_t id = columns.sequence_ids[item], first = columns.first_positions[item];
  const int64_t num_slots = columns.num_slots[item], num_given = columns.num_tokens[item];
  const int64_t num_ahead = columns.num_lookahead.size ? columns.num_lookahead[item] : 0;
  const uint32_t* index = session.sequences.find(id);
  if (!index) return {item, Code::kNotFound, id};
  if (num_slots < 0) return {item, Code::kNegative, 0};
  if (num_ahead < 0) return {item, Code::kNegative, 2};
  if (any_negative(tokens, num_given)) return {item, Code::kNegative, 1};
  need.index = *index;
  const Sequence& sequence = sequences_[need.index];
  if (sequence.tier != kDevice) return {item, Code::kSwapped, id, sequence.tier};
  // A block that this plan computes is written after this plan's transfers.
  const bool copies_unwritten = sequence.filled_by == session.number && first % block_size_;
  if (num_slots && (sequence.computed_by == session.number || copies_unwritten))
    return {item, Code::kBusy, id};
  if (first != sequence.num_scheduled)
    return {item, Code::kPosition, id, sequence.num_scheduled, first};
  if (shared_.config.holds_states) {
    check_checkpoint(session, sequence, columns.checkpoints.size ? columns.checkpoints[item] : 0,
                     need);
    return {item, Code::kOk};
  }
  const int64_t end = first + num_slots, cover = end + num_ahead;
  const int64_t longest = std::max(cover, sequence.tokens.size + num_given);
  const int64_t size = div_ceil(longest, block_size_), num_held = size - num_unseen(sequence);
  if (longest > kMaxPositions || num_held > stores_[kDevice].num_blocks)
    return tables_.never_fits(kDevice, item, size);
  const int64_t quota = shared_.config.max_owner_blocks;
  if (quota && num_held > quota) return {item, Code::kNeverQuota, size, quota, kDevice};
  const int64_t needed = count_needed(session, sequence, first, end, cover, need);
  const int64_t allowed =
      quota && needed ? tables_.num_allowed(session) + num_replaced(session, sequence, first, end)
                      : needed;
  if (needed > allowed)
    return {item, Code::kLaterQuota, needed, std::max<int64_t>(0, allowed), kDevice};
  const int64_t available = std::min(stores_[kDevice].num_obtainable(session.handle), allowed);
  if (needed > available) return tables_.no_room(session, kDevice, item, needed, available, 0);
  return {item, Code::kOk};
}

// Without room for its block no checkpoint is kept: nobody waits for one.
void Growth::check_checkpoint(const Session& session, const Sequence& sequence, int64_t checkpoint,
                              Need& need) const {
  const int64_t needed = count_needed(session, sequence, 0, 0, checkpoint, need);
  need.checkpoint = checkpoint;
  if (needed <= stores_[kDevice].num_obtainable(session.handle) &&
      needed <= tables_.num_allowed(session))
    return;
  need.num_spare = need.checkpoint = 0;
  need.trims = false;
}

int64_t Growth::append(Session& session, const AppendColumns& columns, int64_t item,
                       const int32_t* tokens, const Need& need) {
  const int64_t id = columns.sequence_ids[item];
  const int64_t num_slots = columns.num_slots[item], num_given = columns.num_tokens[item];
  const int64_t first = columns.first_positions[item];
  const int64_t num_ahead = columns.num_lookahead.size ? columns.num_lookahead[item] : 0;
  const uint32_t index = need.index;
  Sequence& sequence = sequences_[index];
  if (need.num_spare) {
    tables_.cut(session, sequence, sequence.table.size - need.num_spare, session.number);
    if (sequence.table_sent && !session.resync_due)
      session.draft.changes.cut(ChangeKind::kTruncate, id, sequence.table.size);
  }
  if (need.trims) trim(session, sequence);
  sequence.tokens.append(token_store_, tokens, num_given);
  session.num_tokens += num_given;
  if (shared_.config.holds_states)
    grow(session, index, 0, 0, need.checkpoint);
  else
    grow(session, index, first, first + num_slots, first + num_slots + num_ahead);
  if (num_slots) schedule(session, index, num_slots);
  return sequence.table.size;
}

bool Growth::can_reserve(const Session& session, const Sequence& sequence,
                         int64_t num_blocks) const {
  if (shared_.config.holds_states) return true;
  return sequence.tier == kDevice &&
         num_blocks <= stores_[kDevice].num_obtainable(session.handle) &&
         num_blocks <= tables_.num_allowed(session);
}

void Growth::reserve(Session& session, uint32_t index, int64_t num_blocks) {
  if (shared_.config.holds_states) return;
  Sequence& sequence = sequences_[index];
  sequence.progress_s = shared_.now_s;
  const int64_t first = sequence.num_scheduled;
  grow(session, index, first, first, (sequence.table.size + num_blocks) * block_size_);
}

// Counts the blocks to obtain for [first, end) and slots up to `cover`, and says in `need` which of
// its own blocks the sequence gives back for that: first those at the end of its table that are not
// needed up to `cover`, which serve for the copies of shared ones, and those that no position can
// see any more.
int64_t Growth::count_needed(const Session& session, const Sequence& sequence, int64_t first,
                             int64_t end, int64_t cover, Need& need) const {
  need.num_spare = 0;
  need.trims = false;
  const int64_t needed = num_needed(session, sequence, first, end, cover);
  if (!needed) return 0;
  const int64_t last = div_ceil(std::max(end, cover), block_size_);
  for (int64_t i = sequence.table.size;
       i > last && need.num_spare < needed && comes_back(session, sequence, i - 1); --i)
    ++need.num_spare;
  int64_t num = needed - need.num_spare;
  const int64_t num_gone = num_unseen(sequence);
  need.trims = num_gone > sequence.num_trimmed;
  for (int64_t i = sequence.num_trimmed; i < num_gone && num; ++i)
    num -= comes_back(session, sequence, i);
  return num;
}

// Whether the session can allocate the sequence's i-th block as soon as the sequence drops it.
bool Growth::comes_back(const Session& session, const Sequence& sequence, int64_t i) const {
  const uint32_t id = sequence.table.chunks[static_cast<size_t>(i / Table::kItems)];
  const Block b = sequence.table.at(table_store_, i);
  return b != kNoBlock && table_store_[id].num_owners == 1 &&
         !session.destinations.contains(kDevice, b) &&
         stores_[kDevice].comes_back(b, session.handle);
}

// How many leading blocks does no position need, from the first on that an abort would leave.
int64_t Growth::num_unseen(const Sequence& sequence) const {
  if (shared_.config.needs_all_blocks()) return sequence.num_trimmed;
  const int64_t num_left = std::min(sequence.num_written, sequence.tokens.size);
  if (shared_.config.holds_states)
    return std::max(sequence.num_trimmed, tables_.num_to(sequence, num_left) - 1);
  const int64_t first_seen = std::max<int64_t>(0, num_left - shared_.config.window_tokens + 1);
  return std::max(sequence.num_trimmed, std::min(first_seen / block_size_, sequence.table.size));
}

std::vector<int32_t> Growth::needs(const Session& session, const AppendColumns& columns) const {
  const int64_t num_fitting = stores_[kDevice].num_blocks;
  std::vector<int32_t> needed;
  if (shared_.config.holds_states) {
    needed.resize(static_cast<size_t>(columns.sequence_ids.size));
    return needed;
  }
  for (int64_t item = 0; item < columns.sequence_ids.size; ++item) {
    const Sequence* sequence = sequences_.find(session, columns.sequence_ids[item]);
    const int64_t first = columns.first_positions[item], num_slots = columns.num_slots[item];
    const int64_t num_ahead = columns.num_lookahead.size ? columns.num_lookahead[item] : 0;
    const bool is_next = sequence && sequence->tier == kDevice &&
                         sequence->num_scheduled == first && num_slots >= 0 && num_ahead >= 0 &&
                         !(num_slots && sequence->computed_by == session.number);
    // For any other `first` there may be no end.
    const int64_t end = is_next ? first + num_slots : 0, cover = end + num_ahead;
    int64_t num = 0;
    if (is_next && div_ceil(cover, block_size_) - num_unseen(*sequence) <= num_fitting) {
      Need need;
      num = count_needed(session, *sequence, first, end, cover, need);
      if (shared_.config.max_owner_blocks && num &&
          num > tables_.num_allowed(session) + num_replaced(session, *sequence, first, end))
        num = 0;
    }
    needed.push_back(static_cast<int32_t>(num));
  }
  return needed;
}

// Blocks to allocate so that the sequence can write [first, end) and has slots up to `cover`.
int64_t Growth::num_needed(const Session& session, const Sequence& sequence, int64_t first,
                           int64_t end, int64_t cover) const {
  int64_t num = std::max<int64_t>(0, div_ceil(cover, block_size_) - sequence.table.size);
  if (shared_.config.holds_states) return std::min<int64_t>(num, 1);
  if (end == first) return num;
  const int64_t stop = std::min(div_ceil(end, block_size_), sequence.table.size);
  for (int64_t i = first / block_size_; i < stop; ++i)
    num += !may_write(session, sequence, i, first);
  return num;
}

// Counts the blocks to which nothing else refers, of those that copies would replace.
int64_t Growth::num_replaced(const Session& session, const Sequence& sequence, int64_t first,
                             int64_t end) const {
  if (end == first) return 0;
  int64_t num = 0;
  const int64_t stop = std::min(div_ceil(end, block_size_), sequence.table.size);
  for (int64_t i = first / block_size_; i < stop; ++i) {
    if (may_write(session, sequence, i, first)) continue;
    const uint32_t id = sequence.table.chunks[static_cast<size_t>(i / Table::kItems)];
    const Block b = sequence.table.at(table_store_, i);
    num += table_store_[id].num_owners == 1 && stores_[kDevice].ref_count(b) == 1;
  }
  return num;
}

// Whether the sequence may write its i-th block from position `first` on, without copying it.
bool Growth::may_write(const Session& session, const Sequence& sequence, int64_t i,
                       int64_t first) const {
  const auto& chunk = table_store_[sequence.table.chunks[static_cast<size_t>(i / Table::kItems)]];
  const auto offset = static_cast<uint32_t>(std::max<int64_t>(0, first - i * block_size_));
  return chunk.num_owners == 1 &&
         stores_[kDevice].is_writable(chunk.items[i % Table::kItems], session.handle, offset);
}

void Growth::grow(Session& session, uint32_t index, int64_t first, int64_t end, int64_t cover) {
  Sequence& sequence = sequences_[index];
  const int64_t size = sequence.table.size;
  if (end > first) {
    for (int64_t i = first / block_size_; i < std::min(div_ceil(end, block_size_), size); ++i) {
      if (!may_write(session, sequence, i, first)) copy_on_write(session, index, i, first);
    }
  }
  const int64_t num_grown = div_ceil(std::max(end, cover), block_size_) - size;
  if (num_grown <= 0) return;
  if (shared_.config.holds_states) return add_checkpoint(session, sequence, size + num_grown - 1);
  scratch_.clear();
  tables_.allocate(session, kDevice, num_grown, scratch_);
  tables_.push(session, sequence, scratch_);
  tables_.set_entries(session, sequence, ChangeKind::kSet, size, size + num_grown, nullptr);
}

// Adds a block as the table's i-th entry, beyond its end; those before it have none.
void Growth::add_checkpoint(Session& session, Sequence& sequence, int64_t i) {
  const int64_t size = sequence.table.size;
  scratch_.assign(static_cast<size_t>(i - size), kNoBlock);
  tables_.allocate(session, kDevice, 1, scratch_);
  tables_.push(session, sequence, scratch_);
  std::vector<uint8_t> allocated(scratch_.size());
  allocated.back() = 1;
  if (size > 0)
    return tables_.set_entries(session, sequence, ChangeKind::kSet, size, i + 1, &allocated);
  sequence.num_trimmed = i;
  allocated.assign(1, 1);
  tables_.set_entries(session, sequence, ChangeKind::kReplace, i, i + 1, &allocated);
}

// Replaces the i-th block by a new one with what is before position `first`.
void Growth::copy_on_write(Session& session, uint32_t index, int64_t i, int64_t first) {
  Sequence& sequence = sequences_[index];
  tables_.own_chunk(session, sequence, static_cast<size_t>(i / Table::kItems));
  const Block old = sequence.table.at(table_store_, i);
  scratch_.clear();
  tables_.allocate(session, kDevice, 1, scratch_);
  const Block copy = scratch_[0];
  const int64_t num_tokens = first - i * block_size_;
  if (num_tokens > 0) {
    plans_.transfer(session, {kDevice, old, stores_[kDevice].generation(old)}, kDevice, copy,
                    static_cast<uint32_t>(num_tokens));
    sequence.copied_by = session.number;
    ++shared_.counters.num_copies_on_write;
  }
  tables_.put(session, sequence, i, copy);
  tables_.set_entries(session, sequence, ChangeKind::kSet, i, i + 1, nullptr);
  tables_.release(session, kDevice, &old, 1, session.number);
  plans_.touch(session, index);
}

void Growth::schedule(Session& session, uint32_t index, int64_t num_slots) {
  Sequence& sequence = sequences_[index];
  Spans& spans = session.draft.spans;
  assert(sequence.live && sequence.tier == kDevice);
  assert(shared_.config.holds_states ||
         sequence.num_scheduled + num_slots <= sequence.table.size * block_size_);
  spans.sequence_ids.push_back(sequence.id);
  spans.first_positions.push_back(static_cast<int32_t>(sequence.num_scheduled));
  spans.num_tokens.push_back(static_cast<int32_t>(num_slots));
  sequence.num_scheduled += num_slots;
  sequence.computed_by = session.number;
  sequence.progress_s = shared_.now_s;
  sequence.pending.emplace_back(session.number, sequence.num_scheduled);
  plans_.touch(session, index);
  if (!shared_.config.needs_all_blocks()) trim(session, sequence);
}

// Drops the blocks of `num_unseen`.
void Growth::trim(Session& session, Sequence& sequence) {
  const int64_t num = num_unseen(sequence);
  if (num <= sequence.num_trimmed) return;
  tables_.trim(session, sequence, num, session.number);
  if (sequence.table_sent) session.draft.changes.cut(ChangeKind::kTrim, sequence.id, num);
}

void Growth::check(const Session& session) const {
  const Require require("growth of sequence");
  const Spans& spans = session.draft.spans;
  std::unordered_map<int64_t, int64_t> ends;  // of what the draft computes
  for (size_t i = 0; i < spans.sequence_ids.size(); ++i)
    ends[spans.sequence_ids[i]] = int64_t{spans.first_positions[i]} + spans.num_tokens[i];
  for (const Sequence* sequence : sequences_.of(session)) {
    const int64_t num_slots = sequence->table.size * block_size_;
    require(shared_.config.holds_states || sequence->num_scheduled <= num_slots,
            "it has fewer slots than are scheduled", sequence->id);
    require(!shared_.config.holds_states || sequence->num_scheduled >= num_slots,
            "it has a checkpoint beyond what is scheduled", sequence->id);
    require(sequence->computed_by <= session.number, "a plan to come computes it", sequence->id);
    // One that was cut, and admitted again under its id, may have no span.
    const auto end = ends.find(sequence->id);
    require(end == ends.end() || sequence->computed_by < session.number ||
                end->second == sequence->num_scheduled,
            "its span ends elsewhere", sequence->id);
  }
}

}  // namespace kvplane::blocks
