#include "steps/pins.h"

#include <cassert>

#include "core/require.h"

namespace kvplane::blocks {

Failure Pins::check_id(const Session& session, int64_t id, int64_t item) const {
  if (id < 1) return {item, Code::kBadId, id};
  if (session.pins.count(id)) return {item, Code::kExists, id};
  return {item, Code::kOk};
}

Failure Pins::check_room(const Session& session, const std::vector<EntryId>& entries,
                         int64_t headroom, int64_t item) const {
  const auto num = static_cast<int64_t>(entries.size());
  if (session.num_pinned + num > shared_.config.max_pinned_blocks)
    return {item, Code::kTooManyPinned, shared_.config.max_pinned_blocks, session.num_pinned, num};
  int64_t num_taken[2] = {0, 0}, num_held_first = 0;  // idle ones, by tier; by no table so far
  for (const EntryId e : entries) {
    if (!index_[e].has_blocks()) continue;
    const Tier tier = tier_of(e);
    const Block b = index_[e].block(tier);
    num_taken[tier - 1] += stores_[tier].is_obtainable(b, session.handle);
    num_held_first += tier == kDevice && stores_[tier].ref_count(b) == 0;
  }
  if (const int64_t allowed = tables_.num_allowed(session); num_held_first > allowed)
    return {item, Code::kLaterQuota, num_held_first, std::max<int64_t>(0, allowed), kDevice};
  for (const Tier tier : {kDevice, kHost}) {
    if (!num_taken[tier - 1]) continue;
    const int64_t kept = tier == kDevice ? headroom : 0;
    const int64_t available = stores_[tier].num_obtainable(session.handle) - kept;
    if (num_taken[tier - 1] > available)
      return tables_.no_room(session, tier, item, num_taken[tier - 1], available, kept);
  }
  return {item, Code::kOk};
}

const Pin& Pins::pin(Session& session, int64_t id, const std::vector<EntryId>& entries,
                     double expires_at_s) {
  Pin& pin = session.pins[id];
  assert(pin.blocks.empty() && !entries.empty());
  pin.expires_at_s = expires_at_s;
  pin.blocks.reserve(entries.size());
  std::vector<Block> used[2];  // by tier
  for (const EntryId e : entries) {
    Entry& entry = index_[e];
    const Tier tier = tier_of(e);
    const Block b = entry.block(tier);
    pin.blocks.push_back({e, entry.uid, tier, b});
    if (b == kNoBlock) continue;
    used[tier - 1].push_back(b);
    shared_.block_times[tier - 1].reuse_gap.add(shared_.now_s - entry.used_s);
    ++entry.num_uses;
    entry.used_s = static_cast<float>(shared_.now_s);
  }
  for (const Tier tier : {kDevice, kHost}) {
    const std::vector<Block>& blocks = used[tier - 1];
    stores_[tier].policy().use(blocks.data(), blocks.size());
    tables_.share(session, tier, blocks);
  }
  session.num_pinned += static_cast<int64_t>(entries.size());
  expiries_.insert({expires_at_s, session.handle, id});
  return pin;
}

void Pins::release(Session& session, int64_t id, const Pin& pin) {
  std::vector<Block> blocks[2];  // by tier, tails first
  for (auto it = pin.blocks.rbegin(); it != pin.blocks.rend(); ++it)
    if (it->block != kNoBlock) blocks[it->tier - 1].push_back(it->block);
  for (const Tier tier : {kDevice, kHost})
    tables_.release(session, tier, blocks[tier - 1].data(), blocks[tier - 1].size(), 0);
  session.num_pinned -= static_cast<int64_t>(pin.blocks.size());
  expiries_.erase({pin.expires_at_s, session.handle, id});
}

void Pins::unpin(Session& session, int64_t id) {
  const auto it = session.pins.find(id);
  if (it == session.pins.end()) return;
  release(session, id, it->second);
  session.pins.erase(it);
}

void Pins::end_all(Session& session) {
  for (const auto& [id, pin] : session.pins) release(session, id, pin);
  session.pins.clear();
}

void Pins::expire() {
  while (!expiries_.empty() && expiries_.begin()->at_s <= shared_.now_s)
    unpin(sessions_[expiries_.begin()->handle], expiries_.begin()->id);
}

void Pins::check() const {
  const Require require("pin");
  size_t num_pins = 0;
  for (const Session& session : sessions_) {
    int64_t num = 0;
    for (const auto& [id, pin] : session.pins) {
      require(session.open, "its session has ended", id);
      require(!pin.blocks.empty(), "it holds nothing", id);
      require(pin.expires_at_s > shared_.now_s, "its time is over", id);
      require(expiries_.count({pin.expires_at_s, session.handle, id}), "it never ends", id);
      num += static_cast<int64_t>(pin.blocks.size());
    }
    require(num == session.num_pinned, "pinned blocks are miscounted");
    num_pins += session.pins.size();
  }
  require(num_pins == expiries_.size(), "pins that have ended would end again");
}

}  // namespace kvplane::blocks
