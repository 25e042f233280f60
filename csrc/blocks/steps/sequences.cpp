#include "steps/sequences.h"

#include <algorithm>
#include <cassert>
#include <iterator>

namespace kvplane::blocks {

int64_t Lifecycle::num_entries(const Session& session) const {
  return std::max(session.num_entries, div_ceil(session.num_tokens, block_size_));
}

Failure Lifecycle::check_new_id(const Session& session, int64_t id, int64_t num_more,
                                int64_t item) const {
  if (id < 1) return {item, Code::kBadId, id};
  if (session.sequences.find(id)) return {item, Code::kExists, id};
  if (static_cast<int64_t>(session.sequences.size()) + num_more > shared_.config.max_sequences)
    return {item, Code::kTooManySequences, shared_.config.max_sequences};
  return {item, Code::kOk};
}

// Fork

Failure Lifecycle::check_fork(const Session& session, int64_t parent_id, int64_t id,
                              int64_t item) const {
  const uint32_t* index = session.sequences.find(parent_id);
  if (!index) return {item, Code::kNotFound, parent_id};
  const Failure failure = check_new_id(session, id, 1, item);
  if (failure.code != Code::kOk) return failure;
  const Sequence& parent = sequences_[*index];
  if (parent.computed_by == session.number) return {item, Code::kBusy, parent_id};
  const int64_t num = num_entries(session);
  const int64_t more = std::max(parent.table.size, div_ceil(parent.tokens.size, block_size_));
  if (num + more > shared_.config.max_table_entries)
    return {item, Code::kTooManyEntries, shared_.config.max_table_entries, num, more};
  return {item, Code::kOk};
}

void Lifecycle::fork(Session& session, uint32_t parent_index, int64_t id, int64_t admitted_by) {
  const uint32_t index = sequences_.add(session, id, admitted_by, shared_.now_s);
  const Sequence& parent = sequences_[parent_index];
  assert(parent.live && parent.handle == session.handle);
  Sequence& child = sequences_[index];
  child.tier = parent.tier;
  families_.join(session, index, parent.family);
  tables_.share_table(session, child, parent);
  child.tokens.share(token_store_, parent.tokens);
  session.num_tokens += child.tokens.size;
  child.num_cached = parent.num_cached;
  child.num_written = parent.num_written;
  child.num_scheduled = parent.num_scheduled;
  child.num_published = parent.num_published;
  child.chain = parent.chain;
  child.chain_uid = parent.chain_uid;
  child.private_from = parent.private_from;
  child.moved_by = parent.moved_by;
  child.copied_by = parent.copied_by;
  child.filled_by = std::max(parent.filled_by, parent.computed_by);
  child.table_sent = parent.table_sent;
  // Receipts of plans that the parent waits for count for the child too.
  child.pending = parent.pending;
  for (const auto& [plan, stop] : child.pending) plans_.touch_plan(session, plan, index);
  if (child.moved_by > session.done) plans_.touch_plan(session, child.moved_by, index);
  if (child.table_sent && !session.resync_due)
    session.draft.changes.fork(id, parent.id, child.table.size);
}

// Free and cut

Failure Lifecycle::check_free(const Session& session, int64_t id, int64_t item) const {
  const uint32_t* index = session.sequences.find(id);
  if (!index) return {item, Code::kNotFound, id};
  if (sequences_[*index].computed_by == session.number) return {item, Code::kBusy, id};
  return {item, Code::kOk};
}

int64_t Lifecycle::end(Session& session, uint32_t index, int64_t plan) {
  Sequence& sequence = sequences_[index];
  assert(sequence.live && sequence.handle == session.handle);
  publisher_.publish(session, index);  // tokens may have become known since the last receipt
  int64_t complete = std::min(std::min(sequence.tokens.size, sequence.num_scheduled) / block_size_,
                              sequence.private_from);
  if (shared_.config.holds_states) complete = std::min(complete, sequence.table.size);
  // After an abort all pending ends are the draft's, whose plan has no span of it any more.
  const bool expects = !session.resync_due && plan > session.done && sequence.tier == kDevice &&
                       !sequence.pending.empty() && complete > sequence.num_published;
  publisher_.clear_producers(sequence, index, sequence.num_published);
  BlockStore& blocks = stores_[sequence.tier];
  if (expects) {
    sequence.first_ghost = sequence.num_published;
    for (int64_t i = sequence.num_published; i < complete; ++i) {
      const Block b = sequence.table.at(table_store_, i);
      sequence.ghosts.emplace_back(b, b == kNoBlock ? 0 : blocks.generation(b));
    }
  }
  const int64_t num_released = tables_.cut(session, sequence, 0, plan);
  for (auto ghost = sequence.ghosts.rbegin(); ghost != sequence.ghosts.rend(); ++ghost)
    if (ghost->first != kNoBlock) blocks.keep(ghost->first);
  session.sequences.erase(sequence.id);
  families_.leave(session, index);
  session.num_tokens -= sequence.tokens.size;
  sequence.live = false;
  if (sequence.table_sent && !session.resync_due) session.draft.changes.drop(sequence.id);
  if (!expects) sequences_.forget(index);
  return num_released;
}

int64_t Lifecycle::finish(Session& session, uint32_t index) {
  const Sequence& sequence = sequences_[index];
  const int64_t last = std::max({sequence.changed_by, sequence.computed_by, sequence.moved_by,
                                 sequence.copied_by, sequence.filled_by});
  const bool is_idle = !session.resync_due && last <= session.done;
  return is_idle ? end(session, index, session.done) : cut(session, index);
}

int64_t Lifecycle::cut(Session& session, uint32_t index) {
  // Plans in flight may still touch its blocks; one that is made later drops its table first.
  // Blocks of a draft, or that aborted plans may touch, wait until the next plan has run.
  const bool is_open = session.resync_due || !session.draft.empty();
  return end(session, index, is_open ? session.number + 1 : session.last_plan);
}

void Lifecycle::release(Session& session, int64_t id, uint32_t index) {
  Sequence& sequence = sequences_[index];
  publisher_.clear_producers(sequence, index, 0);
  tables_.cut(session, sequence, 0, kEnded);
  session.sequences.erase(id);
  session.num_tokens -= sequence.tokens.size;
  sequence.live = false;
  sequences_.forget(index);
}

// Truncate

// The fewest tokens that a sequence can be cut to: the next position needs no trimmed block, and a
// checkpoint is left if there is one.
int64_t Lifecycle::fewest_tokens(const Sequence& sequence) const {
  if (shared_.config.holds_states)
    return sequence.table.size ? (sequence.num_trimmed + 1) * block_size_ : 0;
  if (!sequence.num_trimmed) return 0;
  return sequence.num_trimmed * block_size_ + shared_.config.window_tokens - 1;
}

Failure Lifecycle::check_truncate(const Session& session, int64_t id, int64_t num,
                                  int64_t item) const {
  const uint32_t* index = session.sequences.find(id);
  if (!index) return {item, Code::kNotFound, id};
  const Sequence& sequence = sequences_[*index];
  if (num < 1) return {item, Code::kNegative, 3};
  if (sequence.computed_by == session.number) return {item, Code::kBusy, id};
  if (num > std::max(sequence.num_scheduled, sequence.tokens.size))
    return {item, Code::kTooLong, id, sequence.num_scheduled, num};
  if (num < fewest_tokens(sequence))
    return {item, Code::kTrimmed, id, fewest_tokens(sequence), num};
  return {item, Code::kOk};
}

int64_t Lifecycle::truncate(Session& session, uint32_t index, int64_t num) {
  Sequence& sequence = sequences_[index];
  const int64_t num_full = num / block_size_;
  publisher_.publish(session, index);  // kept blocks that are complete
  publisher_.clear_producers(sequence, index, num_full);
  const int64_t num_tokens = sequence.tokens.size;
  sequence.tokens.cut(token_store_, num);
  session.num_tokens -= num_tokens - sequence.tokens.size;
  sequence.num_scheduled = std::min(sequence.num_scheduled, num);
  sequence.num_written = std::min(sequence.num_written, num);
  sequence.num_cached = std::min(sequence.num_cached, num);
  for (auto& [plan, stop] : sequence.pending) stop = std::min(stop, num);
  if (sequence.num_published > num_full) {
    if (!index_.alive(sequence.chain, sequence.chain_uid)) {
      publisher_.restart(session, sequence);
    }
    EntryId e = sequence.chain;
    for (int64_t i = sequence.num_published; i > num_full; --i) e = index_[e].parent;
    publisher_.set_chain(sequence, std::min(sequence.num_published, num_full), e);
  }
  const int64_t num_blocks = tables_.num_to(sequence, num);
  if (num_blocks >= sequence.table.size) return 0;
  const int64_t num_released = tables_.cut(session, sequence, num_blocks, session.number);
  if (sequence.table_sent && !session.resync_due)
    session.draft.changes.cut(ChangeKind::kTruncate, sequence.id, num_blocks);
  return num_released;
}

// Aborts

bool Lifecycle::is_lost(const Sequence& sequence) const {
  return std::min(sequence.num_written, sequence.tokens.size) < fewest_tokens(sequence);
}

void Lifecycle::begin_again(const Session& session, Sequence& sequence) const {
  sequence.num_written = 0;
  publisher_.restart(session, sequence);
}

int64_t Lifecycle::abort(Session& session, int64_t id, int64_t next_plan, bool keeps) {
  const uint32_t index = *session.sequences.find(id);
  const int64_t held_before = session.num_held;
  const int64_t num_copies = session.aborting.origins.empty() ? 0 : sequences_[index].table.size;
  cut_to_written(session, index, session.aborting.origins, next_plan);
  families_.claim_device(session, index, sequences_[index].tier == kDevice);
  if (!keeps) note_change(session, sequences_[index], 0);
  return 1 + std::max(num_copies, held_before - session.num_held);
}

void Lifecycle::cut_to_written(Session& session, uint32_t index, const Origins& origins,
                               int64_t next_plan) {
  Sequence& sequence = sequences_[index];
  publisher_.clear_producers(sequence, index, sequence.num_written / block_size_);
  const int64_t num_tokens = sequence.tokens.size;
  sequence.tokens.cut(token_store_, sequence.num_written);
  if (sequence.live) session.num_tokens -= num_tokens - sequence.tokens.size;
  sequence.num_written = std::min(sequence.num_written, sequence.tokens.size);
  sequence.num_scheduled = sequence.num_written;
  sequence.num_cached = std::min(sequence.num_cached, sequence.num_written);
  sequence.pending.clear();
  const int64_t num_kept = tables_.num_to(sequence, sequence.num_written);
  const bool has_copies =
      !origins.empty() && (sequence.copied_by > session.done || sequence.moved_by > session.done);
  if (sequence.moved_by > session.done) sequence.moved_by = 0;
  if (has_copies || sequence.num_published * block_size_ > sequence.num_written) {
    // Published blocks may lie beyond the cut: a group may have found more than all groups have.
    publisher_.restart(session, sequence);
  }
  if (!has_copies) {
    tables_.cut(session, sequence, num_kept, next_plan);
    if (sequence.table.size == 0) sequence.tier = kDevice;  // it is in no tier
    return;
  }
  std::vector<Block> kept;
  Tier tier = kDevice;
  const std::vector<Block> old = tables_.blocks_of(sequence);
  const int64_t num_trimmed = std::min(sequence.num_trimmed, num_kept);
  for (int64_t i = 0; i < num_kept; ++i) {
    const Block b = old[static_cast<size_t>(i)];
    BlockRef ref{sequence.tier, b, b == kNoBlock ? 0 : stores_[sequence.tier].generation(b)};
    if (b != kNoBlock) ref = origins.of(ref);
    kept.push_back(ref.block);
    tier = ref.tier;
  }
  std::vector<Block> present;
  std::copy_if(kept.begin() + num_trimmed, kept.end(), std::back_inserter(present),
               [](Block b) { return b != kNoBlock; });
  tables_.share(session, tier, present);
  tables_.cut(session, sequence, 0, next_plan);
  sequence.tier = tier;
  tables_.push(session, sequence, kept);
  sequence.num_trimmed = num_trimmed;
}

}  // namespace kvplane::blocks
