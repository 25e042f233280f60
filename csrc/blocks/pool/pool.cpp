#include "pool/pool.h"

#include <algorithm>
#include <utility>

#include "pool/proportion.h"

namespace kvplane::blocks {

namespace {

// Sequences that have nothing left to continue from in one group begin again in all.
void begin_abort(Groups groups, SessionHandle handle) {
  for (int64_t g = 0; g < groups.size; ++g) {
    const LayerGroup& group = *groups[g];
    if (!group.config.window_tokens) continue;  // nothing is lost
    for (const Sequence* sequence : group.sequences.of(group.sessions[handle])) {
      if (!group.lifecycle.is_lost(*sequence)) continue;
      for (int64_t other = 0; other < groups.size; ++other) {
        LayerGroup& there = *groups[other];
        const Session& session = there.sessions[handle];
        const uint32_t index = *session.sequences.find(sequence->id);
        there.lifecycle.begin_again(session, there.sequences[index]);
      }
    }
  }
  for (int64_t g = 0; g < groups.size; ++g)
    groups[g]->plans.begin_abort(groups[g]->sessions[handle]);
  Session& session = groups[0]->sessions[handle];
  std::vector<std::pair<uint32_t, int64_t>> order;  // as they lie in memory
  session.sequences.for_each([&](int64_t id, uint32_t index) { order.emplace_back(index, id); });
  std::sort(order.begin(), order.end());
  for (const auto& [index, id] : order) session.aborting.ids.push_back(id);
}

// The lowest and the highest number of any group, each counted as of all groups. Blocks of states,
// which nobody waits for, do not count.
template <typename F>
int64_t fewest(Groups groups, Tier tier, const F& num_in) {
  const Proportion proportion(groups, tier);
  int64_t num = proportion.smallest();
  for (int64_t g = 0; g < groups.size; ++g)
    if (!groups[g]->config.holds_states)
      num = std::min(num, proportion.down(*groups[g], num_in(*groups[g])));
  return num;
}
template <typename F>
int64_t most(Groups groups, Tier tier, const F& num_in) {
  const Proportion proportion(groups, tier);
  int64_t num = 0;
  for (int64_t g = 0; g < groups.size; ++g)
    if (!groups[g]->config.holds_states)
      num = std::max(num, proportion.up(*groups[g], num_in(*groups[g])));
  return num;
}

}  // namespace

// Sessions

SessionHandle Pool::open_session(std::string_view root, uint32_t owner) {
  SessionHandle handle = kNoSession;
  for (LayerGroup* group : groups_) handle = group->open_session(root, owner);  // the same in each
  return handle;
}

bool Pool::end_session(SessionHandle handle, int64_t max_blocks) {
  for (LayerGroup* group : groups_) group->end_session(handle);
  return end_some(handle, max_blocks);
}

bool Pool::end_some(SessionHandle handle, int64_t max_blocks) {
  bool some_left = false;
  for (LayerGroup* group : groups_) some_left = group->end_some(handle, max_blocks) || some_left;
  return some_left;
}

bool Pool::is_ending(SessionHandle handle) const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [&](const LayerGroup* group) { return group->is_ending(handle); });
}

void Pool::session_fenced(SessionHandle handle) {
  for (LayerGroup* group : groups_) group->session_fenced(handle);
}

void Pool::begin(SessionHandle handle, int64_t number) {
  for (LayerGroup* group : groups_) group->sessions[handle].number = number;
}

// Outside of a step

int64_t Pool::cut(SessionHandle handle, int64_t sequence_id) {
  int64_t num = 0;
  for (LayerGroup* group : groups_) {
    Session& session = group->sessions[handle];
    num += group->lifecycle.cut(session, *session.sequences.find(sequence_id));
  }
  return num;
}

void Pool::finish_sequence(SessionHandle handle, int64_t sequence_id) {
  for (LayerGroup* group : groups_) {
    Session& session = group->sessions[handle];
    group->lifecycle.finish(session, *session.sequences.find(sequence_id));
  }
}

bool Pool::reserve(SessionHandle handle, int64_t sequence_id, int64_t num_blocks) {
  for (const LayerGroup* group : groups_) {
    const Session& session = group->sessions[handle];
    const Sequence& sequence = *group->sequences.find(session, sequence_id);
    if (!group->growth.can_reserve(session, sequence, num_blocks)) return false;
  }
  // By the next plan, at the earliest.
  const InStep next(groups(), handle, first().sessions[handle].number + 1);
  for (LayerGroup* group : groups_) {
    Session& session = group->sessions[handle];
    group->growth.reserve(session, *session.sequences.find(sequence_id), num_blocks);
  }
  return true;
}

std::vector<Failure> Pool::deferred_tokens(SessionHandle handle, const DeferredColumns& columns) {
  for (LayerGroup* group : groups_) {
    const std::vector<Failure> failures = group->publisher.deferred_tokens(handle, columns);
    if (!failures.empty()) return failures;  // by the first group, or by none
  }
  return {};
}

bool Pool::receipted(SessionHandle handle, int64_t plan, int64_t max_blocks) {
  bool is_left = false;
  for (LayerGroup* group : groups_)
    is_left = group->publisher.receipted(handle, plan, max_blocks) || is_left;
  return is_left;
}

// Aborting plans that have not run, or may have run in part: each sequence is cut to its written
// tokens, by receipts. Transfers are undone: tables refer again to the sources, pinned for this, in
// place of the copies. Forks and frees stay. The data plane learns of the abort from the next plan,
// which says what all tables are; until that has run, blocks released here stay retired.
// `Lifecycle::cut_to_written` releases what tables lose, `PlanLog::end_plans` unpins the sources.
//
// Time is proportional to the sequences, the blocks that they lose and the tables that hold copies.
bool Pool::abort(SessionHandle handle, int64_t next_plan, bool keeps, int64_t max_blocks) {
  Aborting& aborting = first().sessions[handle].aborting;
  if (!aborting.begun) begin_abort(groups(), handle);
  int64_t left = max_blocks;
  for (LayerGroup* group : groups_)
    if (group->plans.note_origins(group->sessions[handle], left)) return true;
  while (aborting.next_id < aborting.ids.size()) {
    if (left <= 0) return true;
    const int64_t id = aborting.ids[aborting.next_id++];
    for (LayerGroup* group : groups_)
      left -= group->lifecycle.abort(group->sessions[handle], id, next_plan, keeps);
  }
  for (LayerGroup* group : groups_)
    if (group->plans.end_plans(group->sessions[handle], next_plan, left)) return true;
  for (LayerGroup* group : groups_) {
    Session& session = group->sessions[handle];
    session.resync_due = true;
    session.aborting = Aborting{};
  }
  return false;
}

// Prefixes

std::variant<Retained, Failure> Pool::retain(std::string_view root, uint32_t owner,
                                             Span<int32_t> tokens, uint8_t priority,
                                             double expires_at_s, int64_t most_blocks) {
  // In each group as far as it has the prefix; the owner's blocks are counted in each.
  std::vector<std::vector<EntryId>> paths;
  Retained result;
  for (const LayerGroup* group : groups_) {
    const bool holds_states = group->config.holds_states;
    paths.push_back(group->index.match(group->index.find_root(root), tokens, holds_states));
    if (paths.back().empty() || expires_at_s <= group->now_s) continue;
    const int64_t now = group->retention.num_entries(owner);
    const int64_t num_new = group->retention.num_new(owner, paths.back());
    if (num_new && now + num_new > most_blocks)
      return Failure{0, Code::kTooManyEntries, most_blocks, now, num_new};
    if (holds_states) continue;
    result.num_blocks = std::max(result.num_blocks, static_cast<int64_t>(paths.back().size()));
    result.num_new = std::max(result.num_new, num_new);
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    Retention& retention = groups_[g]->retention;
    if (paths[g].empty() || expires_at_s <= groups_[g]->now_s) continue;
    const auto num = static_cast<int64_t>(paths[g].size());
    retention.retain(owner, paths[g], priority, expires_at_s,
                     retention.key_of(paths[g].back(), num, tokens));
  }
  return result;
}

int64_t Pool::release_retained(std::string_view root, uint32_t owner, Span<int32_t> tokens) {
  int64_t num = 0;
  for (LayerGroup* group : groups_)
    num = std::max(num, group->retention.release(group->index.find_root(root), owner, tokens));
  return num;
}

Forgotten Pool::forget(std::string_view root_name, Span<int32_t> tokens, bool force,
                       int64_t most_counted) {
  if (tokens.size < first().config.block_size_tokens) return {};
  Forgotten all;
  std::vector<Forgotten> results;
  for (const LayerGroup* group : groups_) {
    const EntryId root = group->index.find_root(root_name);
    results.push_back(group->forgetter.count(root, tokens, most_counted));
    all.num_blocks += results.back().num_blocks;
    all.num_in_use += results.back().num_in_use;
  }
  if (all.num_in_use && !force) return {0, all.num_in_use};
  all.num_blocks = std::max(all.num_blocks, all.num_in_use);  // where not all were counted
  for (size_t g = 0; g < groups_.size(); ++g)
    if (const EntryId root = groups_[g]->index.find_root(root_name); root != kNoEntry)
      groups_[g]->forgetter.forget_prefix(root, tokens, results[g]);
  return all;
}

Forgotten Pool::forget_roots(const std::vector<std::string_view>& names, bool force) {
  std::vector<std::vector<EntryId>> roots;
  Forgotten all;
  for (const LayerGroup* group : groups_) {
    std::vector<EntryId>& found = roots.emplace_back();
    for (const std::string_view name : names)
      if (const EntryId root = group->index.find_root(name);
          root != kNoEntry && std::find(found.begin(), found.end(), root) == found.end())
        found.push_back(root);
    const Forgotten here = group->forgetter.count_roots(found);
    all.num_blocks += here.num_blocks;
    all.num_in_use += here.num_in_use;
  }
  if (all.num_in_use && !force) return {0, all.num_in_use};
  for (size_t g = 0; g < groups_.size(); ++g)
    for (const EntryId root : roots[g]) groups_[g]->forgetter.forget_root(root);
  return all;
}

// Numbers of blocks

int64_t Pool::num_blocks(Tier tier) const { return Proportion(groups(), tier).smallest(); }

int64_t Pool::num_obtainable(SessionHandle handle, Tier tier) const {
  return fewest(groups(), tier,
                [&](const LayerGroup& group) { return group.stores[tier].num_obtainable(handle); });
}

int64_t Pool::num_coming(SessionHandle handle, Tier tier) const {
  const int64_t num = fewest(groups(), tier, [&](const LayerGroup& group) {
    return group.stores[tier].num_obtainable(handle) + group.stores[tier].num_coming(handle);
  });
  return num - num_obtainable(handle, tier);
}

int64_t Pool::num_own_retired(SessionHandle handle, Tier tier) const {
  return most(groups(), tier,
              [&](const LayerGroup& group) { return group.stores[tier].num_own_retired(handle); });
}

int64_t Pool::num_in(Tier tier, State state) const {
  const auto here = [&](const LayerGroup& group) { return group.stores[tier].num_in(state); };
  const bool is_idle = state == State::kFree || state == State::kCached;
  return is_idle ? fewest(groups(), tier, here) : most(groups(), tier, here);
}

int64_t Pool::num_held(SessionHandle handle, const Sequence& sequence) const {
  return most(groups(), kDevice, [&](const LayerGroup& group) {
    const Sequence& here = *group.sequences.find(group.sessions[handle], sequence.id);
    return here.tier == kDevice ? here.table.size - here.num_trimmed : 0;
  });
}

int64_t Pool::num_held(SessionHandle handle, const std::vector<int64_t>& ids) const {
  int64_t num = 0;
  for (const int64_t id : ids)
    num += num_held(handle, *first().sequences.find(first().sessions[handle], id));
  if (num <= num_blocks(kDevice)) return num;
  return most(groups(), kDevice, [&](const LayerGroup& group) {
    std::vector<const Sequence*> sequences;
    for (const int64_t id : ids)
      sequences.push_back(group.sequences.find(group.sessions[handle], id));
    return group.tables.num_different(sequences);
  });
}

int64_t Pool::num_blocks_held(SessionHandle handle) const {
  return most(groups(), kDevice,
              [&](const LayerGroup& group) { return group.sessions[handle].num_held; });
}

}  // namespace kvplane::blocks
