// Append: in most decode steps a sequence writes one slot of a block that nothing else uses, which
// costs a few comparisons. Only a sequence that crosses a block boundary, or writes a shared block,
// costs more.
#include <algorithm>

#include "core/pool.h"

namespace kvplane::blocks {

namespace {

bool any_negative(const int32_t* values, int64_t num) {
  int32_t all = 0;
  for (int64_t i = 0; i < num; ++i) all |= values[i];
  return all < 0;
}

}  // namespace

ItemResults Pool::append(Slot slot, const AppendColumns& columns) {
  Session& session = sessions_[slot];
  dry_taken_ = 0;
  const int64_t num = columns.sequence_ids.size;
  ItemResults results;
  results.values.resize(static_cast<size_t>(num));
  const bool has_negatives = any_negative(columns.token_ids.data, columns.token_ids.size);
  const bool is_plain = !dry_run_ && !has_negatives && columns.num_lookahead.size == 0;
  const int64_t max_tokens = int64_t{store(kDevice).num_blocks} * block_size_;
  const int32_t* tokens = columns.token_ids.data;
  for (int64_t item = 0; item < num; tokens += columns.num_tokens[item], ++item) {
    const int64_t num_slots = columns.num_slots[item], num_given = columns.num_tokens[item];
    const uint32_t* index = session.sequences.find(columns.sequence_ids[item]);
    if (is_plain && index && num_slots > 0) {
      Sequence& sequence = sequences_[*index];
      if (sequence.tokens.size + num_given <= max_tokens &&
          append_in_place(session, *index, columns.first_positions[item], num_slots)) {
        sequence.tokens.append(token_store_, tokens, num_given);
        results.values[static_cast<size_t>(item)] = static_cast<int32_t>(sequence.table.size);
        continue;
      }
    }
    const Failure failure = append_one(session, columns, item, tokens);
    if (failure.code != Code::kOk) {
      results.failures.push_back(failure);
    } else {
      results.values[static_cast<size_t>(item)] = static_cast<int32_t>(failure.a);
    }
  }
  return results;
}

// Whether the slots lie in one block that the sequence may write as it is; then they are scheduled.
bool Pool::append_in_place(Session& session, uint32_t index, int64_t first, int64_t num_slots) {
  Sequence& sequence = sequences_[index];
  const int64_t i = first / block_size_;
  if (sequence.num_scheduled != first || (first + num_slots - 1) / block_size_ != i ||
      i >= sequence.table.size || sequence.tier != kDevice ||
      sequence.computed_by == session.number)
    return false;
  const auto& piece = table_store_[sequence.table.pieces[static_cast<size_t>(i / Table::kItems)]];
  const Block b = piece.items[i % Table::kItems];
  if (piece.num_owners > 1 || index_.entry_of(kDevice, b) != kNoEntry ||
      !store(kDevice).is_writable(b, session.slot, static_cast<uint32_t>(first % block_size_)))
    return false;
  schedule(session, index, num_slots);
  return true;
}

// Extends a sequence, whatever that takes. Code kOk: a is how many blocks its table has.
Failure Pool::append_one(Session& session, const AppendColumns& columns, int64_t item,
                         const int32_t* tokens) {
  const int64_t id = columns.sequence_ids[item], first = columns.first_positions[item];
  const int64_t num_slots = columns.num_slots[item], num_given = columns.num_tokens[item];
  const int64_t num_ahead = columns.num_lookahead.size ? columns.num_lookahead[item] : 0;
  const uint32_t* index = session.sequences.find(id);
  if (!index) return {item, Code::kNotFound, id};
  if (num_slots < 0) return {item, Code::kNegative, 0};
  if (num_ahead < 0) return {item, Code::kNegative, 2};
  if (any_negative(tokens, num_given)) return {item, Code::kNegative, 1};
  Sequence& sequence = sequences_[*index];
  if (sequence.tier != kDevice) return {item, Code::kSwapped, id, sequence.tier};
  // A block that this plan computes is written after this plan's transfers.
  const bool copies_unwritten = sequence.filled_by == session.number && first % block_size_;
  if (num_slots && (sequence.computed_by == session.number || copies_unwritten))
    return {item, Code::kBusy, id};
  if (first != sequence.num_scheduled)
    return {item, Code::kPosition, id, sequence.num_scheduled, first};
  const int64_t end = first + num_slots, cover = end + num_ahead;
  const int64_t longest = std::max(cover, sequence.tokens.size + num_given);
  const int64_t num_fitting = store(kDevice).num_blocks;
  if (div_ceil(longest, block_size_) - sequence.num_trimmed > num_fitting)
    return {item, Code::kNever, div_ceil(longest, block_size_), num_fitting, kDevice};
  const int64_t needed = num_needed(session, sequence, first, end, cover);
  const int64_t available = obtainable(session, kDevice);
  // Blocks that it has ahead serve for the copy of a shared one.
  const int64_t num_spare = needed > available ? num_ahead_of(sequence, std::max(end, cover)) : 0;
  if (needed > available + num_spare) return no_room(session, kDevice, item, needed, available, 0);
  if (dry_run_) {
    dry_taken_ += needed;
    return {item, Code::kOk, std::max(sequence.table.size, div_ceil(cover, block_size_))};
  }
  if (needed > available) {
    cut_table(session, sequence, sequence.table.size - (needed - available), session.number);
    if (sequence.table_sent && !session.resync_due)
      session.draft.changes.cut(ChangeKind::kTruncate, id, sequence.table.size);
  }
  sequence.tokens.append(token_store_, tokens, num_given);
  grow(session, *index, first, end, cover);
  if (num_slots) schedule(session, *index, num_slots);
  return {item, Code::kOk, sequence.table.size};
}

std::vector<int32_t> Pool::growth(Slot slot, const AppendColumns& columns) const {
  const Session& session = sessions_[slot];
  std::vector<int32_t> needed;
  for (int64_t item = 0; item < columns.sequence_ids.size; ++item) {
    const Sequence* sequence = find(slot, columns.sequence_ids[item]);
    const int64_t first = columns.first_positions[item], num_slots = columns.num_slots[item];
    const int64_t num_ahead = columns.num_lookahead.size ? columns.num_lookahead[item] : 0;
    const bool fits = sequence && sequence->tier == kDevice && sequence->num_scheduled == first &&
                      num_slots >= 0 && num_ahead >= 0;
    const int64_t end = first + num_slots;
    const int64_t num = fits ? num_needed(session, *sequence, first, end, end + num_ahead) : 0;
    needed.push_back(static_cast<int32_t>(std::min<int64_t>(num, store(kDevice).num_blocks + 1)));
  }
  return needed;
}

// Gives a sequence blocks ahead, outside of a step; its table goes with the session's next plan.
bool Pool::reserve(Slot slot, int64_t sequence_id, int64_t num_blocks) {
  Session& session = sessions_[slot];
  const uint32_t index = *session.sequences.find(sequence_id);
  Sequence& sequence = sequences_[index];
  if (sequence.tier != kDevice || num_blocks > obtainable(session, kDevice)) return false;
  const int64_t number = session.number++;  // the next plan, at the earliest
  const int64_t first = sequence.num_scheduled;
  grow(session, index, first, first, (sequence.table.size + num_blocks) * block_size_);
  session.number = number;
  return true;
}

// Blocks at the end of the table that are not needed up to `cover`, and that nothing else has.
int64_t Pool::num_ahead_of(const Sequence& sequence, int64_t cover) const {
  int64_t num = 0;
  for (int64_t i = sequence.table.size; i > div_ceil(cover, block_size_); --i, ++num) {
    const auto piece = static_cast<size_t>((i - 1) / Table::kItems);
    const Block b = sequence.table.at(table_store_, i - 1);
    if (table_store_[sequence.table.pieces[piece]].num_owners > 1 ||
        store(kDevice).ref_count(b) > 1 || store(kDevice).num_pins(b))
      break;
  }
  return num;
}

// Blocks to allocate so that the sequence can write [first, end) and has slots up to `cover`.
int64_t Pool::num_needed(const Session& session, const Sequence& sequence, int64_t first,
                         int64_t end, int64_t cover) const {
  const int64_t size = sequence.table.size;
  int64_t num = std::max<int64_t>(0, div_ceil(std::max(end, cover), block_size_) - size);
  if (end == first) return num;
  for (int64_t i = first / block_size_; i < std::min(div_ceil(end, block_size_), size); ++i)
    num += !may_write(session, sequence, i, first);
  return num;
}

// Whether the sequence may write its i-th block from position `first` on, without copying it.
bool Pool::may_write(const Session& session, const Sequence& sequence, int64_t i,
                     int64_t first) const {
  const auto& piece = table_store_[sequence.table.pieces[static_cast<size_t>(i / Table::kItems)]];
  const auto offset = static_cast<uint32_t>(std::max<int64_t>(0, first - i * block_size_));
  return piece.num_owners == 1 &&
         store(kDevice).is_writable(piece.items[i % Table::kItems], session.slot, offset);
}

void Pool::grow(Session& session, uint32_t index, int64_t first, int64_t end, int64_t cover) {
  Sequence& sequence = sequences_[index];
  const int64_t size = sequence.table.size;
  if (end > first) {
    for (int64_t i = first / block_size_; i < std::min(div_ceil(end, block_size_), size); ++i) {
      if (may_write(session, sequence, i, first)) {
        // What it held was given up, so it is no spare any more.
        index_.clear_block(kDevice, sequence.table.at(table_store_, i));
      } else {
        copy_on_write(session, index, i, first);
      }
    }
  }
  const int64_t num_grown = div_ceil(std::max(end, cover), block_size_) - size;
  if (num_grown <= 0) return;
  scratch_.clear();
  allocate(session, kDevice, num_grown, scratch_);
  for (const Block b : scratch_) push_block(session, sequence, b);
  set_entries(session, sequence, ChangeKind::kSet, size, size + num_grown, nullptr);
}

// Replaces the i-th block by a new one with what is before position `first`.
void Pool::copy_on_write(Session& session, uint32_t index, int64_t i, int64_t first) {
  Sequence& sequence = sequences_[index];
  own_piece(session, sequence, static_cast<size_t>(i / Table::kItems));
  const Block old = sequence.table.at(table_store_, i);
  scratch_.clear();
  allocate(session, kDevice, 1, scratch_);
  const Block copy = scratch_[0];
  const int64_t num_tokens = first - i * block_size_;
  if (num_tokens > 0) {
    transfer(session, {kDevice, old, store(kDevice).generation(old)}, kDevice, copy,
             static_cast<uint32_t>(num_tokens));
    sequence.copied_by = session.number;
    ++counters_.num_copies_on_write;
  }
  put_block(session, sequence, i, copy);
  set_entries(session, sequence, ChangeKind::kSet, i, i + 1, nullptr);
  release(session, kDevice, old, session.number);
  touch(session, index);
}

void Pool::schedule(Session& session, uint32_t index, int64_t num_slots) {
  Sequence& sequence = sequences_[index];
  Spans& spans = session.draft.spans;
  spans.sequence_ids.push_back(sequence.id);
  spans.first_positions.push_back(sequence.num_scheduled);
  spans.num_tokens.push_back(static_cast<int32_t>(num_slots));
  sequence.num_scheduled += num_slots;
  sequence.computed_by = session.number;
  sequence.pending.emplace_back(session.number, sequence.num_scheduled);
  touch(session, index);
  if (config_.window_tokens) trim(session, sequence);
}

// Gives back the blocks that no position can see from the first on that an abort would leave.
void Pool::trim(Session& session, Sequence& sequence) {
  const int64_t first_seen =
      std::min(sequence.num_written, sequence.tokens.size) - config_.window_tokens + 1;
  const int64_t num = std::min(first_seen / block_size_, sequence.table.size);
  if (first_seen <= 0 || num <= sequence.num_trimmed) return;
  trim_table(session, sequence, num, session.number);
  if (sequence.table_sent) session.draft.changes.cut(ChangeKind::kTrim, sequence.id, num);
}

Failure Pool::no_room(const Session& session, Tier tier, int64_t item, int64_t needed,
                      int64_t available, int64_t headroom) const {
  const bool is_headroom = headroom && needed <= obtainable(session, tier);
  return {item, is_headroom ? Code::kLaterHeadroom : Code::kLater, needed,
          std::max<int64_t>(0, available), tier};
}

int64_t Pool::obtainable(const Session& session, Tier tier) const {
  return store(tier).num_obtainable(session.slot) - (dry_run_ ? dry_taken_ : 0);
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
