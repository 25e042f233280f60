// Aborting plans that have not run, or may have run in part: each sequence is cut to its written
// tokens, by receipts. Transfers are undone: tables refer again to the sources, pinned for this, in
// place of the copies. Forks and frees stay. The data plane learns of the abort from the next plan,
// which says what all tables are; until that has run, blocks released here stay retired.
//
// Time is proportional to the sequences, the blocks that they lose and the tables that hold copies.
#include <algorithm>

#include "core/pool.h"

namespace kvplane::blocks {

bool Pool::abort(Groups groups, SessionHandle handle, int64_t next_plan, bool keeps,
                 int64_t max_blocks) {
  Aborting& aborting = groups[0]->sessions_[handle].aborting;
  if (!aborting.begun) begin_abort(groups, handle);
  int64_t left = max_blocks;
  for (int64_t g = 0; g < groups.size; ++g)
    if (note_origins(groups[g]->sessions_[handle], left)) return true;
  while (aborting.next_id < aborting.ids.size()) {
    if (left <= 0) return true;
    const int64_t id = aborting.ids[aborting.next_id++];
    for (int64_t g = 0; g < groups.size; ++g)
      left -= groups[g]->cut_one(groups[g]->sessions_[handle], id, next_plan, keeps);
  }
  for (int64_t g = 0; g < groups.size; ++g)
    if (groups[g]->end_plans(groups[g]->sessions_[handle], next_plan, left)) return true;
  for (int64_t g = 0; g < groups.size; ++g) {
    Session& session = groups[g]->sessions_[handle];
    session.resync_due = true;
    session.aborting = Aborting{};
  }
  return false;
}

void Pool::begin_abort(Groups groups, SessionHandle handle) {
  for (int64_t g = 0; g < groups.size; ++g) {
    const Pool& pool = *groups[g];
    if (!pool.config_.window_tokens) continue;  // nothing is ever trimmed
    for (const Sequence* sequence : pool.sequences_of(handle)) {
      if (!pool.is_lost(*sequence)) continue;
      // Nothing is left to continue from in one group: it begins again in all.
      for (int64_t other = 0; other < groups.size; ++other) {
        Pool& there = *groups[other];
        Session& session = there.sessions_[handle];
        Sequence& same = there.sequences_[*session.sequences.find(sequence->id)];
        same.num_written = same.num_published = 0;
        same.chain = session.root;
        same.chain_uid = there.index_[session.root].uid;
      }
    }
  }
  for (int64_t g = 0; g < groups.size; ++g) {
    Session& session = groups[g]->sessions_[handle];
    groups[g]->end_draft(session);
    session.plans.push_back(std::exchange(session.record, {}));  // drafted since the last plan
    size_t num = 0;
    for (const PlanRecord& record : session.plans) num += record.transfers.size();
    if (num) session.aborting.origins.reserve(num);
    session.aborting.begun = true;
  }
  Session& session = groups[0]->sessions_[handle];
  std::vector<std::pair<uint32_t, int64_t>> order;  // as they lie in memory
  session.sequences.for_each([&](int64_t id, uint32_t index) { order.emplace_back(index, id); });
  std::sort(order.begin(), order.end());
  for (const auto& [index, id] : order) session.aborting.ids.push_back(id);
}

// Notes where the transfers of plans in flight copied from. Returns whether some are left.
bool Pool::note_origins(Session& session, int64_t& left) {
  auto& [begun, next_plan, next_transfer, origins, ids, next_id] = session.aborting;
  for (; next_plan < session.plans.size(); ++next_plan, next_transfer = 0) {
    const std::vector<Transfer>& transfers = session.plans[next_plan].transfers;
    for (; next_transfer < transfers.size(); ++next_transfer, left -= kOriginBlocks) {
      if (left <= 0) return true;
      origins.add(transfers[next_transfer].source, transfers[next_transfer].destination);
    }
  }
  return false;
}

// Whether the next position after the written ones, by receipts, would see trimmed blocks.
bool Pool::is_lost(const Sequence& sequence) const {
  return sequence.num_trimmed &&
         std::min(sequence.num_written, sequence.tokens.size) < fewest_tokens(sequence);
}

// Cuts a sequence. Returns how many blocks it releases; the sequence itself counts as one.
int64_t Pool::cut_one(Session& session, int64_t id, int64_t next_plan, bool keeps) {
  const uint32_t index = *session.sequences.find(id);
  const int64_t held_before = session.num_held;
  const int64_t num_copies = session.aborting.origins.empty() ? 0 : sequences_[index].table.size;
  cut_to_written(session, index, session.aborting.origins, next_plan);
  claim_device(session, index, sequences_[index].tier == kDevice);
  if (!keeps) note_change(session, sequences_[index], 0);
  return 1 + std::max(num_copies, held_before - session.num_held);
}

// Forgets the plans in flight, which will get no receipt. The blocks that they read may be read
// until `next_plan` has run. Returns whether some are left.
bool Pool::end_plans(Session& session, int64_t next_plan, int64_t& left) {
  for (; !session.plans.empty(); session.plans.pop_front()) {
    PlanRecord& record = session.plans.front();
    for (; !record.transfers.empty(); record.transfers.pop_back(), --left) {
      if (left <= 0) return true;
      const Transfer& transfer = record.transfers.back();
      if (!transfer.pins) continue;
      const auto& [tier, block, generation] = transfer.source;
      if (remember(session, tier, &transfer.source.block, 1, next_plan))
        stores_[tier].add_pending(block, session.handle);
      stores_[tier].unpin(block);
    }
    end_demotions(session, record, false, next_plan);
    for (const auto& [index, uid] : record.touched)
      if (sequences_[index].uid == uid && !sequences_[index].live) forget_sequence(index);
    left -= static_cast<int64_t>(record.touched.size());
  }
  return false;
}

void Pool::cut_to_written(Session& session, uint32_t index, const Origins& origins,
                          int64_t next_plan) {
  Sequence& sequence = sequences_[index];
  clear_producers(sequence, index, sequence.num_written / block_size_);
  const int64_t num_tokens = sequence.tokens.size;
  sequence.tokens.cut(token_store_, sequence.num_written);
  if (sequence.live) session.num_tokens -= num_tokens - sequence.tokens.size;
  sequence.num_written = std::min(sequence.num_written, sequence.tokens.size);
  sequence.num_scheduled = sequence.num_written;
  sequence.num_cached = std::min(sequence.num_cached, sequence.num_written);
  sequence.pending.clear();
  const int64_t num_kept = div_ceil(sequence.num_written, block_size_);
  const bool has_copies =
      !origins.empty() && (sequence.copied_by > session.done || sequence.moved_by > session.done);
  if (sequence.moved_by > session.done) sequence.moved_by = 0;
  if (has_copies || sequence.num_published * block_size_ > sequence.num_written) {
    // Published blocks may lie beyond the cut: a group may have found more than all groups have.
    sequence.num_published = 0;
    sequence.chain = session.root;
    sequence.chain_uid = index_[session.root].uid;
  }
  if (!has_copies) {
    cut_table(session, sequence, num_kept, next_plan);
    if (sequence.table.size == 0) sequence.tier = kDevice;  // it is in no tier
    return;
  }
  std::vector<Block> kept;
  Tier tier = kDevice;
  const std::vector<Block> old = table_of(sequence);
  const int64_t num_trimmed = std::min(sequence.num_trimmed, num_kept);
  for (int64_t i = 0; i < num_kept; ++i) {
    const Block b = old[static_cast<size_t>(i)];
    BlockRef ref{sequence.tier, b, b == kNoBlock ? 0 : stores_[sequence.tier].generation(b)};
    if (b != kNoBlock) ref = origins.of(ref);
    kept.push_back(ref.block);
    tier = ref.tier;
  }
  share(session, tier, {kept.begin() + num_trimmed, kept.end()});
  cut_table(session, sequence, 0, next_plan);
  sequence.tier = tier;
  push_blocks(session, sequence, kept);
  sequence.num_trimmed = num_trimmed;
}

}  // namespace kvplane::blocks
