// Tables: each block reference of a piece is counted once, however many sequences share the piece.
#include <algorithm>
#include <cstring>

#include "core/pool.h"

namespace kvplane::blocks {

void Pool::own_piece(Session& session, Sequence& sequence, size_t piece) {
  uint32_t& id = sequence.table.pieces[piece];
  if (table_store_[id].num_owners == 1) return;
  const int64_t begin = static_cast<int64_t>(piece) * Table::kItems;
  const int64_t num = std::min<int64_t>(Table::kItems, sequence.table.size - begin);
  const uint32_t copy = table_store_.add();
  const Block* items = table_store_[id].items;
  std::memcpy(table_store_[copy].items, items, static_cast<size_t>(num) * sizeof(Block));
  BlockStore& blocks = store(sequence.tier);
  for (int64_t i = 0; i < num; ++i) {
    if (items[i] == kNoBlock) continue;
    blocks.share(items[i]);
    ++session.num_held;
  }
  table_store_.drop(id);
  id = copy;
}

// Adds an entry for a block whose reference the caller holds.
void Pool::push_block(Session& session, Sequence& sequence, Block b) {
  Table& table = sequence.table;
  if (table.size % Table::kItems == 0) {
    table.pieces.push_back(table_store_.add());
  } else {
    own_piece(session, sequence, table.pieces.size() - 1);
  }
  table_store_[table.pieces.back()].items[table.size % Table::kItems] = b;
  ++table.size;
  ++session.num_entries;
  session.num_held += b != kNoBlock;
}

// Replaces an entry of a piece that the sequence owns alone; the caller sees to the references.
void Pool::put_block(Session& session, Sequence& sequence, int64_t i, Block b) {
  own_piece(session, sequence, static_cast<size_t>(i / Table::kItems));
  table_store_[sequence.table.pieces[static_cast<size_t>(i / Table::kItems)]]
      .items[i % Table::kItems] = b;
}

// Cuts the table to its first `num` entries; what is released may be touched until `plan` has run.
// Returns how many blocks no table refers to any more. Tails first.
int64_t Pool::cut_table(Session& session, Sequence& sequence, int64_t num, int64_t plan) {
  Table& table = sequence.table;
  int64_t num_released = 0;
  while (table.size > num) {
    const size_t last = table.pieces.size() - 1;
    const int64_t begin = static_cast<int64_t>(last) * Table::kItems;
    const int64_t keep = std::max(num, begin);
    session.num_entries -= table.size - keep;
    if (keep > begin) own_piece(session, sequence, last);
    const uint32_t id = table.pieces[last];
    if (table_store_[id].num_owners == 1) {
      const Block* items = table_store_[id].items;
      for (int64_t i = table.size - 1; i >= keep; --i) {
        if (items[i - begin] == kNoBlock) continue;
        num_released += release(session, sequence.tier, items[i - begin], plan);
        --session.num_held;
      }
    }
    table.size = keep;
    if (keep == begin) {
      table_store_.drop(id);
      table.pieces.pop_back();
    }
  }
  sequence.num_trimmed = std::min(sequence.num_trimmed, table.size);
  return num_released;
}

// Releases the entries before `num`: they lie behind the window.
void Pool::trim_table(Session& session, Sequence& sequence, int64_t num, int64_t plan) {
  for (int64_t i = sequence.num_trimmed; i < num; ++i) {
    own_piece(session, sequence, static_cast<size_t>(i / Table::kItems));
    const Block b = sequence.table.at(table_store_, i);
    put_block(session, sequence, i, kNoBlock);
    release(session, sequence.tier, b, plan);
    --session.num_held;
  }
  sequence.num_trimmed = num;
}

// Adds a reference to a block that may have none.
void Pool::share(Session& session, Tier tier, Block b) {
  BlockStore& blocks = store(tier);
  if (tier == kDevice) held_[session.owner] += blocks.ref_count(b) == 0;
  blocks.share(b);
}

// Removes a reference to a block that the session may touch until `plan` has run.
bool Pool::release(Session& session, Tier tier, Block b, int64_t plan) {
  BlockStore& blocks = store(tier);
  if (!session.destinations.empty() && blocks.ref_count(b) == 1 &&
      session.destinations.count(key_of(tier, b))) {
    // A later operation of this step must not allocate it: two transfers of one plan would write
    // two generations of one block.
    blocks.pin(b, session.slot, 0);
    session.kept.emplace_back(tier, b);
  }
  const bool is_last = blocks.release(b, session.slot, remember(session, tier, b, plan));
  if (tier == kDevice) held_[session.owner] -= is_last;
  return is_last;
}

// Remembers that the session may touch the block until `plan` has run; false if it has.
bool Pool::remember(Session& session, Tier tier, Block b, int64_t plan) {
  if (plan <= session.done) return false;
  auto& releases = session.releases;
  auto it = releases.end();
  while (it != releases.begin() && std::prev(it)->plan > plan) --it;
  if (it == releases.begin() || std::prev(it)->plan != plan)
    it = releases.insert(it, Release{plan, now_s_, {}});
  else
    --it;
  it->blocks.emplace_back(tier, b);
  return true;
}

void Pool::allocate(Session& session, Tier tier, int64_t num, std::vector<Block>& out) {
  const size_t before = out.size();
  allocating_ = &session;
  store(tier).allocate(session.slot, num, out);
  if (tier == kDevice) held_[session.owner] += num;
  if (session.resync_due)
    for (size_t i = before; i < out.size(); ++i) session.allocated.insert(key_of(tier, out[i]));
  announce_promoted();
}

// Sends table entries [first, end) to the data plane. allocated[i] is 1 for an entry that this plan
// allocates; null: all are.
void Pool::set_entries(Session& session, Sequence& sequence, ChangeKind kind, int64_t first,
                       int64_t end, const std::vector<uint8_t>* allocated) {
  sequence.table_sent = true;
  if (session.resync_due) return;  // the plan will carry whole tables
  TableChanges& changes = session.draft.changes;
  changes.set(kind, sequence.id, sequence.tier, first, end - first);
  const BlockStore& blocks = store(sequence.tier);
  size_t i = 0;
  sequence.table.runs(table_store_, first, end, [&](const Block* items, int64_t num) {
    for (int64_t k = 0; k < num; ++k, ++i)
      changes.entry(items[k], blocks.generation(items[k]), allocated ? (*allocated)[i] : 1);
  });
}

std::vector<Block> Pool::table_of(const Sequence& sequence) const {
  std::vector<Block> table;
  table.reserve(static_cast<size_t>(sequence.table.size));
  sequence.table.runs(table_store_, 0, sequence.table.size, [&](const Block* items, int64_t num) {
    table.insert(table.end(), items, items + num);
  });
  return table;
}

}  // namespace kvplane::blocks
