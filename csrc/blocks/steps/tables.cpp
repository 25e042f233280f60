#include "steps/tables.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <unordered_set>
#include <utility>

#include "core/require.h"

namespace kvplane::blocks {

namespace {

// How far ahead blocks are fetched from memory.
constexpr int64_t kAhead = 16;

}  // namespace

void Tables::own_chunk(Session& session, Sequence& sequence, size_t chunk) {
  uint32_t& id = sequence.table.chunks[chunk];
  if (table_store_[id].num_owners == 1) return;
  const int64_t begin = static_cast<int64_t>(chunk) * Table::kItems;
  const int64_t num = std::min<int64_t>(Table::kItems, sequence.table.size - begin);
  const uint32_t copy = table_store_.add();
  const Block* items = table_store_[id].items;
  std::memcpy(table_store_[copy].items, items, static_cast<size_t>(num) * sizeof(Block));
  const Block* const end = items + num;
  for (const Block *first = items, *stop; first != end; first = stop) {
    first = std::find_if(first, end, [](Block b) { return b != kNoBlock; });
    stop = std::find(first, end, kNoBlock);
    stores_[sequence.tier].share(first, static_cast<size_t>(stop - first));
    session.num_held += stop - first;
  }
  table_store_.drop(id);
  id = copy;
}

void Tables::push(Session& session, Sequence& sequence, const std::vector<Block>& blocks) {
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

void Tables::put(Session& session, Sequence& sequence, int64_t i, Block b) {
  note_change(session, sequence, i);
  own_chunk(session, sequence, static_cast<size_t>(i / Table::kItems));
  auto& chunk = table_store_[sequence.table.chunks[static_cast<size_t>(i / Table::kItems)]];
  assert(chunk.num_owners == 1 && i < sequence.table.size);
  chunk.items[i % Table::kItems] = b;
}

int64_t Tables::num_to(const Sequence& sequence, int64_t num_tokens) const {
  const int64_t block_size = shared_.config.block_size_tokens;
  if (!shared_.config.holds_states) return div_ceil(num_tokens, block_size);
  int64_t num = std::min(num_tokens / block_size, sequence.table.size);
  while (num > 0 && sequence.table.at(table_store_, num - 1) == kNoBlock) --num;
  return num;
}

int64_t Tables::cut(Session& session, Sequence& sequence, int64_t num, int64_t plan) {
  assert(num >= 0);
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

void Tables::trim(Session& session, Sequence& sequence, int64_t num, int64_t plan) {
  for (int64_t i = sequence.num_trimmed; i < num; ++i) {
    own_chunk(session, sequence, static_cast<size_t>(i / Table::kItems));
    const Block b = sequence.table.at(table_store_, i);
    if (b == kNoBlock) continue;
    put(session, sequence, i, kNoBlock);
    release(session, sequence.tier, &b, 1, plan);
    --session.num_held;
  }
  sequence.num_trimmed = num;
}

void Tables::share(Session& session, Tier tier, const std::vector<Block>& blocks) {
  BlockStore& there = stores_[tier];
  if (tier == kDevice)
    for (const Block b : blocks) held_[session.owner] += there.ref_count(b) == 0;
  there.share(blocks.data(), blocks.size());
}

int64_t Tables::release(Session& session, Tier tier, const Block* blocks, size_t num,
                        int64_t plan) {
  if (num == 0) return 0;
  BlockStore& there = stores_[tier];
  for (size_t i = 0; i < num && !session.destinations.empty(); ++i) {
    const Block b = blocks[i];
    if (there.ref_count(b) > 1 || !session.destinations.contains(tier, b)) continue;
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

bool Tables::remember(Session& session, Tier tier, const Block* blocks, size_t num, int64_t plan) {
  if (plan <= session.done) return false;
  auto& releases = session.releases;
  auto it = releases.end();
  while (it != releases.begin() && std::prev(it)->plan > plan) --it;
  if (it == releases.begin() || std::prev(it)->plan != plan)
    it = releases.insert(it, Release{plan, shared_.now_s, {}});
  else
    --it;
  std::vector<Block>& there = it->blocks[tier - 1];
  there.insert(there.end(), blocks, blocks + num);
  return true;
}

void Tables::allocate(Session& session, Tier tier, int64_t num, std::vector<Block>& out) {
  const size_t before = out.size();
  obtain(session, tier, num, out);
  for (size_t i = before; session.resync_due && i < out.size(); ++i)
    session.allocated.insert(tier, out[i]);
}

void Tables::obtain(Session& session, Tier tier, int64_t num, std::vector<Block>& out) {
  stores_[tier].allocate(session.handle, num, out);
  if (tier == kDevice) held_[session.owner] += num;
  announcements_.add_promoted();
}

void Tables::add_entries(const Sequence& sequence, int64_t first, int64_t end,
                         TableChanges& changes) const {
  const BlockStore& blocks = stores_[sequence.tier];
  blocks.touched(static_cast<size_t>(end - first));
  size_t i = changes.indices.size();
  changes.indices.resize(i + static_cast<size_t>(end - first), -1);
  changes.generations.resize(changes.indices.size());
  if (shared_.config.holds_states) {
    for (int64_t k = first; k < end; ++k, ++i)
      if (const Block b = sequence.table.at(table_store_, k); b != kNoBlock) {
        changes.indices[i] = static_cast<int32_t>(b);
        changes.generations[i] = blocks.generation(b);
      }
    return;
  }
  sequence.table.runs(table_store_, first, end, [&](const Block* items, int64_t num) {
    for (int64_t k = 0; k < num; ++k, ++i) {
      if (k + kAhead < num) blocks.prefetch(items[k + kAhead]);
      changes.indices[i] = static_cast<int32_t>(items[k]);
      changes.generations[i] = blocks.generation(items[k]);
    }
  });
}

void Tables::set_entries(Session& session, Sequence& sequence, ChangeKind kind, int64_t first,
                         int64_t end, const std::vector<uint8_t>* allocated) const {
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

std::vector<Block> Tables::blocks_of(const Sequence& sequence) const {
  std::vector<Block> table;
  table.reserve(static_cast<size_t>(sequence.table.size));
  sequence.table.runs(table_store_, 0, sequence.table.size, [&](const Block* items, int64_t num) {
    table.insert(table.end(), items, items + num);
  });
  return table;
}

int64_t Tables::num_different(const std::vector<const Sequence*>& sequences) const {
  BlockSet blocks;
  std::unordered_set<uint32_t> chunks;
  for (const Sequence* sequence : sequences) {
    if (sequence->tier != kDevice) continue;
    const Table& table = sequence->table;
    for (size_t p = 0; p < table.chunks.size(); ++p) {
      const auto begin = static_cast<int64_t>(p) * Table::kItems;
      const int64_t num = std::min<int64_t>(Table::kItems, table.size - begin);
      // A shared chunk may be used further by one of them than by another.
      if (num == Table::kItems && !chunks.insert(table.chunks[p]).second) continue;
      const Block* const items = table_store_[table.chunks[p]].items;
      for (int64_t i = 0; i < num; ++i)
        if (items[i] != kNoBlock) blocks.insert(kDevice, items[i]);
    }
  }
  return static_cast<int64_t>(blocks.size());
}

int64_t Tables::num_allowed(const Session& session) const {
  const int64_t quota = shared_.config.max_owner_blocks;
  if (!quota) return std::numeric_limits<int64_t>::max();
  return quota - held_[session.owner];
}

Failure Tables::never_fits(Tier tier, int64_t item, int64_t needed) const {
  return {item, Code::kNever, needed, stores_[tier].num_blocks, tier};
}

Failure Tables::no_room(const Session& session, Tier tier, int64_t item, int64_t needed,
                        int64_t available, int64_t headroom) const {
  const bool is_headroom = headroom && needed <= stores_[tier].num_obtainable(session.handle);
  return {item, is_headroom ? Code::kLaterHeadroom : Code::kLater, needed,
          std::max<int64_t>(0, available), tier};
}

void Tables::share_table(Session& session, Sequence& child, const Sequence& parent) {
  child.table = parent.table;
  for (const uint32_t chunk : child.table.chunks) ++table_store_[chunk].num_owners;
  session.num_entries += child.table.size;
  note_change(session, child, 0);
  child.num_trimmed = parent.num_trimmed;
}

void Tables::end_releases(Session& session) {
  for (const Release& release : session.releases)
    for (BlockStore& blocks : stores_) {
      const std::vector<Block>& released = release.blocks[blocks.tier - 1];
      blocks.finished(released.data(), released.size());
    }
  session.releases.clear();
}

void Tables::check(const Sessions& sessions, const SequenceStore& sequences,
                   BlockUses& uses) const {
  const Require require("table");
  std::unordered_map<uint32_t, uint32_t> owners;  // of chunks
  std::vector<uint8_t> is_counted(stores_[kDevice].num_blocks);
  for (const Session& session : sessions) {
    int64_t num_held = 0, num_entries = 0;
    for (const Sequence* sequence : sequences.of(session)) {
      std::vector<Block> table = blocks_of(*sequence);
      num_entries += sequence->table.size;
      for (size_t p = 0; p < sequence->table.chunks.size(); ++p) {
        if (owners[sequence->table.chunks[p]]++) continue;
        const size_t end = std::min(table.size(), (p + 1) * Table::kItems);
        for (size_t i = p * Table::kItems; i < end; ++i) {
          if (table[i] == kNoBlock) continue;
          ++uses.refs[sequence->tier - 1][table[i]];
          ++num_held;
        }
      }
      const auto num_trimmed = static_cast<size_t>(sequence->num_trimmed);
      for (size_t i = 0; i < table.size(); ++i) {
        const bool may_lack =
            shared_.config.holds_states && i > num_trimmed && i + 1 < table.size();
        require(may_lack || (table[i] == kNoBlock) == (i < num_trimmed), "trimmed entries differ",
                sequence->id);
      }
      table.erase(std::remove(table.begin(), table.end(), kNoBlock), table.end());
      if (sequence->tier == kDevice)
        for (const Block b : table)
          if (!std::exchange(is_counted[b], 1)) ++uses.held[session.owner];
      std::sort(table.begin(), table.end());
      require(std::adjacent_find(table.begin(), table.end()) == table.end(),
              "a block is twice in it", sequence->id);
    }
    for (const auto& [id, pin] : session.pins)
      for (const PinnedBlock& pinned : pin.blocks) {
        if (pinned.block == kNoBlock) continue;
        ++uses.refs[pinned.tier - 1][pinned.block];
        if (pinned.tier == kDevice && !std::exchange(is_counted[pinned.block], 1))
          ++uses.held[session.owner];
      }
    require(num_held == session.num_held, "blocks held are miscounted");
    require(num_entries == session.num_entries, "entries are miscounted");
    for (const Release& release : session.releases) {
      require(release.plan > session.done || !session.open || session.receipting.begun,
              "a release waits for a plan that has run");
      for (int t = 0; t < 2; ++t)
        for (const Block b : release.blocks[t]) ++uses.pending[t][b];
    }
  }
  for (const auto& [chunk, num] : owners)
    require(table_store_[chunk].num_owners == num, "owners of a chunk differ");
  require(table_store_.num_used() == owners.size(), "chunks are lost");
  require(uses.held == held_, "blocks that owners hold are miscounted");
}

}  // namespace kvplane::blocks
