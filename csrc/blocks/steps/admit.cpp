// Admission: the longest cached prefix, also in the host tier or being computed by a sequence of
// the same session, then blocks for the tokens that are computed now.
#include <algorithm>
#include <unordered_set>

#include "core/pool.h"

namespace kvplane::blocks {

// A leading full block of a prompt that need not be computed.
struct Pool::Hit {
  enum Kind : uint8_t {
    kShared,  // a published device block
    kHosted,  // in the host tier: copied to a new device block
    kLed,     // a block that a sequence of the session fills by plan `plan`; 0: it has
    kNone,    // no block: it lies behind the attention window
  };
  EntryId entry;
  Kind kind;
  Block block;
  int64_t plan;
};

std::variant<Admitted, Failure> Pool::admit(Slot slot, const Admission& admission) {
  Session& session = sessions_[slot];
  dry_.clear();
  return admit_with(session, admission, session.number, true);
}

std::variant<Admitted, Failure> Pool::grant(Slot slot, int64_t admitted_by,
                                            const Admission& admission) {
  Session& session = sessions_[slot];
  const int64_t number = session.number;
  session.number = number + 1;  // what it needs is done by the next plan, at the earliest this one
  auto result = admit_with(session, admission, admitted_by, false);
  session.number = number;
  return result;
}

std::variant<Admitted, Failure> Pool::admit_with(Session& session, const Admission& admission,
                                                 int64_t admitted_by, bool computes) {
  const int64_t num_forks = admission.fork_ids.size;
  if (Failure failure = check_new_id(session, admission.sequence_id, 1 + num_forks, 0);
      failure.code != Code::kOk)
    return failure;
  std::unordered_set<int64_t> ids{admission.sequence_id};
  for (int64_t i = 0; i < num_forks; ++i) {
    const int64_t id = admission.fork_ids[i];
    if (Failure failure = check_new_id(session, id, 0, 1 + i); failure.code != Code::kOk)
      return failure;
    if (!ids.insert(id).second) return Failure{1 + i, Code::kExists, id};
  }
  const int64_t num_tokens = admission.tokens.size;
  for (int64_t i = 0; i < num_tokens; ++i)
    if (admission.tokens[i] < 0) return Failure{0, Code::kNegative, 1, i};
  const int64_t num_device = store(kDevice).num_blocks;
  const int64_t quota = config_.max_owner_blocks;
  const int64_t most = div_ceil(std::max(num_tokens, admission.max_total_tokens), block_size_);
  if (most > num_device && !config_.window_tokens)
    return Failure{0, Code::kNever, most, num_device, kDevice};
  if (quota && most > quota && !config_.window_tokens)
    return Failure{0, Code::kNeverQuota, most, quota, kDevice};
  const int64_t num_entries = (1 + num_forks) * div_ceil(num_tokens, block_size_);
  if (session.num_entries + num_entries > config_.max_table_entries)
    return Failure{0, Code::kTooManyEntries, config_.max_table_entries, session.num_entries,
                   num_entries};

  std::vector<Hit> hits;
  if (!admission.skip_lookup) find_hits(session, admission, hits);
  const int64_t available = obtainable(session, kDevice) - admission.headroom;
  int64_t num_hits, cached, end, needed;
  while (true) {
    num_hits = static_cast<int64_t>(hits.size());
    cached = std::min(num_hits * block_size_, num_tokens - 1);
    const int64_t num_compute = admission.num_compute < 0
                                    ? num_tokens - cached
                                    : std::min(num_tokens - cached, admission.num_compute);
    end = cached + num_compute;
    needed = std::max<int64_t>(0, div_ceil(end, block_size_) - num_hits);
    const bool copies_last = computes && num_compute && num_hits * block_size_ == num_tokens &&
                             hits.back().kind != Hit::kHosted;
    needed += copies_last;
    for (const Hit& hit : hits)
      needed += hit.kind == Hit::kHosted ||
                (hit.kind == Hit::kShared && store(kDevice).is_obtainable(hit.block, session.slot));
    if (quota)
      if (const Failure failure = over_quota(session, hits, end, copies_last);
          failure.code != Code::kOk)
        return failure;
    if (needed <= available) break;
    if (needed > num_device && !copies_last)
      return Failure{0, Code::kNever, needed, num_device, kDevice};
    // Where there is no room for the last block and its copy, it is computed again instead.
    if (!copies_last || config_.window_tokens)
      return no_room(session, kDevice, 0, needed, available, admission.headroom);
    hits.pop_back();
  }
  if (dry_.on)
    return Admitted{cached, std::max(num_hits, div_ceil(end, block_size_)), end - cached};

  const uint32_t index = new_sequence(session, admission.sequence_id, admitted_by);
  Sequence& sequence = sequences_[index];
  sequence.tokens.append(token_store_, admission.tokens.data, num_tokens);
  use_hits(session, sequence, hits);
  sequence.num_cached = sequence.num_scheduled = cached;
  sequence.num_written = std::min(sequence.num_written, cached);
  if (sequence.num_published * block_size_ > cached) {  // the last block will be a copy
    --sequence.num_published;
    sequence.chain = index_[sequence.chain].parent;
    sequence.chain_uid = index_[sequence.chain].uid;
  }
  for (auto& [plan, stop] : sequence.pending) stop = std::min(stop, cached);
  for (const auto& [plan, stop] : sequence.pending) touch_plan(session, plan, index);
  if (!admission.skip_lookup)  // before anything is evicted: the last hit may be of no block
    set_leaders(index, admission.tokens.data, hits.empty() ? session.root : hits.back().entry,
                num_hits, num_tokens / block_size_);
  if (computes) {
    grow(session, index, cached, end, end);
    if (end > cached) schedule(session, index, end - cached);
  } else {
    grow(session, index, cached, cached, end);
  }
  if (!admission.skip_lookup) {
    counters_.num_lookup_tokens += num_tokens;
    counters_.num_hit_tokens += cached;
  }
  for (int64_t i = 0; i < num_forks; ++i)
    add_fork(session, index, admission.fork_ids[i], admitted_by);
  return Admitted{cached, sequence.table.size, sequence.num_scheduled - cached};
}

// Whether the owner would hold too many blocks with those of an admission of `end` slots.
Failure Pool::over_quota(const Session& session, const std::vector<Hit>& hits, int64_t end,
                         bool copies_last) const {
  const BlockStore& device = store(kDevice);
  const auto num_hits = static_cast<int64_t>(hits.size());
  int64_t size = std::max(num_hits, div_ceil(end, block_size_));  // of its table
  int64_t more = size - num_hits;
  for (const Hit& hit : hits) {
    size -= hit.kind == Hit::kNone;
    more +=
        hit.kind == Hit::kHosted || (hit.kind == Hit::kShared && device.ref_count(hit.block) == 0);
  }
  if (size > config_.max_owner_blocks)
    return {0, Code::kNeverQuota, size, config_.max_owner_blocks, kDevice};
  // The copy takes the place of the last hit.
  more += copies_last && device.ref_count(hits.back().block) > 0;
  const int64_t allowed = num_allowed(session);
  return more <= allowed
             ? Failure{0, Code::kOk}
             : Failure{0, Code::kLaterQuota, more, std::max<int64_t>(0, allowed), kDevice};
}

void Pool::find_hits(const Session& session, const Admission& admission,
                     std::vector<Hit>& hits) const {
  EntryId e = session.root;
  const int64_t num_full = admission.tokens.size / block_size_;
  for (int64_t i = 0; i < num_full; ++i) {
    e = index_.find(e, admission.tokens.data + i * block_size_);
    if (e == kNoEntry) break;
    const Entry& entry = index_[e];
    if (entry.block(kDevice) != kNoBlock) {
      hits.push_back({e, Hit::kShared, entry.block(kDevice), 0});
    } else if (entry.block(kHost) != kNoBlock) {
      hits.push_back({e, Hit::kHosted, entry.block(kHost), session.number});
    } else if (!find_led(session, e, i, hits)) {
      if (!config_.window_tokens) break;
      hits.push_back({e, Hit::kNone, kNoBlock, 0});
    }
  }
  // The last token is computed again, into a copy of its block, which must have been written before
  // this step's transfers run.
  if (!hits.empty() && static_cast<int64_t>(hits.size()) * block_size_ == admission.tokens.size &&
      hits.back().kind == Hit::kLed && hits.back().plan >= session.number)
    hits.pop_back();
  if (!config_.window_tokens) return;
  std::vector<uint8_t> present;
  for (const Hit& hit : hits) present.push_back(hit.kind != Hit::kNone);
  const auto [num, first] = window_hits(present, admission.tokens.size);
  hits.resize(static_cast<size_t>(num));
  for (int64_t i = 0; i < first; ++i) {
    Hit& hit = hits[static_cast<size_t>(i)];
    hit = {hit.entry, Hit::kNone, kNoBlock, 0};
  }
}

// Adds the i-th block of a prompt if a sequence of the session fills it.
bool Pool::find_led(const Session& session, EntryId e, int64_t i, std::vector<Hit>& hits) const {
  const Entry& entry = index_[e];
  if (entry.leader == kNoEntry) return false;
  const Sequence& leader = sequences_[entry.leader];
  const int64_t end = (i + 1) * block_size_;
  if (leader.uid != entry.leader_uid || !leader.live || leader.slot != session.slot ||
      leader.tier != kDevice || leader.moved_by > session.done || i < leader.num_trimmed ||
      i >= leader.table.size || end > leader.num_scheduled)
    return false;
  int64_t plan = 0;
  if (end > leader.num_written)
    for (const auto& [number, stop] : leader.pending)
      if (stop >= end) {
        plan = number;
        break;
      }
  hits.push_back({e, Hit::kLed, leader.table.at(table_store_, i), plan});
  return true;
}

// With an attention window: how many leading blocks of a prompt of num_tokens an admission can
// begin after, and the first of them that it needs, since positions before that are seen no more.
// `present`: which blocks there are.
std::pair<int64_t, int64_t> Pool::window_hits(const std::vector<uint8_t>& present,
                                              int64_t num_tokens) const {
  std::vector<int64_t> last_missing{-1};  // before each block
  for (size_t i = 0; i < present.size(); ++i)
    last_missing.push_back(present[i] ? last_missing.back() : static_cast<int64_t>(i));
  for (auto num = static_cast<int64_t>(present.size()); num > 0; --num) {
    const int64_t next = std::min(num * block_size_, num_tokens - 1);
    const int64_t first = std::max<int64_t>(0, next - config_.window_tokens + 1) / block_size_;
    if (last_missing[static_cast<size_t>(num)] < std::min(first, num))
      return {num, std::min(first, num)};
  }
  return {0, 0};
}

// Fills the table with the hits, and says by which plans they are written.
void Pool::use_hits(Session& session, Sequence& sequence, const std::vector<Hit>& hits) {
  sequence.chain = session.root;
  sequence.chain_uid = index_[session.root].uid;
  BlockStore& device = store(kDevice);
  BlockStore& host = store(kHost);
  std::vector<Block> used[2];  // by tier
  for (const Hit& hit : hits)
    if (hit.kind == Hit::kShared || hit.kind == Hit::kHosted)
      used[hit.kind == Hit::kHosted].push_back(hit.block);
  device.policy().use(used[0].data(), used[0].size());
  if (host.num_blocks) host.policy().use(used[1].data(), used[1].size());
  if (hits.empty()) return;
  for (const Hit& hit : hits)  // before anything is allocated, which could evict them
    if (hit.kind == Hit::kShared || hit.kind == Hit::kLed) share(session, kDevice, hit.block);
  const auto num_hosted = static_cast<int64_t>(used[1].size());
  for (const Block b : used[1]) host.pin(b, session.slot, 0);
  scratch_.clear();
  if (num_hosted) allocate(session, kDevice, num_hosted, scratch_);
  std::vector<uint8_t> allocated;  // of the entries that are not trimmed
  int64_t plan = 0, position = 0, num_taken = 0;
  bool all_published = true;
  float used_s = 0;  // of the hit before: those of one prompt were mostly used together
  size_t range = Durations::range_of(now_s_);
  for (size_t i = 0; i < hits.size(); ++i) {
    const Hit& hit = hits[i];
    Entry& entry = index_[hit.entry];
    if (hit.kind == Hit::kShared || hit.kind == Hit::kHosted) {
      if (entry.used_s != used_s) {
        used_s = entry.used_s;
        range = Durations::range_of(now_s_ - used_s);
      }
      block_times_[hit.kind == Hit::kHosted].reuse_gap.add(now_s_ - used_s, range);
    }
    ++entry.num_uses;
    entry.used_s = static_cast<float>(now_s_);
    Block b = hit.block;
    if (hit.kind == Hit::kLed) sequence.filled_by = std::max(sequence.filled_by, hit.plan);
    if (hit.kind == Hit::kHosted) {
      b = scratch_[static_cast<size_t>(num_taken++)];
      transfer(session, {kHost, hit.block, host.generation(hit.block)}, kDevice, b,
               static_cast<uint32_t>(block_size_));
      sequence.copied_by = session.number;
      counters_.num_host_hit_tokens += block_size_;
    }
    push_block(session, sequence, b);
    if (hit.kind == Hit::kNone)
      ++sequence.num_trimmed;
    else
      allocated.push_back(hit.kind == Hit::kHosted);
    all_published = all_published && (hit.kind == Hit::kShared || hit.kind == Hit::kNone);
    if (all_published) {
      ++sequence.num_published;
      sequence.chain = hit.entry;
      sequence.chain_uid = entry.uid;
    }
    position += block_size_;
    plan = std::max(plan, hit.plan);
    if (plan == 0) {
      sequence.num_written = position;
    } else if (!sequence.pending.empty() && sequence.pending.back().first == plan) {
      sequence.pending.back().second = position;
    } else {
      sequence.pending.emplace_back(plan, position);
    }
  }
  for (const Block b : used[1]) host.unpin(b);  // their transfers have pinned them
  set_entries(session, sequence, sequence.num_trimmed ? ChangeKind::kReplace : ChangeKind::kSet,
              sequence.num_trimmed, sequence.table.size, &allocated);
}

// Lets later sequences of the session share the prompt's blocks from `first` on before they are
// published. `e` is the entry before them.
void Pool::set_leaders(uint32_t index, const int32_t* tokens, EntryId e, int64_t first,
                       int64_t end) {
  Sequence& sequence = sequences_[index];
  sequence.first_led = first;
  for (int64_t i = first; i < end; ++i) {
    e = index_.find_or_add(e, tokens + i * block_size_);
    if (index_[e].leader == kNoEntry) index_.set_leader(e, index, sequence.uid);
    sequence.led.push_back(e);
  }
}

}  // namespace kvplane::blocks
