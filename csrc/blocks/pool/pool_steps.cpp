#include <algorithm>
#include <limits>
#include <utility>

#include "pool/pool.h"
#include "pool/prefix_search.h"
#include "pool/proportion.h"

namespace kvplane::blocks {

namespace {

// Does each item in all groups, or in none if one of them refuses it. `check(group, session, item)`
// returns a failure, `act(group, session, item, value)` changes.
template <typename Check, typename Act>
ItemResults for_items(Groups groups, SessionHandle handle, int64_t num, bool only_check,
                      const Check& check, const Act& act) {
  ItemResults results;
  results.values.resize(static_cast<size_t>(num));
  for (int64_t item = 0; item < num; ++item) {
    Failure failure{item, Code::kOk};
    for (int64_t g = 0; g < groups.size && failure.code == Code::kOk; ++g)
      failure = check(*groups[g], groups[g]->sessions[handle], item);
    if (failure.code != Code::kOk) {
      results.failures.push_back(failure);
      continue;
    }
    for (int64_t g = 0; g < groups.size && !only_check; ++g)
      act(*groups[g], groups[g]->sessions[handle], item, results.values[static_cast<size_t>(item)]);
  }
  return results;
}

// A failure of one group, its blocks counted as for all groups.
Failure in_proportion(Groups groups, const LayerGroup& group, Failure failure) {
  const Proportion proportion(groups, static_cast<Tier>(failure.c));
  failure.a = proportion.up(group, failure.a);
  failure.b = proportion.down(group, failure.b);
  return failure;
}

// An append in one group.
struct AppendHere {
  Growth* growth;
  const SequenceStore* sequences;
  Session* session;
  LayerGroup* group;
  int64_t max_tokens;  // of a sequence, for a quick answer
  Growth::Need need;
};

// Whether an item only writes slots of one block that the sequence may write as it is, in all
// groups.
bool fit_in_place(std::vector<AppendHere>& here, const AppendColumns& columns, int64_t item) {
  for (AppendHere& of : here) {
    const uint32_t* index = of.session->sequences.find(columns.sequence_ids[item]);
    if (!index) return false;
    of.need.index = *index;
    const Sequence& sequence = (*of.sequences)[*index];
    if (sequence.tokens.size + columns.num_tokens[item] > of.max_tokens ||
        !of.growth->is_in_place(*of.session, sequence, columns.first_positions[item],
                                columns.num_slots[item]))
      return false;
  }
  return true;
}

// Finds the longest prefix of at most `most` blocks for which every group has the needed blocks.
void find_agreed_hits(Groups groups, SessionHandle handle, const Admission& admission, int64_t most,
                      std::vector<Admitter::Plan>& plans) {
  if (admission.skip_lookup) return;
  for (int64_t num_agreed = 0; num_agreed < groups.size;) {
    num_agreed = 0;
    for (int64_t g = 0; g < groups.size; ++g) {
      std::vector<Admitter::Hit>& hits = plans[static_cast<size_t>(g)].hits;
      hits.clear();
      groups[g]->admitter.find_hits(groups[g]->sessions[handle], admission, most, hits);
      const auto num = static_cast<int64_t>(hits.size());
      num_agreed += num == most || groups.size == 1;
      most = num;
    }
  }
}

// The groups of a new sequence wait for the same receipts: a position counts as written when it is
// in all of them, as groups may have found its block in different states.
void agree(Groups groups, SessionHandle handle, int64_t id) {
  if (groups.size == 1) return;
  std::vector<Sequence*> found;
  std::vector<int64_t> plans;
  int64_t written = std::numeric_limits<int64_t>::max();
  for (int64_t g = 0; g < groups.size; ++g) {
    LayerGroup& group = *groups[g];
    found.push_back(&group.sequences[*group.sessions[handle].sequences.find(id)]);
    for (const auto& [plan, end] : found.back()->pending) plans.push_back(plan);
    written = std::min(written, found.back()->num_written);
  }
  std::sort(plans.begin(), plans.end());
  plans.erase(std::unique(plans.begin(), plans.end()), plans.end());
  std::vector<std::pair<int64_t, int64_t>> pending;
  int64_t last = written;
  for (const int64_t plan : plans) {
    int64_t end = std::numeric_limits<int64_t>::max();
    for (const Sequence* sequence : found) {
      int64_t here = sequence->num_written;
      for (const auto& [number, stop] : sequence->pending)
        if (number <= plan) here = std::max(here, stop);
      end = std::min(end, here);
    }
    if (end > last) pending.emplace_back(plan, last = end);
  }
  for (int64_t g = 0; g < groups.size; ++g) {
    Session& session = groups[g]->sessions[handle];
    found[static_cast<size_t>(g)]->num_written = written;
    found[static_cast<size_t>(g)]->pending = pending;
    for (const auto& [plan, end] : pending)
      groups[g]->plans.touch_plan(session, plan, *session.sequences.find(id));
  }
}

}  // namespace

std::variant<Admitted, Failure> Pool::admit(SessionHandle handle, const Admission& admission,
                                            bool only_check) {
  return admit_with(handle, admission, first().sessions[handle].number, true, only_check);
}

std::variant<Admitted, Failure> Pool::grant(SessionHandle handle, int64_t admitted_by,
                                            const Admission& admission) {
  // Its transfers and allocations go with the next plan, at the earliest this one.
  const InStep next(groups(), handle, first().sessions[handle].number + 1);
  return admit_with(handle, admission, admitted_by, false, false);
}

std::variant<Admitted, Failure> Pool::admit_with(SessionHandle handle, const Admission& admission,
                                                 int64_t admitted_by, bool computes,
                                                 bool only_check) {
  const Proportion proportion(groups(), kDevice);
  const int64_t block_size = first().config.block_size_tokens;
  bool needs_all_blocks = true;
  for (const LayerGroup* group : groups_) {
    needs_all_blocks = needs_all_blocks && group->config.needs_all_blocks();
    const Failure failure = group->admitter.check(group->sessions[handle], admission);
    if (failure.code != Code::kOk) return failure;
  }
  int64_t most_hits = admission.tokens.size / block_size;
  std::vector<Admitter::Plan> plans(groups_.size());
  while (true) {
    find_agreed_hits(groups(), handle, admission, most_hits, plans);
    Failure failure{0, Code::kOk, 0, std::numeric_limits<int64_t>::max(), kDevice};
    bool copies_last = false, lacks_copy = false;
    for (size_t g = 0; g < groups_.size(); ++g) {
      const LayerGroup& group = *groups_[g];
      const Session& session = group.sessions[handle];
      const BlockStore& device = group.stores[kDevice];
      Admitter::Plan& plan = plans[g];
      const bool holds_states = group.config.holds_states;
      const int64_t headroom = holds_states ? 0 : proportion.of_group(group, admission.headroom);
      plan.available = device.num_obtainable(handle) - headroom;
      group.admitter.count_needed(session, admission, computes, plan);
      if (holds_states) {
        lacks_copy = group.admitter.lacks_room(session, plan);
        continue;
      }
      if (group.config.max_owner_blocks)
        if (const Failure over = group.admitter.over_quota(session, plan); over.code != Code::kOk)
          return over.code == Code::kLaterQuota ? in_proportion(groups(), group, over) : over;
      if (plan.needed > plan.available) {
        if (plan.needed > device.num_blocks && !plan.copies_last)
          return group.tables.never_fits(kDevice, 0, plan.needed);
        const Failure here =
            group.tables.no_room(session, kDevice, 0, plan.needed, plan.available, headroom);
        if (failure.code != Code::kLater) failure.code = here.code;
        copies_last = copies_last || plan.copies_last;
      }
      failure.a = std::max(failure.a, proportion.up(group, plan.needed));
      failure.b = std::min(failure.b, proportion.down(group, std::max<int64_t>(0, plan.available)));
    }
    if (failure.code == Code::kOk && !lacks_copy) break;
    // If there is no room for the last block and its copy, it is computed again instead. If there is
    // none for the copy of a checkpoint, fewer blocks are a hit.
    if (failure.code != Code::kOk && (!copies_last || !needs_all_blocks)) return failure;
    most_hits = static_cast<int64_t>(plans[0].hits.size()) - 1;
  }
  const Admitter::Plan& plan = plans[0];
  if (only_check)
    return Admitted{
        plan.cached,
        std::max(static_cast<int64_t>(plan.hits.size()), div_ceil(plan.end, block_size)),
        plan.end - plan.cached};
  Admitted admitted;
  for (size_t g = 0; g < groups_.size(); ++g) {
    LayerGroup& group = *groups_[g];
    const uint32_t index =
        group.admitter.admit(group.sessions[handle], admission, admitted_by, computes, plans[g]);
    const Sequence& sequence = group.sequences[index];
    if (g == 0) admitted = {plan.cached, sequence.table.size, sequence.num_scheduled - plan.cached};
  }
  agree(groups(), handle, admission.sequence_id);
  for (LayerGroup* group : groups_) {
    Session& session = group->sessions[handle];
    const uint32_t index = *session.sequences.find(admission.sequence_id);
    for (int64_t i = 0; i < admission.fork_ids.size; ++i)
      group->lifecycle.fork(session, index, admission.fork_ids[i], admitted_by);
  }
  return admitted;
}

ItemResults Pool::append(SessionHandle handle, const AppendColumns& columns, bool only_check) {
  const int64_t num = columns.sequence_ids.size;
  ItemResults results;
  results.values.resize(static_cast<size_t>(num));
  const bool has_negatives = any_negative(columns.token_ids.data, columns.token_ids.size);
  const bool is_plain = !only_check && !has_negatives && columns.num_lookahead.size == 0 &&
                        columns.checkpoints.size == 0;
  std::vector<AppendHere> here;
  for (LayerGroup* group : groups_)
    here.push_back({&group->growth,
                    &group->sequences,
                    &group->sessions[handle],
                    group,
                    group->growth.max_tokens(),
                    {}});
  const int32_t* tokens = columns.token_ids.data;
  for (int64_t item = 0; item < num; tokens += columns.num_tokens[item], ++item) {
    const int64_t num_slots = columns.num_slots[item], num_given = columns.num_tokens[item];
    if (is_plain && num_slots > 0 && fit_in_place(here, columns, item)) {
      for (const AppendHere& of : here)
        of.growth->append_in_place(*of.session, of.need.index, tokens, num_given, num_slots);
      results.values[static_cast<size_t>(item)] =
          static_cast<int32_t>((*here[0].sequences)[here[0].need.index].table.size);
      continue;
    }
    Failure failure = check_checkpoint(columns, item);
    for (AppendHere& of : here) {
      if (failure.code != Code::kOk) break;
      failure = of.growth->check(*of.session, columns, item, tokens, of.need);
      if (is_later(failure.code)) failure = in_proportion(groups(), *of.group, failure);
    }
    if (failure.code != Code::kOk) {
      results.failures.push_back(failure);
      continue;
    }
    if (only_check) continue;
    for (const AppendHere& of : here) {
      const int64_t size = of.growth->append(*of.session, columns, item, tokens, of.need);
      if (&of == &here[0]) results.values[static_cast<size_t>(item)] = static_cast<int32_t>(size);
    }
  }
  return results;
}

// Whether an item's checkpoint is at the end of a block, in what its slots compute.
Failure Pool::check_checkpoint(const AppendColumns& columns, int64_t item) const {
  const int64_t checkpoint = columns.checkpoints.size ? columns.checkpoints[item] : 0;
  const int64_t begin = columns.first_positions[item], end = begin + columns.num_slots[item];
  const bool is_whole = checkpoint % int64_t{first().config.block_size_tokens} == 0;
  if (!checkpoint || (holds_states() && is_whole && begin < checkpoint && checkpoint <= end))
    return {item, Code::kOk};
  return {item, Code::kCheckpoint, columns.sequence_ids[item], begin, end};
}

std::vector<int32_t> Pool::growth(SessionHandle handle, const AppendColumns& columns) const {
  const Proportion proportion(groups(), kDevice);
  std::vector<int32_t> needed(static_cast<size_t>(columns.sequence_ids.size));
  for (const LayerGroup* group : groups_) {
    const std::vector<int32_t> here = group->growth.needs(group->sessions[handle], columns);
    for (size_t i = 0; i < needed.size(); ++i)
      needed[i] = std::max(needed[i], static_cast<int32_t>(proportion.up(*group, here[i])));
  }
  return needed;
}

ItemResults Pool::truncate(SessionHandle handle, Span<int64_t> ids, Span<int32_t> num_tokens,
                           bool only_check) {
  return for_items(
      groups(), handle, ids.size, only_check,
      [&](const LayerGroup& group, const Session& session, int64_t item) {
        return group.lifecycle.check_truncate(session, ids[item], num_tokens[item], item);
      },
      [&](LayerGroup& group, Session& session, int64_t item, int32_t& num_released) {
        const uint32_t index = *session.sequences.find(ids[item]);
        num_released +=
            static_cast<int32_t>(group.lifecycle.truncate(session, index, num_tokens[item]));
      });
}

ItemResults Pool::fork(SessionHandle handle, Span<int64_t> parents, Span<int64_t> ids,
                       bool only_check) {
  return for_items(
      groups(), handle, ids.size, only_check,
      [&](const LayerGroup& group, const Session& session, int64_t item) {
        return group.lifecycle.check_fork(session, parents[item], ids[item], item);
      },
      [&](LayerGroup& group, Session& session, int64_t item, int32_t& num_blocks) {
        const uint32_t parent = *session.sequences.find(parents[item]);
        if (&group == &first())
          num_blocks = static_cast<int32_t>(group.sequences[parent].table.size);
        group.lifecycle.fork(session, parent, ids[item], session.number);
      });
}

ItemResults Pool::free(SessionHandle handle, Span<int64_t> ids, bool only_check) {
  return for_items(
      groups(), handle, ids.size, only_check,
      [&](const LayerGroup& group, const Session& session, int64_t item) {
        return group.lifecycle.check_free(session, ids[item], item);
      },
      [&](LayerGroup& group, Session& session, int64_t item, int32_t& num_released) {
        const uint32_t index = *session.sequences.find(ids[item]);
        num_released += static_cast<int32_t>(group.lifecycle.end(session, index, session.number));
      });
}

Pinned Pool::pin(SessionHandle handle, const PinColumns& columns, bool only_check) {
  const Proportion proportion(groups(), kDevice);
  const int64_t block_size = first().config.block_size_tokens;
  Pinned pinned;
  pinned.items.values.resize(static_cast<size_t>(columns.pin_ids.size));
  const int32_t* next = columns.token_ids.data;
  for (int64_t item = 0; item < columns.pin_ids.size; next += columns.num_tokens[item], ++item) {
    const int64_t id = columns.pin_ids[item];
    const Span<int32_t> tokens{next, columns.num_tokens[item]};
    const Session& session = first().sessions[handle];
    Failure failure = first().pins.check_id(session, id, item);
    std::vector<std::vector<EntryId>> paths;
    if (failure.code == Code::kOk) {
      PrefixSearch search(groups(), first(), first().index.root_name(session.root), tokens, {},
                          false);
      search.search_some(std::numeric_limits<int64_t>::max());
      paths = search.found_in_groups();
    }
    for (size_t g = 0; g < paths.size() && failure.code == Code::kOk; ++g) {
      const LayerGroup& group = *groups_[g];
      const int64_t headroom = proportion.of_group(group, columns.headroom);
      failure = group.pins.check_room(group.sessions[handle], paths[g], headroom, item);
      if (is_later(failure.code)) failure = in_proportion(groups(), group, failure);
    }
    if (failure.code != Code::kOk) {
      pinned.items.failures.push_back(failure);
      continue;
    }
    const auto num = static_cast<int64_t>(paths[0].size());
    pinned.items.values[static_cast<size_t>(item)] = static_cast<int32_t>(num);
    for (size_t g = 0; g < paths.size() && !only_check; ++g) {
      LayerGroup& group = *groups_[g];
      group.counters.num_lookup_tokens += tokens.size;
      group.counters.num_hit_tokens += num * block_size;
      if (!num) continue;
      const Pin& pin = group.pins.pin(group.sessions[handle], id, paths[g], columns.expires_at_s);
      for (const PinnedBlock& each : pin.blocks) {
        const bool is_there = each.block != kNoBlock;
        pinned.groups.push_back(static_cast<uint8_t>(g));
        pinned.tiers.push_back(each.tier);
        pinned.indices.push_back(is_there ? static_cast<int32_t>(each.block) : -1);
        pinned.generations.push_back(is_there ? group.stores[each.tier].generation(each.block) : 0);
      }
    }
  }
  return pinned;
}

void Pool::unpin(SessionHandle handle, Span<int64_t> pin_ids) {
  for (LayerGroup* group : groups_)
    for (int64_t i = 0; i < pin_ids.size; ++i)
      group->pins.unpin(group->sessions[handle], pin_ids[i]);
}

Pool::Swapped Pool::swap(SessionHandle handle, Span<int64_t> ids, Tier destination,
                         int64_t headroom, int64_t max_blocks, bool only_check) {
  const Proportion proportion(groups(), destination);
  std::vector<Swapping> plans(groups_.size());
  int64_t num = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const LayerGroup& group = *groups_[g];
    plans[g].destination = destination;
    plans[g].headroom = proportion.of_group(group, headroom);
    Failure failure = group.swaps.begin(group.sessions[handle], ids, plans[g]);
    if (failure.code != Code::kOk) return failure;
    if (!only_check) continue;
    int64_t left = std::numeric_limits<int64_t>::max();
    group.swaps.note_some(plans[g], left);
    failure = check_room(group, handle, plans[g]);
    if (failure.code != Code::kOk) return failure;
    num += static_cast<int64_t>(plans[g].blocks.size());
  }
  if (only_check) return num;
  for (size_t g = 0; g < groups_.size(); ++g)
    groups_[g]->sessions[handle].swapping = std::move(plans[g]);
  return swap_some(handle, max_blocks);
}

// Others may have taken blocks, or referred to them, since the slice before: so room is checked
// again in each, for all groups before any of them allocates.
Pool::Swapped Pool::swap_some(SessionHandle handle, int64_t max_blocks) {
  int64_t left = max_blocks, num = 0;
  for (LayerGroup* group : groups_)
    if (group->swaps.note_some(group->sessions[handle].swapping, left)) return std::nullopt;
  Failure& refused = first().sessions[handle].swapping.refused;
  for (const LayerGroup* group : groups_)
    if (refused.code == Code::kOk)
      refused = check_room(*group, handle, group->sessions[handle].swapping);
  if (refused.code != Code::kOk) {
    for (LayerGroup* group : groups_)
      if (group->swaps.release_some(group->sessions[handle], 0, left)) return std::nullopt;
  } else {
    for (LayerGroup* group : groups_)
      if (group->swaps.allocate_some(group->sessions[handle], left)) return std::nullopt;
    for (LayerGroup* group : groups_)
      if (group->swaps.move_some(group->sessions[handle], left)) return std::nullopt;
  }
  const Failure failure = refused;
  for (LayerGroup* group : groups_) {
    num += static_cast<int64_t>(group->sessions[handle].swapping.blocks.size());
    group->sessions[handle].swapping = Swapping{};
  }
  if (failure.code != Code::kOk) return failure;
  return num;
}

Failure Pool::check_room(const LayerGroup& group, SessionHandle handle,
                         const Swapping& plan) const {
  const Failure failure = group.swaps.check_room(group.sessions[handle], plan);
  return is_later(failure.code) ? in_proportion(groups(), group, failure) : failure;
}

bool Pool::prepare(SessionHandle handle, int64_t max_blocks) {
  for (LayerGroup* group : groups_)
    if (group->plans.prepare(group->sessions[handle], max_blocks)) return true;
  return false;
}

bool Pool::finish(SessionHandle handle, std::string_view prefix,
                  const std::function<char*(size_t)>& make) {
  bool has_any = false;
  for (LayerGroup* group : groups_) {
    const BlockStore& device = group->stores[kDevice];
    group->counters.max_held =
        std::max<int64_t>(group->counters.max_held,
                          int64_t{device.num_in(State::kHeld)} + device.num_in(State::kPinned));
    has_any = has_any || !group->plans.is_empty(group->sessions[handle]);
  }
  if (!has_any) return false;
  Draft merged;
  const Session& first = this->first().sessions[handle];
  for (size_t g = 0; g < groups_.size(); ++g) {
    Session& session = groups_[g]->sessions[handle];
    groups_[g]->plans.complete(session);
    if (groups_.size() > 1) merged.add(session.draft, static_cast<uint8_t>(g));
  }
  const Draft& draft = groups_.size() > 1 ? merged : first.draft;
  const std::vector<uint8_t>& kinds = draft.changes.kinds;
  const bool keeps = std::count(kinds.begin(), kinds.end(), uint8_t(ChangeKind::kKeep)) > 0;
  draft.encode(prefix, first.number, first.last_plan, first.resync_due, keeps ? first.done : 0,
               make);
  for (LayerGroup* group : groups_) group->plans.end_step(group->sessions[handle]);
  return true;
}

}  // namespace kvplane::blocks
