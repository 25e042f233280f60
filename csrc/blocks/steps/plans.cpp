// Plans: a step's changes become one message; all tables after an abort; demotion.
#include <algorithm>
#include <unordered_map>

#include "core/pool.h"

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

// Copies a block; it is pinned until the plan has run, so that the plan can run again. Only its
// first num_tokens matter.
void Pool::transfer(Session& session, BlockRef source, Tier tier, Block copy, uint32_t num_tokens) {
  stores_[source.tier].pin(source.block, session.handle, num_tokens);
  const BlockRef destination{tier, copy, stores_[tier].generation(copy)};
  session.destinations.insert(key_of(tier, copy), 1);
  note(session, {source, destination});
}

// After an abort, the plan names its transfers once all tables are written to it.
void Pool::note(Session& session, const Transfer& transfer) {
  session.record.transfers.push_back(transfer);
  if (!session.resync_due) session.draft.transfers.add(transfer.source, transfer.destination);
}

// Blocks of the draft may be allocated again.
void Pool::end_draft(Session& session) {
  for (const auto& [tier, block] : session.kept) stores_[tier].unpin(block);
  session.kept.clear();
  session.destinations.clear();
  session.allocated.clear();
  session.tables = WholeTables{};
  session.draft.clear();
}

bool Pool::prepare(Groups groups, SessionHandle handle, int64_t max_blocks) {
  for (int64_t g = 0; g < groups.size; ++g) {
    Session& session = groups[g]->sessions_[handle];
    if (!session.resync_due) continue;
    const int64_t num =
        session.destinations.size() ? div_ceil(max_blocks, kOriginBlocks) : max_blocks;
    if (groups[g]->write_whole_tables(session, num)) return true;
    if (groups[g]->write_transfers(session, max_blocks)) return true;
  }
  return false;
}

bool Pool::finish(Groups groups, SessionHandle handle, std::string_view prefix,
                  const std::function<char*(size_t)>& make) {
  bool has_any = false;
  for (int64_t g = 0; g < groups.size; ++g) {
    Pool& pool = *groups[g];
    const BlockStore& device = pool.stores_[kDevice];
    pool.counters_.max_held =
        std::max<int64_t>(pool.counters_.max_held,
                          int64_t{device.num_in(State::kHeld)} + device.num_in(State::kPinned));
    has_any = has_any || pool.has_plan(pool.sessions_[handle]);
  }
  if (!has_any) return false;
  Draft merged;
  const Session& first = groups[0]->sessions_[handle];
  for (int64_t g = 0; g < groups.size; ++g) {
    Session& session = groups[g]->sessions_[handle];
    groups[g]->complete_draft(session);
    if (groups.size > 1) merged.add(session.draft, static_cast<uint8_t>(g));
  }
  const Draft& draft = groups.size > 1 ? merged : first.draft;
  const std::vector<uint8_t>& kinds = draft.changes.kinds;
  const bool keeps = std::count(kinds.begin(), kinds.end(), uint8_t(ChangeKind::kKeep)) > 0;
  draft.encode(prefix, first.number, first.last_plan, first.resync_due, keeps ? first.done : 0,
               make);
  for (int64_t g = 0; g < groups.size; ++g) groups[g]->end_step(groups[g]->sessions_[handle]);
  return true;
}

bool Pool::has_plan(const Session& session) const {
  return session.resync_due || !session.draft.empty() || !session.record.transfers.empty();
}

void Pool::complete_draft(Session& session) {
  if (!session.resync_due) return;
  write_whole_tables(session, std::numeric_limits<int64_t>::max());
  write_transfers(session, std::numeric_limits<int64_t>::max());
}

// The draft has become a plan.
void Pool::end_step(Session& session) {
  end_draft(session);
  session.record.number = session.number;
  session.plans.push_back(std::move(session.record));
  session.record = PlanRecord{};
  session.last_plan = session.number;
  session.resync_due = false;
}

// Writes all tables as they are now, about `max_blocks` at a time. Entries that the data plane has
// are kept, and a table that shares its first chunks with an earlier one is sent as a fork of that
// one. Returns whether some are left.
bool Pool::write_whole_tables(Session& session, int64_t max_blocks) {
  WholeTables& tables = session.tables;
  TableChanges& changes = session.draft.changes;
  if (!std::exchange(tables.begun, true)) {
    changes.clear();
    tables.indices = indices_of(session.handle);
    int64_t num = 0;
    for (const uint32_t index : tables.indices)
      num += sequences_[index].table.size - num_sent(session, sequences_[index]);
    const auto most = static_cast<size_t>(std::min(num, session.num_held));
    changes.indices.reserve(most);
    changes.generations.reserve(most);
    changes.allocated.reserve(most);
    tables.in_tables.reserve(session.destinations.size());
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

void Pool::write_whole_table(Session& session, Sequence& sequence) {
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
  add_entries(sequence, first, size, changes);
  changes.allocated.resize(changes.indices.size());
  const auto& destinations = session.destinations;
  for (; i < changes.indices.size(); ++i) {
    if (!session.allocated.size() && !destinations.size()) return;
    const int64_t key = key_of(sequence.tier, static_cast<Block>(changes.indices[i]));
    // Only the first table that refers to a block says that it is allocated.
    changes.allocated[i] = session.allocated.erase(key);
    if (destinations.contains(key)) session.tables.in_tables.insert(key, 1);
  }
}

// Writes the transfers that fill blocks of whole tables. Returns whether some are left.
bool Pool::write_transfers(Session& session, int64_t max_blocks) {
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
    if (session.allocated.contains(key_of(origin.tier, origin.block))) continue;
    if (session.tables.in_tables.contains(key_of(to.tier, to.block)) &&
        stores_[to.tier].generation(to.block) == to.generation)
      session.draft.transfers.add(origin, to);
  }
  return false;
}

// Copies a cached device block, which is evicted for the session, to the host tier if that has
// room. The plan's transfers run before anything else writes the block.
void Pool::save(Session& session, Block b) {
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
  session.destinations.insert(key_of(kHost, copy[0]), 1);
  note(session, {source, destination, false});
  Allocations& allocations = session.draft.allocations;
  allocations.tiers.push_back(kHost);
  allocations.indices.push_back(static_cast<int32_t>(copy[0]));
  allocations.generations.push_back(destination.generation);
  session.record.demotions.push_back({e, entry.uid, copy[0]});
  ++entry.num_arriving;
}

// The plan that copied blocks to the host tier has run, or was aborted.
void Pool::end_demotions(Session& session, const PlanRecord& record, bool has_run,
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
        ++counters_.num_demoted;
      } else if (entry.retention && !entry.has_blocks() && !entry.num_arriving) {
        retention_.lost(e);
      }
      index_.prune(e);
    }
    release(session, kHost, &demotion.copy, 1, next_plan);
  }
}

}  // namespace kvplane::blocks
