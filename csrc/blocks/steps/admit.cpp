#include "steps/admit.h"

#include <algorithm>
#include <cassert>
#include <unordered_set>

namespace kvplane::blocks {

Failure Admitter::check(const Session& session, const Admission& admission) const {
  const int64_t num_forks = admission.fork_ids.size;
  if (Failure failure = lifecycle_.check_new_id(session, admission.sequence_id, 1 + num_forks, 0);
      failure.code != Code::kOk)
    return failure;
  std::unordered_set<int64_t> ids{admission.sequence_id};
  for (int64_t i = 0; i < num_forks; ++i) {
    const int64_t id = admission.fork_ids[i];
    if (Failure failure = lifecycle_.check_new_id(session, id, 0, 1 + i); failure.code != Code::kOk)
      return failure;
    if (!ids.insert(id).second) return Failure{1 + i, Code::kExists, id};
  }
  const int64_t num_tokens = admission.tokens.size;
  if (any_negative(admission.tokens.data, num_tokens)) {
    int64_t i = 0;
    while (admission.tokens[i] >= 0) ++i;
    return Failure{0, Code::kNegative, 1, i};
  }
  const int64_t quota = shared_.config.max_owner_blocks;
  const int64_t most = div_ceil(std::max(num_tokens, admission.max_total_tokens), block_size_);
  if (most > stores_[kDevice].num_blocks && shared_.config.needs_all_blocks())
    return tables_.never_fits(kDevice, 0, most);
  if (quota && most > quota && shared_.config.needs_all_blocks())
    return Failure{0, Code::kNeverQuota, most, quota, kDevice};
  const int64_t num_more = (1 + num_forks) * div_ceil(num_tokens, block_size_);
  const int64_t num_now = lifecycle_.num_entries(session);
  if (num_now + num_more > shared_.config.max_table_entries)
    return Failure{0, Code::kTooManyEntries, shared_.config.max_table_entries, num_now, num_more};
  return Failure{0, Code::kOk};
}

void Admitter::find_hits(const Session& session, const Admission& admission, int64_t most,
                         std::vector<Hit>& hits) const {
  EntryId e = session.root;
  const int64_t num_full = std::min(most, admission.tokens.size / block_size_);
  for (int64_t i = 0; i < num_full; ++i) {
    e = index_.find(e, admission.tokens.data + i * block_size_);
    if (e == kNoEntry) break;
    if (hits.empty()) hits.reserve(static_cast<size_t>(num_full));
    const Entry& entry = index_[e];
    if (entry.block(kDevice) != kNoBlock) {
      stores_[kDevice].prefetch(entry.block(kDevice));
      hits.push_back({e, Hit::kShared, entry.block(kDevice), 0});
    } else if (entry.block(kHost) != kNoBlock) {
      hits.push_back({e, Hit::kHosted, entry.block(kHost), session.number});
    } else if (!find_led(session, e, i, hits)) {
      if (shared_.config.needs_all_blocks()) break;
      hits.push_back({e, Hit::kNone, kNoBlock, 0});
    }
  }
  // The last token is computed again, into a copy of its block, which must have been written before
  // this step's transfers run.
  if (!hits.empty() && static_cast<int64_t>(hits.size()) * block_size_ == admission.tokens.size &&
      hits.back().kind == Hit::kFollowed && hits.back().plan >= session.number)
    hits.pop_back();
  if (shared_.config.needs_all_blocks()) return;
  std::vector<uint8_t> present;
  for (const Hit& hit : hits) present.push_back(hit.kind != Hit::kNone);
  const auto [num, first] = needed_hits(present, admission.tokens.size);
  hits.resize(static_cast<size_t>(num));
  for (int64_t i = 0; i < first; ++i) {
    Hit& hit = hits[static_cast<size_t>(i)];
    hit = {hit.entry, Hit::kNone, kNoBlock, 0};
  }
}

// Adds the i-th block of a prompt if a sequence of the session fills it.
bool Admitter::find_led(const Session& session, EntryId e, int64_t i,
                        std::vector<Hit>& hits) const {
  const Entry& entry = index_[e];
  if (entry.producer == kNoEntry) return false;
  const Sequence& producer = sequences_[entry.producer];
  const int64_t end = (i + 1) * block_size_;
  if (producer.uid != entry.producer_uid || !producer.live || producer.handle != session.handle ||
      producer.tier != kDevice || producer.moved_by > session.done || i < producer.num_trimmed ||
      i >= producer.table.size || end > producer.num_scheduled)
    return false;
  int64_t plan = 0;
  if (end > producer.num_written)
    for (const auto& [number, stop] : producer.pending)
      if (stop >= end) {
        plan = number;
        break;
      }
  hits.push_back({e, Hit::kFollowed, producer.table.at(table_store_, i), plan});
  return true;
}

std::pair<int64_t, int64_t> Admitter::needed_hits(const std::vector<uint8_t>& present,
                                                  int64_t num_tokens) const {
  if (shared_.config.holds_states) {
    // The deepest checkpoint after which the last token is still to be computed.
    auto num = std::min(static_cast<int64_t>(present.size()), (num_tokens - 1) / block_size_);
    while (num > 0 && !present[static_cast<size_t>(num - 1)]) --num;
    return {num, std::max<int64_t>(0, num - 1)};
  }
  std::vector<int64_t> last_missing{-1};  // before each block
  for (size_t i = 0; i < present.size(); ++i)
    last_missing.push_back(present[i] ? last_missing.back() : static_cast<int64_t>(i));
  for (auto num = static_cast<int64_t>(present.size()); num > 0; --num) {
    const int64_t next = std::min(num * block_size_, num_tokens - 1);
    const int64_t first =
        std::max<int64_t>(0, next - shared_.config.window_tokens + 1) / block_size_;
    if (last_missing[static_cast<size_t>(num)] < std::min(first, num))
      return {num, std::min(first, num)};
  }
  return {0, 0};
}

void Admitter::count_needed(const Session& session, const Admission& admission, bool computes,
                            Plan& plan) const {
  const int64_t num_tokens = admission.tokens.size;
  const auto num_hits = static_cast<int64_t>(plan.hits.size());
  plan.cached = std::min(num_hits * block_size_, num_tokens - 1);
  const int64_t num_compute = admission.num_compute < 0
                                  ? num_tokens - plan.cached
                                  : std::min(num_tokens - plan.cached, admission.num_compute);
  plan.end = plan.cached + num_compute;
  plan.copies_last = computes && num_compute && num_hits * block_size_ == num_tokens &&
                     plan.hits.back().kind != Hit::kHosted;
  plan.checkpoint = 0;
  if (shared_.config.holds_states && computes && admission.checkpoint > plan.cached &&
      admission.checkpoint <= plan.end)
    plan.checkpoint = admission.checkpoint;
  const int64_t num_grown = std::max<int64_t>(0, div_ceil(plan.end, block_size_) - num_hits);
  plan.needed = shared_.config.holds_states ? plan.checkpoint > 0 : num_grown + plan.copies_last;
  stores_[kDevice].touched(plan.hits.size());
  for (const Hit& hit : plan.hits)
    plan.needed +=
        hit.kind == Hit::kHosted ||
        (hit.kind == Hit::kShared && stores_[kDevice].is_obtainable(hit.block, session.handle));
  if (plan.checkpoint && lacks_room(session, plan)) {
    plan.checkpoint = 0;
    --plan.needed;
  }
}

bool Admitter::lacks_room(const Session& session, const Plan& plan) const {
  return plan.needed > plan.available ||
         (shared_.config.max_owner_blocks && over_quota(session, plan).code != Code::kOk);
}

Failure Admitter::over_quota(const Session& session, const Plan& plan) const {
  const BlockStore& device = stores_[kDevice];
  const auto num_hits = static_cast<int64_t>(plan.hits.size());
  int64_t size = std::max(num_hits, div_ceil(plan.end, block_size_));  // of its table
  if (shared_.config.holds_states) size = num_hits + (plan.checkpoint > 0);
  int64_t more = size - num_hits;
  for (const Hit& hit : plan.hits) {
    size -= hit.kind == Hit::kNone;
    more +=
        hit.kind == Hit::kHosted || (hit.kind == Hit::kShared && device.ref_count(hit.block) == 0);
  }
  if (size > shared_.config.max_owner_blocks)
    return {0, Code::kNeverQuota, size, shared_.config.max_owner_blocks, kDevice};
  // The copy takes the place of the last hit.
  more += plan.copies_last && device.ref_count(plan.hits.back().block) > 0;
  const int64_t allowed = tables_.num_allowed(session);
  return more <= allowed
             ? Failure{0, Code::kOk}
             : Failure{0, Code::kLaterQuota, more, std::max<int64_t>(0, allowed), kDevice};
}

uint32_t Admitter::admit(Session& session, const Admission& admission, int64_t admitted_by,
                         bool computes, const Plan& plan) {
  const std::vector<Hit>& hits = plan.hits;
  const int64_t num_tokens = admission.tokens.size, cached = plan.cached, end = plan.end;
  assert(plan.needed <= plan.available && plan.cached < num_tokens);
  const uint32_t index = sequences_.add(session, admission.sequence_id, admitted_by, shared_.now_s);
  families_.join(session, index, ++session.last_family);
  Sequence& sequence = sequences_[index];
  take_tokens(sequence, admission.tokens, hits);
  session.num_tokens += num_tokens;
  use_hits(session, sequence, hits);
  sequence.num_cached = sequence.num_scheduled = cached;
  sequence.num_written = std::min(sequence.num_written, cached);
  if (sequence.num_published * block_size_ > cached) {  // the last block will be a copy
    --sequence.num_published;
    sequence.chain = index_[sequence.chain].parent;
    sequence.chain_uid = index_[sequence.chain].uid;
  }
  for (auto& [plan_number, stop] : sequence.pending) stop = std::min(stop, cached);
  for (const auto& [plan_number, stop] : sequence.pending)
    plans_.touch_plan(session, plan_number, index);
  // Before anything is evicted: the last hit may be of no block.
  if (!admission.skip_lookup && shares_unwritten_)
    set_producers(index, admission.tokens.data, hits.empty() ? session.root : hits.back().entry,
                  static_cast<int64_t>(hits.size()), num_tokens / block_size_);
  if (shared_.config.holds_states) {
    growth_.grow(session, index, 0, 0, plan.checkpoint);
    if (computes && end > cached) growth_.schedule(session, index, end - cached);
  } else if (computes) {
    growth_.grow(session, index, cached, end, end);
    if (end > cached) growth_.schedule(session, index, end - cached);
  } else {
    growth_.grow(session, index, cached, cached, end);
  }
  if (!admission.skip_lookup) {
    shared_.counters.num_lookup_tokens += num_tokens;
    shared_.counters.num_hit_tokens += cached;
  }
  return index;
}

// Takes the tokens; those of hits are shared with another sequence that has them, by chunks.
void Admitter::take_tokens(Sequence& sequence, Span<int32_t> tokens, const std::vector<Hit>& hits) {
  const size_t chunk_blocks = static_cast<size_t>(Tokens::kItems / block_size_);
  for (size_t i = chunk_blocks; i <= hits.size(); i += chunk_blocks) {
    const int32_t* const first = tokens.data + sequence.tokens.size;
    const EntryId last = hits[i - 1].entry;
    if (sequence.tokens.share_chunk(token_store_, chunk_hints_.find(last), first)) continue;
    sequence.tokens.append(token_store_, first, Tokens::kItems);
    chunk_hints_.set(last, sequence.tokens.chunks.back());
  }
  const int64_t num_taken = sequence.tokens.size;
  sequence.tokens.append(token_store_, tokens.data + num_taken, tokens.size - num_taken);
}

// Fills the table with the hits, and says by which plans they are written.
void Admitter::use_hits(Session& session, Sequence& sequence, const std::vector<Hit>& hits) {
  sequence.chain = session.root;
  sequence.chain_uid = index_[session.root].uid;
  BlockStore& device = stores_[kDevice];
  BlockStore& host = stores_[kHost];
  std::vector<Block> used[2], table;  // by tier
  for (const Hit& hit : hits) {
    if (hit.kind == Hit::kShared || hit.kind == Hit::kHosted)
      used[hit.kind == Hit::kHosted].push_back(hit.block);
    if (hit.kind == Hit::kShared || hit.kind == Hit::kFollowed) table.push_back(hit.block);
  }
  device.policy().use(used[0].data(), used[0].size());
  if (host.num_blocks) host.policy().use(used[1].data(), used[1].size());
  if (hits.empty()) return;
  tables_.share(session, kDevice, table);  // before anything is allocated, which could evict them
  table.clear();
  const auto num_hosted = static_cast<int64_t>(used[1].size());
  for (const Block b : used[1]) host.pin(b, session.handle, 0);
  scratch_.clear();
  if (num_hosted) tables_.allocate(session, kDevice, num_hosted, scratch_);
  std::vector<uint8_t> allocated;  // of the entries that are not trimmed
  int64_t plan = 0, position = 0, num_taken = 0;
  bool all_published = true;
  for (size_t i = 0; i < hits.size(); ++i) {
    const Hit& hit = hits[i];
    Entry& entry = index_[hit.entry];
    if (hit.kind == Hit::kShared || hit.kind == Hit::kHosted)
      shared_.block_times[hit.kind == Hit::kHosted].reuse_gap.add(shared_.now_s - entry.used_s);
    ++entry.num_uses;
    entry.used_s = static_cast<float>(shared_.now_s);
    Block b = hit.block;
    if (hit.kind == Hit::kFollowed) sequence.filled_by = std::max(sequence.filled_by, hit.plan);
    if (hit.kind == Hit::kHosted) {
      b = scratch_[static_cast<size_t>(num_taken++)];
      plans_.transfer(session, {kHost, hit.block, host.generation(hit.block)}, kDevice, b,
                      static_cast<uint32_t>(block_size_));
      sequence.copied_by = session.number;
      shared_.counters.num_host_hit_tokens += block_size_;
    }
    table.push_back(b);
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
  tables_.push(session, sequence, table);
  for (const Block b : used[1]) host.unpin(b);  // their transfers have pinned them
  tables_.set_entries(session, sequence,
                      sequence.num_trimmed ? ChangeKind::kReplace : ChangeKind::kSet,
                      sequence.num_trimmed, sequence.table.size, &allocated);
}

// Lets later sequences of the session share the prompt's blocks from `first` on before they are
// published. `last` is the entry before them.
void Admitter::set_producers(uint32_t index, const int32_t* tokens, EntryId last, int64_t first,
                             int64_t end) {
  EntryId e = last;
  Sequence& sequence = sequences_[index];
  sequence.first_produced = first;
  sequence.produced.reserve(static_cast<size_t>(std::max<int64_t>(0, end - first)));
  for (int64_t i = first; i < end; ++i) {
    e = index_.find(e, tokens + i * block_size_);
    if (e == kNoEntry) break;  // nor is anything below it
    if (index_[e].producer == kNoEntry) index_.set_producer(e, index, sequence.uid);
    sequence.produced.push_back(e);
  }
  const auto num_found = static_cast<int64_t>(sequence.produced.size());
  if (num_found) last = sequence.produced.back();
  index_.add_produced(last, tokens + (first + num_found) * block_size_, end - first - num_found,
                      index, sequence.uid, sequence.produced);
  const int64_t chunk_blocks = Tokens::kItems / block_size_;
  for (int64_t i = div_ceil(first + 1, chunk_blocks) * chunk_blocks; i <= end; i += chunk_blocks)
    chunk_hints_.set(sequence.produced[static_cast<size_t>(i - 1 - first)],
                     sequence.tokens.chunks[static_cast<size_t>(i / chunk_blocks - 1)]);
}

}  // namespace kvplane::blocks
