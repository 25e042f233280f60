#include "core/pool.h"

#include <algorithm>
#include <stdexcept>

#include "eviction/factory.h"

namespace kvplane::blocks {

namespace {

BlockStore make_store(PoolConfig& config, Tier tier, PrefixIndex& index) {
  const uint32_t num_blocks = config.num_blocks[tier - 1];
  return {tier, num_blocks, std::move(config.generations[tier - 1]), index,
          make_policy(config.eviction_policy, num_blocks)};
}

}  // namespace

Pool::Pool(PoolConfig config)
    : config_(std::move(config)),
      block_size_(config_.block_size_tokens),
      block_shift_(__builtin_ctz(config_.block_size_tokens)),
      index_(config_.block_size_tokens, config_.num_blocks[0], config_.num_blocks[1], config_.seed),
      stores_(make_store(config_, kDevice, index_), make_store(config_, kHost, index_)),
      chunk_hints_(2 * uint64_t{config_.num_blocks[0]} * config_.block_size_tokens /
                   Tokens::kItems),
      retention_(index_, stores_),
      feed_(index_, retention_) {
  for (const Tier tier : {kDevice, kHost})
    stores_[tier].on_evict = [this, tier](Span<Block> blocks, Eviction why) {
      evicted(tier, blocks, why);
    };
}

void Pool::set_time(double now_s) {
  now_s_ = now_s;
  retention_.expire(now_s);
}

void Pool::evicted(Tier tier, Span<Block> blocks, Eviction why) {
  BlockTimes& times = block_times_[tier - 1];
  times.num_evictions[static_cast<size_t>(why)] += blocks.size;
  for (int64_t i = 0; i < blocks.size; ++i) {
    const Entry& entry = index_[index_.entry_of(tier, blocks[i])];
    times.lifetime.add(now_s_ - entry.published_s);
    times.idle.add(now_s_ - entry.used_s);
  }
  if (tier == kDevice && why != Eviction::kOwn && stores_[kHost].num_blocks)
    for (int64_t i = 0; i < blocks.size; ++i) save(*allocating_, blocks[i]);
}

// Sessions

SessionHandle Pool::open_session(std::string_view root, uint32_t owner) {
  SessionHandle handle;
  if (free_handles_.empty()) {
    handle = static_cast<SessionHandle>(sessions_.size());
    sessions_.emplace_back();
  } else {
    handle = free_handles_.back();
    free_handles_.pop_back();
  }
  Session& session = sessions_[handle];
  session = Session{};
  session.handle = handle;
  session.open = true;
  session.sequences = IdMap(config_.seed);
  session.owner = owner;
  if (held_.size() <= owner) held_.resize(owner + 1);
  session.root = index_.open_root(root);
  for (auto& blocks : stores_) blocks.open(handle);
  return handle;
}

void Pool::end_session(SessionHandle handle) {
  Session& session = sessions_[handle];
  // A receipt that was applied in part: its other plans end as plans in flight do.
  auto& receipted = session.receipting.plans;
  session.plans.insert(session.plans.begin(), std::make_move_iterator(receipted.begin()),
                       std::make_move_iterator(receipted.end()));
  session.receipting = Receipting{};
  session.aborting = Aborting{};
  session.plans.push_back(std::exchange(session.record, {}));
  end_draft(session);
  end_swap(session);
  session.sequences.for_each(
      [&](int64_t id, uint32_t index) { session.ending.emplace_back(id, index); });
  session.families.clear();
  session.changed_families.clear();
  session.open = false;
  session.ended = true;
  index_.close_root(session.root);
  session.root = kNoEntry;
}

// Blocks whose release takes as long as that of a sequence besides its blocks.
constexpr int64_t kSequenceBlocks = 16;

bool Pool::end_some(SessionHandle handle, int64_t max_blocks) {
  Session& session = sessions_[handle];
  int64_t left = max_blocks;
  // Freed sequences that receipts were to publish are forgotten too.
  if (end_plans(session, kEnded, left)) return true;
  while (left > 0 && !session.ending.empty()) {
    const int64_t held_before = session.num_held;
    const auto [id, index] = session.ending.back();
    session.ending.pop_back();
    Sequence& sequence = sequences_[index];
    clear_producers(sequence, index, 0);
    cut_table(session, sequence, 0, kEnded);
    session.sequences.erase(id);
    session.num_tokens -= sequence.tokens.size;
    sequence.live = false;
    forget_sequence(index);
    left -= kSequenceBlocks + held_before - session.num_held;
  }
  return !session.ending.empty();
}

void Pool::session_fenced(SessionHandle handle) {
  Session& session = sessions_[handle];
  for (const Release& release : session.releases) end_release(release);
  session.releases.clear();
  session.ended = false;
  for (auto& blocks : stores_) blocks.close(handle);
  free_handles_.push_back(handle);
}

// Queries

uint64_t Pool::num_touched() const {
  return stores_[kDevice].num_touched() + stores_[kHost].num_touched() + index_.num_touched();
}

const Sequence* Pool::find(SessionHandle handle, int64_t sequence_id) const {
  const uint32_t* index = sessions_[handle].sequences.find(sequence_id);
  return index ? &sequences_[*index] : nullptr;
}

std::vector<uint32_t> Pool::indices_of(SessionHandle handle) const {
  // Sorted before a sequence is looked at: those of many are not in the cache.
  std::vector<std::pair<int64_t, uint32_t>> ids;
  ids.reserve(sessions_[handle].sequences.size());
  sessions_[handle].sequences.for_each(
      [&](int64_t id, uint32_t index) { ids.emplace_back(id, index); });
  std::sort(ids.begin(), ids.end());
  std::vector<uint32_t> found;
  found.reserve(ids.size());
  for (const auto& [id, index] : ids) found.push_back(index);
  return found;
}

std::vector<const Sequence*> Pool::sequences_of(SessionHandle handle) const {
  std::vector<const Sequence*> found;
  for (const uint32_t index : indices_of(handle)) found.push_back(&sequences_[index]);
  return found;
}

std::vector<EntryId> Pool::match(std::string_view root, Span<int32_t> tokens, int64_t most) const {
  std::vector<EntryId> found;
  std::vector<uint8_t> present;
  EntryId e = index_.find_root(root);
  const int64_t num_full = std::min(most, tokens.size / block_size_);
  for (int64_t i = 0; e != kNoEntry && i < num_full; ++i) {
    e = index_.find(e, tokens.data + i * block_size_);
    if (e == kNoEntry) break;
    if (!index_[e].has_blocks() && !config_.window_tokens) break;
    found.push_back(e);
    present.push_back(index_[e].has_blocks());
  }
  if (config_.window_tokens)
    found.resize(static_cast<size_t>(window_hits(present, tokens.size).first));
  return found;
}

int64_t Pool::num_entries(const Session& session) const {
  return std::max(session.num_entries, div_ceil(session.num_tokens, block_size_));
}

int64_t Pool::held_by(const Sequence& sequence) const {
  return sequence.tier == kDevice ? sequence.table.size - sequence.num_trimmed : 0;
}

int64_t Pool::num_sequences_in(Tier tier) const {
  int64_t num = 0;
  for (const Session& session : sessions_)
    if (session.open)
      session.sequences.for_each(
          [&](int64_t, uint32_t index) { num += sequences_[index].tier == tier; });
  return num;
}

double Pool::oldest_release_s() const {
  double since_s = now_s_;
  for (const Session& session : sessions_)
    if (!session.releases.empty()) since_s = std::min(since_s, session.releases.front().since_s);
  return now_s_ - since_s;
}

// Rebuilding

EntryId Pool::restore(EntryId parent, const int32_t* tokens, const Hash& hash, Block b) {
  if (chained_hash(index_.hash(parent), tokens, static_cast<size_t>(block_size_) * 4) != hash)
    return kNoEntry;
  const EntryId e = index_.find_or_add(parent, tokens, hash);
  Entry& entry = index_[e];
  if (entry.has_blocks()) return kNoEntry;
  index_.set_block(e, kDevice, b);
  entry.published_s = entry.used_s = static_cast<float>(now_s_);
  stores_[kDevice].restored(b);
  return e;
}

// Integrity

void Pool::check() const {
  index_.check();
  for (const auto& blocks : stores_) blocks.check();
  retention_.check();
  auto require = [](bool ok, const std::string& what) {
    if (!ok) throw std::logic_error(what);
  };
  std::vector<uint32_t> refs[2], pins[2], pending[2];
  for (int t = 0; t < 2; ++t) {
    refs[t].resize(stores_[Tier(t + 1)].num_blocks);
    pins[t].resize(stores_[Tier(t + 1)].num_blocks);
    pending[t].resize(stores_[Tier(t + 1)].num_blocks);
  }
  std::unordered_map<uint32_t, uint32_t> table_owners, token_owners;
  std::vector<int64_t> held(held_.size());
  std::vector<uint8_t> is_counted(stores_[kDevice].num_blocks);
  size_t num_ghosts = 0;
  for (const Session& session : sessions_) {
    for (const Release& release : session.releases) {
      require(release.plan > session.done || !session.open || session.receipting.begun,
              "a release waits for a plan that has run");
      for (int t = 0; t < 2; ++t)
        for (const Block b : release.blocks[t]) ++pending[t][b];
    }
    if (!session.open && session.ending.empty() && session.plans.empty()) continue;
    check_session(session, table_owners, token_owners, refs);
    check_families(session);
    for (const Sequence* sequence : sequences_of(session.handle))
      for (const Block b : sequence->tier == kDevice ? table_of(*sequence) : std::vector<Block>{})
        if (b != kNoBlock && !std::exchange(is_counted[b], 1)) ++held[session.owner];
    auto check_record = [&](const PlanRecord& record) {
      for (const Transfer& transfer : record.transfers)
        if (transfer.pins) ++pins[transfer.source.tier - 1][transfer.source.block];
      for (const Demotion& demotion : record.demotions) ++refs[1][demotion.copy];
      for (const auto& [index, uid] : record.touched) {
        const Sequence& sequence = sequences_[index];
        if (sequence.uid != uid || sequence.live) continue;
        ++num_ghosts;
        for (const uint32_t chunk : sequence.tokens.chunks) token_owners[chunk] += 0;
      }
    };
    for (const PlanRecord& record : session.receipting.plans) check_record(record);
    for (const PlanRecord& record : session.plans) check_record(record);
    check_record(session.record);
    for (const auto& [tier, block] : session.kept) ++pins[tier - 1][block];
    const Swapping& swapping = session.swapping;
    for (size_t i = 0; i < swapping.copies.size(); ++i) {
      if (swapping.is_used[i]) continue;
      ++refs[swapping.destination - 1][swapping.copies[i]];
      held[session.owner] += swapping.destination == kDevice;
    }
  }
  for (int t = 0; t < 2; ++t)
    for (Block b = 0; b < stores_[Tier(t + 1)].num_blocks; ++b) {
      const std::string name = (t ? "host block " : "device block ") + std::to_string(b);
      require(stores_[Tier(t + 1)].ref_count(b) == refs[t][b], name + ": references differ");
      require(stores_[Tier(t + 1)].num_pins(b) == pins[t][b], name + ": pins differ");
      require(stores_[Tier(t + 1)].num_pending(b) == pending[t][b],
              name + ": pending releases differ");
    }
  require(held == held_, "blocks that owners hold are miscounted");
  for (const auto& [chunk, num] : table_owners)
    require(table_store_[chunk].num_owners == num, "owners of a chunk of a table differ");
  require(table_store_.num_used() == table_owners.size(), "chunks of tables are lost");
}

void Pool::check_session(const Session& session,
                         std::unordered_map<uint32_t, uint32_t>& table_owners,
                         std::unordered_map<uint32_t, uint32_t>& token_owners,
                         std::vector<uint32_t>* refs) const {
  int64_t num_held = 0, num_entries = 0, num_tokens = 0;
  for (const Sequence* sequence : sequences_of(session.handle)) {
    const std::string name = "sequence " + std::to_string(sequence->id);
    auto require = [&](bool ok, const char* what) {
      if (!ok) throw std::logic_error(name + ": " + what);
    };
    require(sequence->live && sequence->handle == session.handle, "is not live");
    const int64_t num_slots = sequence->table.size * block_size_;
    require(0 <= sequence->num_cached && sequence->num_cached <= sequence->num_scheduled &&
                0 <= sequence->num_written && sequence->num_written <= sequence->num_scheduled &&
                sequence->num_scheduled <= num_slots,
            "positions are out of order");
    require(sequence->num_published * block_size_ <= sequence->num_written ||
                !sequence->pending.empty(),
            "more is published than is written");
    num_entries += sequence->table.size;
    num_tokens += sequence->tokens.size;
    for (const uint32_t chunk : sequence->tokens.chunks) ++token_owners[chunk];
    std::vector<Block> table = table_of(*sequence);
    for (size_t p = 0; p < sequence->table.chunks.size(); ++p) {
      if (table_owners[sequence->table.chunks[p]]++) continue;
      for (size_t i = p * Table::kItems; i < std::min(table.size(), (p + 1) * Table::kItems); ++i) {
        if (table[i] == kNoBlock) continue;
        ++refs[sequence->tier - 1][table[i]];
        ++num_held;
      }
    }
    for (size_t i = 0; i < table.size(); ++i) {
      require((table[i] == kNoBlock) == (static_cast<int64_t>(i) < sequence->num_trimmed),
              "trimmed entries differ");
      if (table[i] == kNoBlock || sequence->tier != kDevice) continue;
      // A published block holds the tokens of the sequence, as far as it has them.
      const EntryId e = index_.entry_of(kDevice, table[i]);
      if (e == kNoEntry) continue;
      const int64_t begin = static_cast<int64_t>(i) * block_size_;
      const int64_t end =
          std::min({begin + block_size_, sequence->tokens.size, sequence->num_scheduled});
      require(end <= begin ||
                  sequence->tokens.equals(token_store_, begin, index_.tokens(e), end - begin),
              "a published block holds other tokens");
    }
    table.erase(std::remove(table.begin(), table.end(), kNoBlock), table.end());
    std::sort(table.begin(), table.end());
    require(std::adjacent_find(table.begin(), table.end()) == table.end(),
            "a block is twice in it");
  }
  if (num_held != session.num_held) throw std::logic_error("blocks held are miscounted");
  if (num_entries != session.num_entries) throw std::logic_error("table entries are miscounted");
  if (num_tokens != session.num_tokens) throw std::logic_error("tokens are miscounted");
}

}  // namespace kvplane::blocks
