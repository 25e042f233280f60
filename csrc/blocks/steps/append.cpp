// Append: in most decode steps a sequence writes one slot of a block that nothing else uses, which
// costs a few comparisons. Only a sequence that crosses a block boundary, or writes a shared block,
// costs more.
#include <algorithm>

#include "core/grouped_pool.h"

namespace kvplane::blocks {

// The needs of an item in one group.
struct Pool::AppendPlan {
  Pool* pool;
  Session* session;
  int64_t max_tokens;  // of a sequence, for a quick answer
  uint32_t index = 0;  // of the sequence
  int64_t needed = 0;  // blocks
  int64_t available = 0;
};

ItemResults Pool::append(Groups groups, SessionHandle handle, const AppendColumns& columns,
                         bool only_check) {
  const int64_t num = columns.sequence_ids.size;
  ItemResults results;
  results.values.resize(static_cast<size_t>(num));
  const bool has_negatives = any_negative(columns.token_ids.data, columns.token_ids.size);
  const bool is_plain = !only_check && !has_negatives && columns.num_lookahead.size == 0;
  std::vector<AppendPlan> plans;
  for (int64_t g = 0; g < groups.size; ++g)
    plans.push_back({groups[g], &groups[g]->sessions_[handle], groups[g]->max_tokens()});
  const int32_t* tokens = columns.token_ids.data;
  for (int64_t item = 0; item < num; tokens += columns.num_tokens[item], ++item) {
    const int64_t num_slots = columns.num_slots[item], num_given = columns.num_tokens[item];
    if (is_plain && num_slots > 0 && fit_in_place(plans, columns, item)) {
      for (const AppendPlan& plan : plans) {
        Pool& pool = *plan.pool;
        Session& session = *plan.session;
        const uint32_t index = plan.index;
        Sequence& sequence = pool.sequences_[index];
        sequence.tokens.append(pool.token_store_, tokens, num_given);
        session.num_tokens += num_given;
        pool.schedule(session, index, num_slots);
        results.values[static_cast<size_t>(item)] = static_cast<int32_t>(sequence.table.size);
      }
      continue;
    }
    Failure failure{item, Code::kOk};
    for (AppendPlan& plan : plans) {
      failure = plan.pool->check_append(*plan.session, columns, item, tokens, plan);
      if (is_later(failure.code)) failure = in_proportion(groups, *plan.pool, failure);
      if (failure.code != Code::kOk) break;
    }
    if (failure.code != Code::kOk) {
      results.failures.push_back(failure);
      continue;
    }
    if (only_check) continue;
    for (AppendPlan& plan : plans)
      results.values[static_cast<size_t>(item)] =
          static_cast<int32_t>(plan.pool->append_one(*plan.session, columns, item, tokens, plan));
  }
  return results;
}

// A failure of one group, its blocks counted as for all groups.
Failure Pool::in_proportion(Groups groups, const Pool& pool, Failure failure) {
  const Proportion proportion(groups, static_cast<Tier>(failure.c));
  failure.a = proportion.up(pool, failure.a);
  failure.b = proportion.down(pool, failure.b);
  return failure;
}

// Whether an item only writes slots of one block that the sequence may write as it is, in all
// groups.
bool Pool::fit_in_place(std::vector<AppendPlan>& plans, const AppendColumns& columns,
                        int64_t item) {
  for (AppendPlan& plan : plans) {
    const Pool& pool = *plan.pool;
    const Session& session = *plan.session;
    const uint32_t* index = session.sequences.find(columns.sequence_ids[item]);
    if (!index) return false;
    plan.index = *index;
    const Sequence& sequence = pool.sequences_[*index];
    if (sequence.tokens.size + columns.num_tokens[item] > plan.max_tokens ||
        !pool.is_in_place(session, sequence, columns.first_positions[item],
                          columns.num_slots[item]))
      return false;
  }
  return true;
}

// The most tokens that any sequence may have.
int64_t Pool::max_tokens() const {
  const int64_t num_blocks = stores_[kDevice].num_blocks, quota = config_.max_owner_blocks;
  return (quota ? std::min(num_blocks, quota) : num_blocks) * block_size_;
}

// Whether the slots lie in one block that the sequence may write as it is.
bool Pool::is_in_place(const Session& session, const Sequence& sequence, int64_t first,
                       int64_t num_slots) const {
  const int64_t i = first >> block_shift_;
  if (sequence.num_scheduled != first || (first + num_slots - 1) >> block_shift_ != i ||
      i >= sequence.table.size || sequence.tier != kDevice ||
      sequence.computed_by == session.number)
    return false;
  const auto& chunk = table_store_[sequence.table.chunks[static_cast<size_t>(i / Table::kItems)]];
  const Block b = chunk.items[i % Table::kItems];
  return chunk.num_owners == 1 &&
         stores_[kDevice].is_writable(b, session.handle,
                                      static_cast<uint32_t>(first & (block_size_ - 1)));
}

// Whether a sequence can be extended, and what that takes.
Failure Pool::check_append(const Session& session, const AppendColumns& columns, int64_t item,
                           const int32_t* tokens, AppendPlan& plan) const {
  const int64_t id = columns.sequence_ids[item], first = columns.first_positions[item];
  const int64_t num_slots = columns.num_slots[item], num_given = columns.num_tokens[item];
  const int64_t num_ahead = columns.num_lookahead.size ? columns.num_lookahead[item] : 0;
  const uint32_t* index = session.sequences.find(id);
  if (!index) return {item, Code::kNotFound, id};
  if (num_slots < 0) return {item, Code::kNegative, 0};
  if (num_ahead < 0) return {item, Code::kNegative, 2};
  if (any_negative(tokens, num_given)) return {item, Code::kNegative, 1};
  plan.index = *index;
  const Sequence& sequence = sequences_[plan.index];
  if (sequence.tier != kDevice) return {item, Code::kSwapped, id, sequence.tier};
  // A block that this plan computes is written after this plan's transfers.
  const bool copies_unwritten = sequence.filled_by == session.number && first % block_size_;
  if (num_slots && (sequence.computed_by == session.number || copies_unwritten))
    return {item, Code::kBusy, id};
  if (first != sequence.num_scheduled)
    return {item, Code::kPosition, id, sequence.num_scheduled, first};
  const int64_t end = first + num_slots, cover = end + num_ahead;
  const int64_t longest = std::max(cover, sequence.tokens.size + num_given);
  if (longest > kMaxPositions ||
      div_ceil(longest, block_size_) - sequence.num_trimmed > stores_[kDevice].num_blocks)
    return never_fits(kDevice, item, div_ceil(longest, block_size_));
  const int64_t quota = config_.max_owner_blocks;
  if (quota && div_ceil(longest, block_size_) - sequence.num_trimmed > quota)
    return {item, Code::kNeverQuota, div_ceil(longest, block_size_), quota, kDevice};
  const int64_t needed = plan.needed = num_needed(session, sequence, first, end, cover);
  const int64_t allowed =
      quota && needed ? num_allowed(session) + num_replaced(sequence, first, end) : needed;
  const int64_t available = plan.available =
      std::min(num_obtainable(session.handle, kDevice), allowed);
  // Blocks that it has ahead serve for the copy of a shared one.
  const int64_t num_spare = needed > available ? num_ahead_of(sequence, std::max(end, cover)) : 0;
  if (needed > allowed + num_spare)
    return {item, Code::kLaterQuota, needed, std::max<int64_t>(0, allowed), kDevice};
  if (needed > available + num_spare) return no_room(session, kDevice, item, needed, available, 0);
  return {item, Code::kOk};
}

// Extends a sequence as `check_append` found; returns how many blocks its table has.
int64_t Pool::append_one(Session& session, const AppendColumns& columns, int64_t item,
                         const int32_t* tokens, AppendPlan& plan) {
  const int64_t id = columns.sequence_ids[item], first = columns.first_positions[item];
  const int64_t num_slots = columns.num_slots[item], num_given = columns.num_tokens[item];
  const int64_t end = first + num_slots;
  const int64_t cover = end + (columns.num_lookahead.size ? columns.num_lookahead[item] : 0);
  const int64_t needed = plan.needed, available = plan.available;
  const uint32_t index = plan.index;
  Sequence& sequence = sequences_[index];
  if (needed > available) {
    cut_table(session, sequence, sequence.table.size - (needed - available), session.number);
    if (sequence.table_sent && !session.resync_due)
      session.draft.changes.cut(ChangeKind::kTruncate, id, sequence.table.size);
  }
  sequence.tokens.append(token_store_, tokens, num_given);
  session.num_tokens += num_given;
  grow(session, index, first, end, cover);
  if (num_slots) schedule(session, index, num_slots);
  return sequence.table.size;
}

// Allocates blocks ahead for a sequence, outside of a step; the next plan has its table. It grows
// by as many in all groups: a table has an entry for each block of tokens in each of them.
bool Pool::reserve(Groups groups, SessionHandle handle, int64_t sequence_id, int64_t num_blocks) {
  for (int64_t g = 0; g < groups.size; ++g) {
    const Pool& pool = *groups[g];
    if (pool.find(handle, sequence_id)->tier != kDevice ||
        num_blocks > pool.num_obtainable(handle, kDevice) ||
        num_blocks > pool.num_allowed(pool.sessions_[handle]))
      return false;
  }
  // By the next plan, at the earliest.
  const InStep next(groups, handle, groups[0]->sessions_[handle].number + 1);
  for (int64_t g = 0; g < groups.size; ++g) {
    Pool& pool = *groups[g];
    Session& session = pool.sessions_[handle];
    const uint32_t index = *session.sequences.find(sequence_id);
    Sequence& sequence = pool.sequences_[index];
    sequence.progress_s = pool.now_s_;
    const int64_t first = sequence.num_scheduled;
    pool.grow(session, index, first, first, (sequence.table.size + num_blocks) * pool.block_size_);
  }
  return true;
}

// Blocks at the end of the table that are not needed up to `cover`, and that nothing else has.
int64_t Pool::num_ahead_of(const Sequence& sequence, int64_t cover) const {
  int64_t num = 0;
  for (int64_t i = sequence.table.size; i > div_ceil(cover, block_size_); --i, ++num) {
    const uint32_t id = sequence.table.chunks[static_cast<size_t>((i - 1) / Table::kItems)];
    const Block b = sequence.table.at(table_store_, i - 1);
    if (table_store_[id].num_owners > 1 || stores_[kDevice].ref_count(b) > 1 ||
        stores_[kDevice].num_pins(b))
      break;
  }
  return num;
}

std::vector<int32_t> Pool::growth(SessionHandle handle, const AppendColumns& columns) const {
  const Session& session = sessions_[handle];
  const int64_t num_fitting = stores_[kDevice].num_blocks;
  std::vector<int32_t> needed;
  for (int64_t item = 0; item < columns.sequence_ids.size; ++item) {
    const Sequence* sequence = find(handle, columns.sequence_ids[item]);
    const int64_t first = columns.first_positions[item], num_slots = columns.num_slots[item];
    const int64_t num_ahead = columns.num_lookahead.size ? columns.num_lookahead[item] : 0;
    const bool is_next = sequence && sequence->tier == kDevice &&
                         sequence->num_scheduled == first && num_slots >= 0 && num_ahead >= 0 &&
                         !(num_slots && sequence->computed_by == session.number);
    // For any other `first` there may be no end.
    const int64_t end = is_next ? first + num_slots : 0, cover = end + num_ahead;
    int64_t num = 0;
    if (is_next && div_ceil(cover, block_size_) - sequence->num_trimmed <= num_fitting) {
      num = num_needed(session, *sequence, first, end, cover);
      if (config_.max_owner_blocks && num &&
          num > num_allowed(session) + num_replaced(*sequence, first, end) +
                    num_ahead_of(*sequence, std::max(end, cover)))
        num = 0;
    }
    needed.push_back(static_cast<int32_t>(num));
  }
  return needed;
}

// Blocks to allocate so that the sequence can write [first, end) and has slots up to `cover`.
int64_t Pool::num_needed(const Session& session, const Sequence& sequence, int64_t first,
                         int64_t end, int64_t cover) const {
  int64_t num = std::max<int64_t>(0, div_ceil(cover, block_size_) - sequence.table.size);
  if (end == first) return num;
  const int64_t stop = std::min(div_ceil(end, block_size_), sequence.table.size);
  for (int64_t i = first / block_size_; i < stop; ++i)
    num += !may_write(session, sequence, i, first);
  return num;
}

// Counts the blocks to which nothing else refers, of those that copies would replace.
int64_t Pool::num_replaced(const Sequence& sequence, int64_t first, int64_t end) const {
  if (end == first) return 0;
  const Session& session = sessions_[sequence.handle];
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

// Blocks that tables of the owner's sessions may refer to beside those that they do.
int64_t Pool::num_allowed(const Session& session) const {
  const int64_t quota = config_.max_owner_blocks;
  if (!quota) return std::numeric_limits<int64_t>::max();
  return quota - held_[session.owner];
}

// Whether the sequence may write its i-th block from position `first` on, without copying it.
bool Pool::may_write(const Session& session, const Sequence& sequence, int64_t i,
                     int64_t first) const {
  const auto& chunk = table_store_[sequence.table.chunks[static_cast<size_t>(i / Table::kItems)]];
  const auto offset = static_cast<uint32_t>(std::max<int64_t>(0, first - i * block_size_));
  return chunk.num_owners == 1 &&
         stores_[kDevice].is_writable(chunk.items[i % Table::kItems], session.handle, offset);
}

void Pool::grow(Session& session, uint32_t index, int64_t first, int64_t end, int64_t cover) {
  Sequence& sequence = sequences_[index];
  const int64_t size = sequence.table.size;
  if (end > first) {
    for (int64_t i = first / block_size_; i < std::min(div_ceil(end, block_size_), size); ++i) {
      if (!may_write(session, sequence, i, first)) copy_on_write(session, index, i, first);
    }
  }
  const int64_t num_grown = div_ceil(std::max(end, cover), block_size_) - size;
  if (num_grown <= 0) return;
  scratch_.clear();
  allocate(session, kDevice, num_grown, scratch_);
  push_blocks(session, sequence, scratch_);
  set_entries(session, sequence, ChangeKind::kSet, size, size + num_grown, nullptr);
}

// Replaces the i-th block by a new one with what is before position `first`.
void Pool::copy_on_write(Session& session, uint32_t index, int64_t i, int64_t first) {
  Sequence& sequence = sequences_[index];
  own_chunk(session, sequence, static_cast<size_t>(i / Table::kItems));
  const Block old = sequence.table.at(table_store_, i);
  scratch_.clear();
  allocate(session, kDevice, 1, scratch_);
  const Block copy = scratch_[0];
  const int64_t num_tokens = first - i * block_size_;
  if (num_tokens > 0) {
    transfer(session, {kDevice, old, stores_[kDevice].generation(old)}, kDevice, copy,
             static_cast<uint32_t>(num_tokens));
    sequence.copied_by = session.number;
    ++counters_.num_copies_on_write;
  }
  put_block(session, sequence, i, copy);
  set_entries(session, sequence, ChangeKind::kSet, i, i + 1, nullptr);
  release(session, kDevice, &old, 1, session.number);
  touch(session, index);
}

void Pool::schedule(Session& session, uint32_t index, int64_t num_slots) {
  Sequence& sequence = sequences_[index];
  Spans& spans = session.draft.spans;
  spans.sequence_ids.push_back(sequence.id);
  spans.first_positions.push_back(static_cast<int32_t>(sequence.num_scheduled));
  spans.num_tokens.push_back(static_cast<int32_t>(num_slots));
  sequence.num_scheduled += num_slots;
  sequence.computed_by = session.number;
  sequence.progress_s = now_s_;
  sequence.pending.emplace_back(session.number, sequence.num_scheduled);
  touch(session, index);
  if (config_.window_tokens) trim(session, sequence);
}

// Drops leading blocks that no position can see from the first on that an abort would leave.
void Pool::trim(Session& session, Sequence& sequence) {
  const int64_t num_left = std::min(sequence.num_written, sequence.tokens.size);
  const int64_t first_seen = std::max<int64_t>(0, num_left - config_.window_tokens + 1);
  const int64_t num = std::min(first_seen / block_size_, sequence.table.size);
  if (num <= sequence.num_trimmed) return;
  trim_table(session, sequence, num, session.number);
  if (sequence.table_sent) session.draft.changes.cut(ChangeKind::kTrim, sequence.id, num);
}

// The failure when the item needs more blocks than the tier has.
Failure Pool::never_fits(Tier tier, int64_t item, int64_t needed) const {
  return {item, Code::kNever, needed, stores_[tier].num_blocks, tier};
}

Failure Pool::no_room(const Session& session, Tier tier, int64_t item, int64_t needed,
                      int64_t available, int64_t headroom) const {
  const bool is_headroom = headroom && needed <= num_obtainable(session.handle, tier);
  return {item, is_headroom ? Code::kLaterHeadroom : Code::kLater, needed,
          std::max<int64_t>(0, available), tier};
}

void Pool::touch(Session& session, uint32_t index) {
  session.record.touched.emplace_back(index, sequences_[index].uid);
}

// The plan, or the step that runs if there is none, concerns the sequence.
void Pool::touch_plan(Session& session, int64_t plan, uint32_t index) {
  for (PlanRecord& record : session.plans)
    if (record.number == plan) {
      record.touched.emplace_back(index, sequences_[index].uid);
      return;
    }
  touch(session, index);
}

}  // namespace kvplane::blocks
