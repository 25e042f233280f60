#include "steps/plans.h"

#include <algorithm>
#include <utility>

#include "core/require.h"

namespace kvplane::blocks {

namespace {

// Evicted blocks that a plan copies to the host tier at most.
constexpr size_t kMaxDemotions = 256;

// Leading entries that two tables share as chunks.
int64_t num_shared_chunks(const Table& a, const Table& b) {
  size_t k = 0;
  while (k < a.chunks.size() && k < b.chunks.size() && a.chunks[k] == b.chunks[k]) ++k;
  return std::min({static_cast<int64_t>(k) * Table::kItems, a.size, b.size});
}

}  // namespace

void PlanLog::transfer(Session& session, BlockRef source, Tier tier, Block copy,
                       uint32_t num_tokens) {
  stores_[source.tier].pin(source.block, session.handle, num_tokens);
  const BlockRef destination{tier, copy, stores_[tier].generation(copy)};
  session.destinations.insert(tier, copy);
  note(session, {source, destination});
}

// After an abort, the plan names its transfers once all tables are written to it.
void PlanLog::note(Session& session, const Transfer& transfer) {
  session.record.transfers.push_back(transfer);
  if (!session.resync_due) session.draft.transfers.add(transfer.source, transfer.destination);
}

void PlanLog::save(Session& session, Block b) {
  BlockStore& host = stores_[kHost];
  const EntryId e = index_.entry_of(kDevice, b);
  Entry& entry = index_[e];
  if (session.resync_due || entry.block(kHost) != kNoBlock || entry.spares != kNoBlock ||
      entry.num_arriving || !host.num_obtainable(session.handle) ||
      session.record.demotions.size() == kMaxDemotions)
    return;
  std::vector<Block> copy;
  host.allocate(session.handle, 1, copy);
  const BlockRef source{kDevice, b, stores_[kDevice].generation(b)};
  const BlockRef destination{kHost, copy[0], host.generation(copy[0])};
  session.destinations.insert(kHost, copy[0]);
  note(session, {source, destination, false});
  Allocations& allocations = session.draft.allocations;
  allocations.tiers.push_back(kHost);
  allocations.indices.push_back(static_cast<int32_t>(copy[0]));
  allocations.generations.push_back(destination.generation);
  session.record.demotions.push_back({e, entry.uid, copy[0]});
  ++entry.num_arriving;
}

void PlanLog::touch(Session& session, uint32_t index) {
  session.record.touched.emplace_back(index, sequences_[index].uid);
}

void PlanLog::touch_plan(Session& session, int64_t plan, uint32_t index) {
  for (PlanRecord& record : session.plans)
    if (record.number == plan) {
      record.touched.emplace_back(index, sequences_[index].uid);
      return;
    }
  touch(session, index);
}

bool PlanLog::is_empty(const Session& session) const {
  return !(session.resync_due || !session.draft.empty() || !session.record.transfers.empty());
}

bool PlanLog::prepare(Session& session, int64_t max_blocks) {
  if (!session.resync_due) return false;
  const int64_t num =
      session.destinations.empty() ? max_blocks : div_ceil(max_blocks, kOriginBlocks);
  return write_whole_tables(session, num) || write_transfers(session, max_blocks);
}

void PlanLog::complete(Session& session) {
  if (!session.resync_due) return;
  write_whole_tables(session, std::numeric_limits<int64_t>::max());
  write_transfers(session, std::numeric_limits<int64_t>::max());
}

void PlanLog::end_step(Session& session) {
  end_draft(session);
  session.record.number = session.number;
  session.plans.push_back(std::move(session.record));
  session.record = PlanRecord{};
  session.last_plan = session.number;
  session.resync_due = false;
}

// Blocks of the draft may be allocated again.
void PlanLog::end_draft(Session& session) {
  for (const auto& [tier, block] : session.kept) stores_[tier].unpin(block);
  session.kept.clear();
  session.destinations.clear();
  session.allocated.clear();
  session.tables = WholeTables{};
  session.draft.clear();
}

// Writes all tables as they are now, about `max_blocks` at a time. Entries that the data plane has
// are kept, and a table that shares its first chunks with an earlier one is sent as a fork of that
// one. Returns whether some are left.
bool PlanLog::write_whole_tables(Session& session, int64_t max_blocks) {
  WholeTables& tables = session.tables;
  TableChanges& changes = session.draft.changes;
  if (!std::exchange(tables.begun, true)) {
    changes = TableChanges{};
    tables.indices = sequences_.indices_of(session);
    int64_t num = 0;
    for (const uint32_t index : tables.indices)
      num += sequences_[index].table.size - num_sent(session, sequences_[index]);
    const auto most = static_cast<size_t>(std::min(num, session.num_held));
    changes.indices.reserve(most);
    changes.generations.reserve(most);
    changes.allocated.reserve(most);
  }
  const size_t first_index = changes.indices.size() + changes.kinds.size();
  for (; tables.next < tables.indices.size(); ++tables.next) {
    if (static_cast<int64_t>(changes.indices.size() + changes.kinds.size() - first_index) >=
        max_blocks)
      return true;
    write_whole_table(session, sequences_[tables.indices[tables.next]]);
  }
  return false;
}

void PlanLog::write_whole_table(Session& session, Sequence& sequence) {
  TableChanges& changes = session.draft.changes;
  sequence.table_sent = sequence.table.size > 0;
  if (!sequence.table.size) return;
  const int64_t size = sequence.table.size, num_kept = num_sent(session, sequence);
  int64_t first = sequence.num_trimmed;
  ChangeKind kind = ChangeKind::kReplace;
  const auto [it, is_first] = session.tables.sent.try_emplace(sequence.table.chunks[0], &sequence);
  const int64_t num_shared = is_first ? 0 : num_shared_chunks(sequence.table, it->second->table);
  if (const int64_t num = std::max(num_kept, num_shared); num > 0 && num >= first) {
    if (num_kept >= num_shared)
      changes.cut(ChangeKind::kKeep, sequence.id, num);
    else
      changes.fork(sequence.id, it->second->id, num);
    if (num == size) return;
    first = num;
    kind = ChangeKind::kSet;
  }
  changes.set(kind, sequence.id, sequence.tier, first, size - first);
  size_t i = changes.indices.size();
  tables_.add_entries(sequence, first, size, changes);
  changes.allocated.resize(changes.indices.size());
  const auto& destinations = session.destinations;
  for (; i < changes.indices.size(); ++i) {
    if (session.allocated.empty() && destinations.empty()) return;
    const auto b = static_cast<Block>(changes.indices[i]);
    // Only the first table that refers to a block says that it is allocated.
    changes.allocated[i] = session.allocated.erase(sequence.tier, b);
    if (destinations.contains(sequence.tier, b)) session.tables.in_tables.insert(sequence.tier, b);
  }
}

// Writes the transfers that fill blocks of whole tables. Returns whether some are left.
bool PlanLog::write_transfers(Session& session, int64_t max_blocks) {
  // A block that a later operation of this step replaced is in no table, so the data plane never
  // learns of it: a copy of such a block is made from the block that it was itself copied from.
  Origins& origins = session.tables.origins;
  const std::vector<Transfer>& transfers = session.record.transfers;
  size_t& next = session.tables.next_transfer;
  if (next == 0) origins.reserve(transfers.size());
  for (int64_t num = 0; next < transfers.size(); num += kOriginBlocks) {
    if (num >= max_blocks) return true;
    const Transfer& transfer = transfers[next++];
    const BlockRef origin = origins.of(transfer.source);
    const BlockRef& to = transfer.destination;
    origins.add(transfer.source, to);
    // Nothing was ever written to a block that the step allocated and gave up again.
    if (session.allocated.contains(origin.tier, origin.block)) continue;
    if (session.tables.in_tables.contains(to.tier, to.block) &&
        stores_[to.tier].generation(to.block) == to.generation)
      session.draft.transfers.add(origin, to);
  }
  return false;
}

// The plan that copied blocks to the host tier has run, or was aborted.
void PlanLog::end_demotions(Session& session, const PlanRecord& record, bool has_run,
                            int64_t next_plan) {
  BlockStore& host = stores_[kHost];
  for (const Demotion& demotion : record.demotions) {
    const EntryId e = demotion.entry;
    if (index_.alive(e, demotion.uid)) {
      Entry& entry = index_[e];
      --entry.num_arriving;
      if (has_run && entry.block(kHost) == kNoBlock) {
        index_.set_block(e, kHost, demotion.copy);
        host.published(demotion.copy);
        ++shared_.counters.num_demoted;
      } else if (entry.retention && !entry.has_blocks() && !entry.num_arriving) {
        retention_.lost(e);
      }
      index_.prune(e);
    }
    tables_.release(session, kHost, &demotion.copy, 1, next_plan);
  }
}

// Receipts

bool PlanLog::begin_receipted(Session& session, int64_t plan) {
  auto& [begun, plans, next_plan, next_touched] = session.receipting;
  if (plan <= session.done) return begun;
  session.done = plan;
  begun = true;
  while (!session.plans.empty() && session.plans.front().number <= plan) {
    plans.push_back(std::move(session.plans.front()));
    session.plans.pop_front();
  }
  return true;
}

bool PlanLog::end_receipted(Session& session, int64_t left) {
  for (; !session.releases.empty() && session.releases.front().plan <= session.done;
       session.releases.pop_front())
    for (const Tier tier : {kDevice, kHost}) {
      std::vector<Block>& blocks = session.releases.front().blocks[tier - 1];
      const int64_t num = std::clamp<int64_t>(left, 0, static_cast<int64_t>(blocks.size()));
      stores_[tier].finished(blocks.data(), static_cast<size_t>(num));
      blocks.erase(blocks.begin(), blocks.begin() + num);
      left -= num;
      if (!blocks.empty()) return true;
    }
  for (PlanRecord& record : session.receipting.plans) {
    for (; !record.transfers.empty(); record.transfers.pop_back(), --left) {
      if (left <= 0) return true;
      const Transfer& transfer = record.transfers.back();
      if (transfer.pins) stores_[transfer.source.tier].unpin(transfer.source.block);
    }
    end_demotions(session, std::exchange(record, {}), true, session.done);
  }
  session.receipting = Receipting{};
  return false;
}

// Aborts

void PlanLog::begin_abort(Session& session) {
  end_draft(session);
  session.plans.push_back(std::exchange(session.record, {}));  // drafted since the last plan
  size_t num = 0;
  for (const PlanRecord& record : session.plans) num += record.transfers.size();
  if (num) session.aborting.origins.reserve(num);
  session.aborting.begun = true;
}

bool PlanLog::note_origins(Session& session, int64_t& left) {
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

bool PlanLog::end_plans(Session& session, int64_t next_plan, int64_t& left) {
  for (; !session.plans.empty(); session.plans.pop_front()) {
    PlanRecord& record = session.plans.front();
    for (; !record.transfers.empty(); record.transfers.pop_back(), --left) {
      if (left <= 0) return true;
      const Transfer& transfer = record.transfers.back();
      if (!transfer.pins) continue;
      const auto& [tier, block, generation] = transfer.source;
      if (tables_.remember(session, tier, &transfer.source.block, 1, next_plan))
        stores_[tier].add_pending(block, session.handle);
      stores_[tier].unpin(block);
    }
    end_demotions(session, record, false, next_plan);
    for (const auto& [index, uid] : record.touched)
      if (sequences_[index].uid == uid && !sequences_[index].live) sequences_.forget(index);
    left -= static_cast<int64_t>(record.touched.size());
  }
  return false;
}

void PlanLog::end_session(Session& session) {
  // A receipt that was applied in part: its other plans end as plans in flight do.
  auto& receipted = session.receipting.plans;
  session.plans.insert(session.plans.begin(), std::make_move_iterator(receipted.begin()),
                       std::make_move_iterator(receipted.end()));
  session.receipting = Receipting{};
  session.aborting = Aborting{};
  session.plans.push_back(std::exchange(session.record, {}));
  end_draft(session);
}

void PlanLog::check(const Session& session, BlockUses& uses) const {
  const Require require("plan");
  const auto add = [&](const PlanRecord& record) {
    for (const auto& [index, uid] : record.touched)
      require(uid <= sequences_[index].uid, "it names a sequence to come", record.number);
    for (const Transfer& transfer : record.transfers)
      if (transfer.pins) ++uses.pins[transfer.source.tier - 1][transfer.source.block];
    for (const Demotion& demotion : record.demotions) ++uses.refs[1][demotion.copy];
  };
  for (const PlanRecord& record : session.receipting.plans) add(record);
  int64_t last = session.open ? session.done : 0;
  for (const PlanRecord& record : session.plans) {
    add(record);
    // What was drafted when an abort or the end came is the last, and has no number.
    const bool is_draft = !record.number && (session.aborting.begun || !session.open);
    require(is_draft || (record.number > last && record.number <= session.last_plan),
            "it is out of order", record.number);
    last = std::max(last, record.number);
  }
  require(!session.record.number, "the draft has a number");
  require(session.resync_due || (!session.tables.begun && session.allocated.empty()),
          "whole tables are written, and not due");
  add(session.record);
  for (const auto& [tier, block] : session.kept) ++uses.pins[tier - 1][block];
}

}  // namespace kvplane::blocks
