#include "pool/layer_group.h"

#include <algorithm>

#include "eviction/factory.h"

namespace kvplane::blocks {

namespace {

// Blocks whose release takes as long as that of a sequence besides its blocks.
constexpr int64_t kSequenceBlocks = 16;

BlockStore make_store(PoolConfig& config, Tier tier, PrefixIndex& index) {
  const uint32_t num_blocks = config.num_blocks[tier - 1];
  return {tier, num_blocks, std::move(config.generations[tier - 1]), index,
          make_policy(config.eviction_policy, num_blocks)};
}

}  // namespace

LayerGroup::LayerGroup(PoolConfig config_given)
    : Shared(std::move(config_given)),
      index(config.block_size_tokens, config.num_blocks[0], config.num_blocks[1], config.seed),
      stores(make_store(config, kDevice, index), make_store(config, kHost, index)),
      retention(index, stores),
      feed(index, retention),
      announcements(index, stores[kDevice]),
      sessions(config.seed),
      tables(*this, stores, announcements),
      pins(*this, index, stores, sessions, tables),
      plans(*this, index, stores, retention, sequences, tables),
      publisher(*this, index, stores[kDevice], sessions, sequences, tables, announcements, plans),
      families(sequences),
      lifecycle(*this, stores, index, sequences, tables, plans, publisher, families),
      growth(*this, stores, sequences, tables, plans),
      swaps(*this, stores, sequences, tables, plans, publisher, families),
      admitter(*this, index, stores, sequences, tables, plans, growth, families, lifecycle),
      forgetter(*this, index, stores, retention, feed, sessions, sequences, tables, publisher) {
  for (BlockStore& blocks : stores)
    blocks.on_evict = [this, tier = blocks.tier](SessionHandle handle, Span<Block> evicted_blocks,
                                                 Eviction why) {
      evicted(tier, handle, evicted_blocks, why);
    };
}

void LayerGroup::set_time(double time_s) {
  now_s = time_s;
  retention.expire(now_s);
  pins.expire();
}

void LayerGroup::evicted(Tier tier, SessionHandle handle, Span<Block> blocks, Eviction why) {
  BlockTimes& times = block_times[tier - 1];
  times.num_evictions[static_cast<size_t>(why)] += blocks.size;
  counters.num_evictions += blocks.size;
  for (int64_t i = 0; i < blocks.size; ++i) {
    const Entry& entry = index[index.entry_of(tier, blocks[i])];
    times.lifetime.add(now_s - entry.published_s);
    times.idle.add(now_s - entry.used_s);
  }
  if (tier == kDevice) forgetter.evicted(blocks);
  // What a session takes back from itself is not saved: the host tier would be full of copies on
  // their way, and in `make run` no block could be swapped out (19 are).
  if (tier == kDevice && why != Eviction::kOwn && stores[kHost].num_blocks)
    for (int64_t i = 0; i < blocks.size; ++i) plans.save(sessions[handle], blocks[i]);
}

SessionHandle LayerGroup::open_session(std::string_view root, uint32_t owner) {
  Session& session = sessions.open(owner);
  tables.add_owner(owner);
  session.root = index.open_root(root);
  for (BlockStore& blocks : stores) blocks.open(session.handle);
  return session.handle;
}

void LayerGroup::end_session(SessionHandle handle) {
  Session& session = sessions[handle];
  plans.end_session(session);
  pins.end_all(session);
  session.sequences.for_each([&](int64_t id, uint32_t i) { session.ending.emplace_back(id, i); });
  session.families.clear();
  session.changed_families.clear();
  session.open = false;
  session.ended = true;
  index.close_root(session.root);
  session.root = kNoEntry;
}

bool LayerGroup::end_some(SessionHandle handle, int64_t max_blocks) {
  Session& session = sessions[handle];
  int64_t left = max_blocks;
  if (swaps.release_some(session, kEnded, left)) return true;
  session.swapping = Swapping{};
  // Freed sequences that receipts were to publish are forgotten too.
  if (plans.end_plans(session, kEnded, left)) return true;
  while (left > 0 && !session.ending.empty()) {
    const int64_t held_before = session.num_held;
    const auto [id, i] = session.ending.back();
    session.ending.pop_back();
    lifecycle.release(session, id, i);
    left -= kSequenceBlocks + held_before - session.num_held;
  }
  return !session.ending.empty();
}

void LayerGroup::session_fenced(SessionHandle handle) {
  tables.end_releases(sessions[handle]);
  for (BlockStore& blocks : stores) blocks.close(handle);
  sessions.close(sessions[handle]);
}

uint64_t LayerGroup::num_touched() const {
  return stores[kDevice].num_touched() + stores[kHost].num_touched() + index.num_touched();
}

int64_t LayerGroup::num_sequences_in(Tier tier) const {
  int64_t num = 0;
  for (const Session& session : sessions)
    if (session.open)
      session.sequences.for_each([&](int64_t, uint32_t i) { num += sequences[i].tier == tier; });
  return num;
}

double LayerGroup::oldest_release_s() const {
  double since_s = now_s;
  for (const Session& session : sessions)
    if (!session.releases.empty()) since_s = std::min(since_s, session.releases.front().since_s);
  return now_s - since_s;
}

EntryId LayerGroup::restore(EntryId parent, const int32_t* tokens, const Hash& hash, Block b) {
  if (chained_hash(index.hash(parent), tokens, config.block_size_tokens * size_t{4}) != hash)
    return kNoEntry;
  const EntryId e = index.find_or_add(parent, tokens, hash);
  Entry& entry = index[e];
  if (entry.has_blocks()) return kNoEntry;
  index.set_block(e, kDevice, b);
  entry.published_s = entry.used_s = static_cast<float>(now_s);
  stores[kDevice].restored(b);
  return e;
}

void LayerGroup::check() const {
  index.check();
  retention.check();
  feed.check();
  announcements.check();
  sessions.check();
  sequences.check(sessions);
  pins.check();
  BlockUses uses;
  for (const BlockStore& blocks : stores)
    for (auto* counts : {uses.refs, uses.pins, uses.pending})
      counts[blocks.tier - 1].resize(blocks.num_blocks);
  uses.held.resize(tables.num_owners());
  for (const Session& session : sessions) {
    plans.check(session, uses);
    swaps.check(session, uses);
    growth.check(session);
    publisher.check(session);
    families.check(session);
  }
  tables.check(sessions, sequences, uses);
  for (const BlockStore& blocks : stores) blocks.check(uses);
  forgetter.check();
}

}  // namespace kvplane::blocks
