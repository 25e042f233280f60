// Tables: each block reference of a chunk is counted once, however many sequences share the chunk.
#include <algorithm>
#include <cstring>

#include "core/pool.h"

namespace kvplane::blocks {

namespace {

// How far ahead blocks are fetched from memory.
constexpr int64_t kAhead = 16;

}  // namespace

void Pool::own_chunk(Session& session, Sequence& sequence, size_t chunk) {
  uint32_t& id = sequence.table.chunks[chunk];
  if (table_store_[id].num_owners == 1) return;
  const int64_t begin = static_cast<int64_t>(chunk) * Table::kItems;
  const int64_t num = std::min<int64_t>(Table::kItems, sequence.table.size - begin);
  const uint32_t copy = table_store_.add();
  const Block* items = table_store_[id].items;
  std::memcpy(table_store_[copy].items, items, static_cast<size_t>(num) * sizeof(Block));
  const Block* first = std::find_if(items, items + num, [](Block b) { return b != kNoBlock; });
  stores_[sequence.tier].share(first, static_cast<size_t>(items + num - first));
  session.num_held += items + num - first;
  table_store_.drop(id);
  id = copy;
}

// Adds entries for blocks whose references the caller holds.
void Pool::push_blocks(Session& session, Sequence& sequence, const std::vector<Block>& blocks) {
  Table& table = sequence.table;
  note_change(session, sequence, table.size);
  if (table.size % Table::kItems && !blocks.empty())
    own_chunk(session, sequence, table.chunks.size() - 1);
  const Block* next = blocks.data();
  for (auto num = static_cast<int64_t>(blocks.size()); num > 0;) {
    const int64_t first = table.size % Table::kItems;
    if (first == 0) table.chunks.push_back(table_store_.add());
    const int64_t now = std::min<int64_t>(Table::kItems - first, num);
    std::copy(next, next + now, table_store_[table.chunks.back()].items + first);
    next += now;
    num -= now;
    table.size += now;
  }
  session.num_entries += static_cast<int64_t>(blocks.size());
  session.num_held +=
      static_cast<int64_t>(blocks.size()) - std::count(blocks.begin(), blocks.end(), kNoBlock);
}

// Replaces an entry of a chunk that the sequence owns alone; the caller counts the references.
void Pool::put_block(Session& session, Sequence& sequence, int64_t i, Block b) {
  note_change(session, sequence, i);
  own_chunk(session, sequence, static_cast<size_t>(i / Table::kItems));
  table_store_[sequence.table.chunks[static_cast<size_t>(i / Table::kItems)]]
      .items[i % Table::kItems] = b;
}

// Cuts the table to its first `num` entries; the session may touch released blocks until `plan` has
// run. Returns how many blocks no table refers to any more. Tails first.
int64_t Pool::cut_table(Session& session, Sequence& sequence, int64_t num, int64_t plan) {
  Table& table = sequence.table;
  int64_t num_released = 0;
  while (table.size > num) {
    const size_t last = table.chunks.size() - 1;
    const int64_t begin = static_cast<int64_t>(last) * Table::kItems;
    const int64_t keep = std::max(num, begin);
    session.num_entries -= table.size - keep;
    if (keep > begin) own_chunk(session, sequence, last);
    const uint32_t id = table.chunks[last];
    if (table_store_[id].num_owners == 1) {
      const Block* items = table_store_[id].items;
      cut_.clear();
      for (int64_t i = table.size - 1; i >= keep; --i)
        if (items[i - begin] != kNoBlock) cut_.push_back(items[i - begin]);
      num_released += release(session, sequence.tier, cut_.data(), cut_.size(), plan);
      session.num_held -= static_cast<int64_t>(cut_.size());
    }
    table.size = keep;
    if (keep == begin) {
      table_store_.drop(id);
      table.chunks.pop_back();
    }
  }
  sequence.num_trimmed = std::min(sequence.num_trimmed, table.size);
  return num_released;
}

// Releases the entries before `num`: they lie behind the window.
void Pool::trim_table(Session& session, Sequence& sequence, int64_t num, int64_t plan) {
  for (int64_t i = sequence.num_trimmed; i < num; ++i) {
    own_chunk(session, sequence, static_cast<size_t>(i / Table::kItems));
    const Block b = sequence.table.at(table_store_, i);
    put_block(session, sequence, i, kNoBlock);
    release(session, sequence.tier, &b, 1, plan);
    --session.num_held;
  }
  sequence.num_trimmed = num;
}

// Adds a reference to each, which may have none.
void Pool::share(Session& session, Tier tier, const std::vector<Block>& blocks) {
  BlockStore& there = stores_[tier];
  if (tier == kDevice)
    for (const Block b : blocks) held_[session.owner] += there.ref_count(b) == 0;
  there.share(blocks.data(), blocks.size());
}

// Removes a reference from each block, which the session may touch until `plan` has run. Returns
// how many have none left.
int64_t Pool::release(Session& session, Tier tier, const Block* blocks, size_t num, int64_t plan) {
  if (num == 0) return 0;
  BlockStore& there = stores_[tier];
  for (size_t i = 0; i < num && session.destinations.size(); ++i) {
    const Block b = blocks[i];
    if (there.ref_count(b) > 1 || !session.destinations.contains(key_of(tier, b))) continue;
    // A later operation of this step must not allocate it: two transfers of one plan would write
    // two generations of one block.
    there.pin(b, session.handle, 0);
    session.kept.emplace_back(tier, b);
  }
  const bool is_pending = remember(session, tier, blocks, num, plan);
  const auto num_released =
      static_cast<int64_t>(there.release(blocks, num, session.handle, is_pending));
  if (tier == kDevice) held_[session.owner] -= num_released;
  return num_released;
}

// Remembers that the session may touch the blocks until `plan` has run; false if it has.
bool Pool::remember(Session& session, Tier tier, const Block* blocks, size_t num, int64_t plan) {
  if (plan <= session.done) return false;
  auto& releases = session.releases;
  auto it = releases.end();
  while (it != releases.begin() && std::prev(it)->plan > plan) --it;
  if (it == releases.begin() || std::prev(it)->plan != plan)
    it = releases.insert(it, Release{plan, now_s_, {}});
  else
    --it;
  std::vector<Block>& there = it->blocks[tier - 1];
  there.insert(there.end(), blocks, blocks + num);
  return true;
}

// The plan that the blocks were released in has run.
void Pool::end_release(const Release& release) {
  for (const Tier tier : {kDevice, kHost}) {
    const std::vector<Block>& blocks = release.blocks[tier - 1];
    stores_[tier].finished(blocks.data(), blocks.size());
  }
}

void Pool::allocate(Session& session, Tier tier, int64_t num, std::vector<Block>& out) {
  const size_t before = out.size();
  obtain(session, tier, num, out);
  for (size_t i = before; session.resync_due && i < out.size(); ++i)
    session.allocated.insert(key_of(tier, out[i]), 1);
}

// Allocates blocks; the caller notes them as allocated, if a resync is due.
void Pool::obtain(Session& session, Tier tier, int64_t num, std::vector<Block>& out) {
  allocating_ = &session;
  stores_[tier].allocate(session.handle, num, out);
  if (tier == kDevice) held_[session.owner] += num;
  if (session.resync_due) session.allocated.reserve(static_cast<size_t>(num));
  announce_promoted();
}

// Adds table entries [first, end), but not whether they are allocated.
void Pool::add_entries(const Sequence& sequence, int64_t first, int64_t end,
                       TableChanges& changes) const {
  const BlockStore& blocks = stores_[sequence.tier];
  blocks.touched(static_cast<size_t>(end - first));
  size_t i = changes.indices.size();
  changes.indices.resize(i + static_cast<size_t>(end - first));
  changes.generations.resize(changes.indices.size());
  sequence.table.runs(table_store_, first, end, [&](const Block* items, int64_t num) {
    for (int64_t k = 0; k < num; ++k, ++i) {
      if (k + kAhead < num) blocks.prefetch(items[k + kAhead]);
      changes.indices[i] = static_cast<int32_t>(items[k]);
      changes.generations[i] = blocks.generation(items[k]);
    }
  });
}

// Sends table entries [first, end) to the data plane. allocated[i] is 1 for an entry that this plan
// allocates; null: all are.
void Pool::set_entries(Session& session, Sequence& sequence, ChangeKind kind, int64_t first,
                       int64_t end, const std::vector<uint8_t>* allocated) {
  sequence.table_sent = true;
  if (session.resync_due) return;  // the plan will say what all tables are
  TableChanges& changes = session.draft.changes;
  changes.set(kind, sequence.id, sequence.tier, first, end - first);
  add_entries(sequence, first, end, changes);
  if (allocated)
    changes.allocated.insert(changes.allocated.end(), allocated->begin(), allocated->end());
  else
    changes.allocated.resize(changes.indices.size(), 1);
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
