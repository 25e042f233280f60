// Sequences: fork, truncate, free, swap, cut.
#include <algorithm>
#include <unordered_set>

#include "core/grouped_pool.h"

namespace kvplane::blocks {

uint32_t Pool::new_sequence(Session& session, int64_t id, int64_t admitted_by) {
  uint32_t index;
  if (free_sequences_.empty()) {
    index = sequences_.add();
  } else {
    index = free_sequences_.back();
    free_sequences_.pop_back();
  }
  Sequence& sequence = sequences_[index];
  const uint32_t uid = sequence.uid;
  sequence = Sequence{};
  sequence.uid = uid;
  sequence.id = id;
  sequence.handle = session.handle;
  sequence.admitted_by = admitted_by;
  sequence.progress_s = now_s_;
  sequence.live = true;
  session.sequences.insert(id, index);
  return index;
}

// The sequence is freed, and no receipt that is still to come concerns it.
void Pool::forget_sequence(uint32_t index) {
  Sequence& sequence = sequences_[index];
  sequence.tokens.cut(token_store_, 0);
  sequence.ghosts = {};
  sequence.pending = {};
  ++sequence.uid;
  free_sequences_.push_back(index);
}

Failure Pool::check_new_id(const Session& session, int64_t id, int64_t num_more,
                           int64_t item) const {
  if (id < 1) return {item, Code::kBadId, id};
  if (session.sequences.find(id)) return {item, Code::kExists, id};
  if (static_cast<int64_t>(session.sequences.size()) + num_more > config_.max_sequences)
    return {item, Code::kTooManySequences, config_.max_sequences};
  return {item, Code::kOk};
}

// Fork

ItemResults Pool::fork(Groups groups, SessionHandle handle, Span<int64_t> parents,
                       Span<int64_t> ids, bool only_check) {
  ItemResults results;
  results.values.resize(static_cast<size_t>(ids.size));
  for (int64_t item = 0; item < ids.size; ++item) {
    Failure failure{item, Code::kOk};
    for (int64_t g = 0; g < groups.size && failure.code == Code::kOk; ++g)
      failure = groups[g]->check_fork(groups[g]->sessions_[handle], parents[item], ids[item], item);
    if (failure.code != Code::kOk) {
      results.failures.push_back(failure);
      continue;
    }
    if (only_check) continue;
    for (int64_t g = 0; g < groups.size; ++g) {
      Pool& pool = *groups[g];
      Session& session = pool.sessions_[handle];
      const uint32_t parent = *session.sequences.find(parents[item]);
      results.values[static_cast<size_t>(item)] =
          static_cast<int32_t>(pool.sequences_[parent].table.size);
      pool.add_fork(session, parent, ids[item], session.number);
    }
  }
  return results;
}

Failure Pool::check_fork(const Session& session, int64_t parent_id, int64_t id,
                         int64_t item) const {
  const uint32_t* index = session.sequences.find(parent_id);
  if (!index) return {item, Code::kNotFound, parent_id};
  const Failure failure = check_new_id(session, id, 1, item);
  if (failure.code != Code::kOk) return failure;
  const Sequence& parent = sequences_[*index];
  if (parent.computed_by == session.number) return {item, Code::kBusy, parent_id};
  const int64_t num = num_entries(session);
  const int64_t more = std::max(parent.table.size, div_ceil(parent.tokens.size, block_size_));
  if (num + more > config_.max_table_entries)
    return {item, Code::kTooManyEntries, config_.max_table_entries, num, more};
  return {item, Code::kOk};
}

uint32_t Pool::add_fork(Session& session, uint32_t parent_index, int64_t id, int64_t admitted_by) {
  const uint32_t index = new_sequence(session, id, admitted_by);
  const Sequence& parent = sequences_[parent_index];
  Sequence& child = sequences_[index];
  child.tier = parent.tier;
  join_family(session, index, parent.family);
  child.table = parent.table;
  for (const uint32_t chunk : child.table.chunks) ++table_store_[chunk].num_owners;
  session.num_entries += child.table.size;
  note_change(session, child, 0);
  child.num_trimmed = parent.num_trimmed;
  child.tokens.share(token_store_, parent.tokens);
  session.num_tokens += child.tokens.size;
  child.num_cached = parent.num_cached;
  child.num_written = parent.num_written;
  child.num_scheduled = parent.num_scheduled;
  child.num_published = parent.num_published;
  child.chain = parent.chain;
  child.chain_uid = parent.chain_uid;
  child.private_from = parent.private_from;
  child.moved_by = parent.moved_by;
  child.copied_by = parent.copied_by;
  child.filled_by = std::max(parent.filled_by, parent.computed_by);
  child.table_sent = parent.table_sent;
  // Receipts of plans that the parent waits for count for the child too.
  child.pending = parent.pending;
  for (const auto& [plan, stop] : child.pending) touch_plan(session, plan, index);
  if (child.moved_by > session.done) touch_plan(session, child.moved_by, index);
  if (child.table_sent && !session.resync_due)
    session.draft.changes.fork(id, parent.id, child.table.size);
  return index;
}

// Free and cut

ItemResults Pool::free(Groups groups, SessionHandle handle, Span<int64_t> ids, bool only_check) {
  ItemResults results;
  results.values.resize(static_cast<size_t>(ids.size));
  for (int64_t item = 0; item < ids.size; ++item) {
    Failure failure{item, Code::kOk};
    for (int64_t g = 0; g < groups.size && failure.code == Code::kOk; ++g)
      failure = groups[g]->check_free(groups[g]->sessions_[handle], ids[item], item);
    if (failure.code != Code::kOk) {
      results.failures.push_back(failure);
      continue;
    }
    if (only_check) continue;
    for (int64_t g = 0; g < groups.size; ++g) {
      Pool& pool = *groups[g];
      Session& session = pool.sessions_[handle];
      results.values[static_cast<size_t>(item)] += static_cast<int32_t>(
          pool.drop(session, *session.sequences.find(ids[item]), session.number));
    }
  }
  return results;
}

Failure Pool::check_free(const Session& session, int64_t id, int64_t item) const {
  const uint32_t* index = session.sequences.find(id);
  if (!index) return {item, Code::kNotFound, id};
  if (sequences_[*index].computed_by == session.number) return {item, Code::kBusy, id};
  return {item, Code::kOk};
}

int64_t Pool::cut(SessionHandle handle, int64_t sequence_id) {
  Session& session = sessions_[handle];
  const uint32_t* index = session.sequences.find(sequence_id);
  // Plans in flight may still touch its blocks; one that is made later drops its table first.
  // Blocks of a draft, or that aborted plans may touch, wait until the next plan has run.
  const bool is_open = session.resync_due || !session.draft.empty();
  return drop(session, *index, is_open ? session.number + 1 : session.last_plan);
}

// Ends a live sequence. Blocks that later receipts say it wrote are published all the same, unless
// they have been allocated again.
int64_t Pool::drop(Session& session, uint32_t index, int64_t plan) {
  Sequence& sequence = sequences_[index];
  publish(session, index);  // tokens may have become known since the last receipt
  const int64_t complete = std::min(
      std::min(sequence.tokens.size, sequence.num_scheduled) / block_size_, sequence.private_from);
  // After an abort all pending ends are the draft's, whose plan has no span of it any more.
  const bool expects = !session.resync_due && plan > session.done && sequence.tier == kDevice &&
                       !sequence.pending.empty() && complete > sequence.num_published;
  clear_producers(sequence, index, sequence.num_published);
  BlockStore& blocks = stores_[sequence.tier];
  if (expects) {
    sequence.first_ghost = sequence.num_published;
    for (int64_t i = sequence.num_published; i < complete; ++i) {
      const Block b = sequence.table.at(table_store_, i);
      sequence.ghosts.emplace_back(b, b == kNoBlock ? 0 : blocks.generation(b));
    }
  }
  const int64_t num_released = cut_table(session, sequence, 0, plan);
  for (auto ghost = sequence.ghosts.rbegin(); ghost != sequence.ghosts.rend(); ++ghost)
    if (ghost->first != kNoBlock) blocks.keep(ghost->first);
  session.sequences.erase(sequence.id);
  leave_family(session, index);
  session.num_tokens -= sequence.tokens.size;
  sequence.live = false;
  if (sequence.table_sent && !session.resync_due) session.draft.changes.drop(sequence.id);
  if (!expects) forget_sequence(index);
  return num_released;
}

// Has no other sequence share the blocks from the from-th on before they are published.
void Pool::clear_producers(Sequence& sequence, uint32_t index, int64_t from) {
  auto& produced = sequence.produced;
  while (!produced.empty() &&
         sequence.first_produced + static_cast<int64_t>(produced.size()) > from) {
    index_.clear_producer(produced.back(), index, sequence.uid);  // tails first: each prunes itself
    produced.pop_back();
  }
}

// Truncate

// The fewest tokens that a trimmed sequence can be cut to: the next position sees no trimmed block.
int64_t Pool::fewest_tokens(const Sequence& sequence) const {
  return sequence.num_trimmed * block_size_ + config_.window_tokens - 1;
}

ItemResults Pool::truncate(Groups groups, SessionHandle handle, Span<int64_t> ids,
                           Span<int32_t> num_tokens, bool only_check) {
  ItemResults results;
  results.values.resize(static_cast<size_t>(ids.size));
  for (int64_t item = 0; item < ids.size; ++item) {
    const int64_t id = ids[item], num = num_tokens[item];
    Failure failure{item, Code::kOk};
    for (int64_t g = 0; g < groups.size && failure.code == Code::kOk; ++g)
      failure = groups[g]->check_truncate(groups[g]->sessions_[handle], id, num, item);
    if (failure.code != Code::kOk) {
      results.failures.push_back(failure);
      continue;
    }
    if (only_check) continue;
    for (int64_t g = 0; g < groups.size; ++g) {
      Pool& pool = *groups[g];
      Session& session = pool.sessions_[handle];
      results.values[static_cast<size_t>(item)] +=
          static_cast<int32_t>(pool.truncate_one(session, *session.sequences.find(id), num));
    }
  }
  return results;
}

Failure Pool::check_truncate(const Session& session, int64_t id, int64_t num, int64_t item) const {
  const uint32_t* index = session.sequences.find(id);
  if (!index) return {item, Code::kNotFound, id};
  const Sequence& sequence = sequences_[*index];
  if (num < 1) return {item, Code::kNegative, 3};
  if (sequence.computed_by == session.number) return {item, Code::kBusy, id};
  if (num > std::max(sequence.num_scheduled, sequence.tokens.size))
    return {item, Code::kTooLong, id, sequence.num_scheduled, num};
  if (sequence.num_trimmed && num < fewest_tokens(sequence))
    return {item, Code::kTrimmed, id, fewest_tokens(sequence), num};
  return {item, Code::kOk};
}

int64_t Pool::truncate_one(Session& session, uint32_t index, int64_t num) {
  Sequence& sequence = sequences_[index];
  const int64_t num_full = num / block_size_;
  publish(session, index);  // kept blocks that are complete
  clear_producers(sequence, index, num_full);
  const int64_t num_tokens = sequence.tokens.size;
  sequence.tokens.cut(token_store_, num);
  session.num_tokens -= num_tokens - sequence.tokens.size;
  sequence.num_scheduled = std::min(sequence.num_scheduled, num);
  sequence.num_written = std::min(sequence.num_written, num);
  sequence.num_cached = std::min(sequence.num_cached, num);
  for (auto& [plan, stop] : sequence.pending) stop = std::min(stop, num);
  if (sequence.num_published > num_full) {
    if (!index_.alive(sequence.chain, sequence.chain_uid)) {
      sequence.chain = session.root;
      sequence.chain_uid = index_[session.root].uid;
      sequence.num_published = 0;
    }
    for (; sequence.num_published > num_full; --sequence.num_published)
      sequence.chain = index_[sequence.chain].parent;
    sequence.chain_uid = index_[sequence.chain].uid;
  }
  const int64_t num_blocks = div_ceil(num, block_size_);
  if (num_blocks >= sequence.table.size) return 0;
  const int64_t num_released = cut_table(session, sequence, num_blocks, session.number);
  if (sequence.table_sent && !session.resync_due)
    session.draft.changes.cut(ChangeKind::kTruncate, sequence.id, num_blocks);
  return num_released;
}

// Swap

std::variant<int64_t, Failure> Pool::swap(Groups groups, SessionHandle handle, Span<int64_t> ids,
                                          Tier destination, int64_t headroom, int64_t max_blocks,
                                          bool only_check) {
  const Proportion proportion(groups, destination);
  std::vector<Swapping> plans(static_cast<size_t>(groups.size));
  int64_t num = 0;
  for (int64_t g = 0; g < groups.size; ++g) {
    const Pool& pool = *groups[g];
    Swapping& plan = plans[static_cast<size_t>(g)];
    plan.destination = destination;
    const Failure failure =
        pool.plan_swap(pool.sessions_[handle], ids, proportion.of_group(pool, headroom), plan);
    if (is_later(failure.code)) return in_proportion(groups, pool, failure);
    if (failure.code != Code::kOk) return failure;
    num += static_cast<int64_t>(plan.blocks.size());
  }
  if (only_check) return num;
  for (int64_t g = 0; g < groups.size; ++g)
    groups[g]->begin_swap(groups[g]->sessions_[handle], plans[static_cast<size_t>(g)]);
  swap_some(groups, handle, max_blocks);
  return num;
}

Failure Pool::plan_swap(const Session& session, Span<int64_t> ids, int64_t headroom,
                        Swapping& plan) const {
  const Tier destination = plan.destination, source = destination == kHost ? kDevice : kHost;
  std::unordered_set<int64_t> distinct;
  int64_t num_entries = 0;
  for (int64_t item = 0; item < ids.size; ++item) {
    const uint32_t* index = session.sequences.find(ids[item]);
    if (!distinct.insert(ids[item]).second)
      throw ColumnError("sequence_ids", item, "must differ from the ids before it");
    if (!index) return Failure{item, Code::kNotFound, ids[item]};
    const Sequence& sequence = sequences_[*index];
    // A block that this plan computes is written after this plan's transfers.
    if (std::max(sequence.computed_by, sequence.filled_by) == session.number)
      return Failure{item, Code::kBusy, ids[item]};
    if (sequence.tier != source) return Failure{item, Code::kSwapped, ids[item], sequence.tier};
    plan.indices.push_back(*index);
    num_entries += sequence.table.size - sequence.num_trimmed;
  }
  plan.places.reserve(static_cast<size_t>(num_entries));
  plan.blocks.reserve(static_cast<size_t>(std::min(num_entries, session.num_held)));
  IdMap shared;  // a block's key -> its place
  for (const uint32_t index : plan.indices) {
    const Sequence& sequence = sequences_[index];
    for (int64_t i = sequence.num_trimmed; i < sequence.table.size; ++i)
      add_to_swap(sequence, i, shared, plan);
  }
  const auto needed = static_cast<int64_t>(plan.blocks.size());
  if (needed > stores_[destination].num_blocks) return never_fits(destination, 0, needed);
  if (const int64_t quota = config_.max_owner_blocks; quota && destination == kDevice) {
    if (needed > quota) return Failure{0, Code::kNeverQuota, needed, quota, destination};
    if (const int64_t allowed = num_allowed(session); needed > allowed)
      return Failure{0, Code::kLaterQuota, needed, std::max<int64_t>(0, allowed), destination};
  }
  const int64_t available = num_obtainable(session.handle, destination) - headroom;
  if (needed > available) return no_room(session, destination, 0, needed, available, headroom);
  return Failure{0, Code::kOk};
}

// Notes entry `i` of a table that is swapped.
void Pool::add_to_swap(const Sequence& sequence, int64_t i, IdMap& shared, Swapping& plan) const {
  const auto& chunk = table_store_[sequence.table.chunks[static_cast<size_t>(i / Table::kItems)]];
  const Block b = chunk.items[i % Table::kItems];
  const bool is_ahead = i * block_size_ >= sequence.num_scheduled;
  const bool is_shared = chunk.num_owners > 1 || stores_[sequence.tier].ref_count(b) > 1;
  const auto place = static_cast<uint32_t>(plan.blocks.size());
  if (is_shared && !shared.insert(key_of(sequence.tier, b), place)) {
    plan.places.push_back(*shared.find(key_of(sequence.tier, b)));
    if (!is_ahead)
      plan.is_ahead[plan.places.back()] = false;  // one of the sequences has written it
    return;
  }
  plan.places.push_back(place);
  plan.blocks.push_back(b);
  plan.is_ahead.push_back(is_ahead);
}

// Allocates the blocks that a swap copies to.
void Pool::begin_swap(Session& session, Swapping& plan) {
  const size_t num = plan.blocks.size();
  for (const uint32_t index : plan.indices)
    claim_device(session, index, plan.destination == kDevice);
  plan.copies.reserve(num);
  obtain(session, plan.destination, static_cast<int64_t>(num), plan.copies);
  plan.is_used.resize(num);
  session.destinations.reserve(num);
  std::vector<Transfer>& transfers = session.record.transfers;
  if (const size_t wanted = transfers.size() + num; wanted > transfers.capacity())
    transfers.reserve(std::max(wanted, 2 * transfers.capacity()));
  (plan.destination == kHost ? counters_.num_swapped_out : counters_.num_swapped_in) += num;
  session.swapping = std::move(plan);
}

bool Pool::swap_some(Groups groups, SessionHandle handle, int64_t max_blocks) {
  for (int64_t g = 0; g < groups.size; ++g)
    if (groups[g]->swap_some(groups[g]->sessions_[handle], max_blocks)) return true;
  return false;
}

bool Pool::swap_some(Session& session, int64_t& left) {
  Swapping& plan = session.swapping;
  const Tier destination = plan.destination, source = destination == kHost ? kDevice : kHost;
  for (size_t& i = plan.next_block; i < plan.blocks.size(); ++i, --left) {
    if (left <= 0) return true;
    const Block old = plan.blocks[i], copy = plan.copies[i];
    if (session.resync_due) session.allocated.insert(key_of(destination, copy), 1);
    // This plan may allocate the old one, and copy its former contents to the host tier; but it may
    // allocate no block twice, even if it copies nothing to it.
    if (plan.is_ahead[i])
      session.destinations.insert(key_of(destination, copy), 1);
    else
      transfer(session, {source, old, stores_[source].generation(old)}, destination, copy,
               static_cast<uint32_t>(block_size_));
  }
  for (; plan.next_sequence < plan.indices.size(); ++plan.next_sequence) {
    if (left <= 0) return true;
    const uint32_t index = plan.indices[plan.next_sequence];
    left -= sequences_[index].table.size;
    move(session, index, plan);
  }
  plan = Swapping{};
  return false;
}

// Lets the sequence's table refer to the copies of its blocks.
void Pool::move(Session& session, uint32_t index, Swapping& plan) {
  Sequence& sequence = sequences_[index];
  clear_producers(sequence, index, 0);
  const int64_t size = sequence.table.size, num_trimmed = sequence.num_trimmed;
  cut_table(session, sequence, 0, session.number);
  sequence.tier = plan.destination;
  std::vector<Block> table(static_cast<size_t>(num_trimmed), kNoBlock);
  std::vector<uint8_t> allocated;
  while (static_cast<int64_t>(table.size()) < size) {
    const uint32_t place = plan.places[plan.next_place++];
    table.push_back(plan.copies[place]);
    const bool is_used = std::exchange(plan.is_used[place], true);
    if (is_used) stores_[plan.destination].share(&table.back(), 1);
    allocated.push_back(!is_used);
  }
  push_blocks(session, sequence, table);
  sequence.num_trimmed = num_trimmed;
  sequence.moved_by = session.number;
  sequence.progress_s = now_s_;
  sequence.num_published = 0;
  sequence.chain = session.root;
  sequence.chain_uid = index_[session.root].uid;
  touch(session, index);
  send_table(session, sequence, allocated);
}

// Ends a swap whose session ends.
void Pool::end_swap(Session& session) {
  const Swapping& plan = session.swapping;
  for (size_t i = plan.copies.size(); i-- > 0;)
    if (!plan.is_used[i]) release(session, plan.destination, &plan.copies[i], 1, kEnded);
  session.swapping = Swapping{};
}

// Sends the whole table, in place of the data plane's.
void Pool::send_table(Session& session, Sequence& sequence, const std::vector<uint8_t>& allocated) {
  if (sequence.table.size == 0 || session.resync_due) {
    sequence.table_sent = sequence.table_sent || sequence.table.size;
    return;
  }
  // Trimmed entries are left out in front.
  set_entries(session, sequence, ChangeKind::kReplace, sequence.num_trimmed, sequence.table.size,
              &allocated);
}

}  // namespace kvplane::blocks
