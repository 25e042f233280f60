#include "steps/swap.h"

#include <algorithm>
#include <cassert>
#include <unordered_set>
#include <utility>

#include "core/require.h"

namespace kvplane::blocks {

namespace {

// Table entries that are noted in the time in which one block is allocated, or copied.
constexpr int64_t kNotedEntries = 4;

}  // namespace

Failure Swaps::begin(const Session& session, Span<int64_t> ids, Swapping& plan) const {
  const Tier source = plan.destination == kHost ? kDevice : kHost;
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
  return Failure{0, Code::kOk};
}

bool Swaps::note_some(Swapping& plan, int64_t& left) const {
  for (; plan.next_noted < plan.indices.size(); ++plan.next_noted, plan.next_entry = 0) {
    const Sequence& sequence = sequences_[plan.indices[plan.next_noted]];
    int64_t& i = plan.next_entry;
    for (i = std::max(i, sequence.num_trimmed); i < sequence.table.size;) {
      if (left <= 0) return true;
      const int64_t stop = std::min(i + kNotedEntries, sequence.table.size);
      while (i < stop) note_entry(sequence, i++, plan);
      --left;
    }
  }
  return false;
}

Failure Swaps::check_room(const Session& session, const Swapping& plan) const {
  const Tier destination = plan.destination;
  const auto needed = static_cast<int64_t>(plan.blocks.size());
  const auto held = static_cast<int64_t>(plan.copies.size());
  if (needed == held) return Failure{0, Code::kOk};
  if (needed > stores_[destination].num_blocks) return tables_.never_fits(destination, 0, needed);
  if (const int64_t quota = shared_.config.max_owner_blocks; quota && destination == kDevice) {
    if (needed > quota) return Failure{0, Code::kNeverQuota, needed, quota, destination};
    if (const int64_t allowed = held + tables_.num_allowed(session); needed > allowed)
      return Failure{0, Code::kLaterQuota, needed, std::max<int64_t>(0, allowed), destination};
  }
  // Once it has begun, others may take the headroom as ever.
  const int64_t headroom = held ? 0 : plan.headroom;
  const int64_t available = held + stores_[destination].num_obtainable(session.handle) - headroom;
  if (needed > available)
    return tables_.no_room(session, destination, 0, needed, available, headroom);
  return Failure{0, Code::kOk};
}

// Notes entry `i` of a table that is swapped.
void Swaps::note_entry(const Sequence& sequence, int64_t i, Swapping& plan) const {
  const auto& chunk = table_store_[sequence.table.chunks[static_cast<size_t>(i / Table::kItems)]];
  const Block b = chunk.items[i % Table::kItems];
  const bool is_ahead = i * block_size_ >= sequence.num_scheduled;
  const bool is_shared = chunk.num_owners > 1 || stores_[sequence.tier].ref_count(b) > 1;
  const auto place = static_cast<uint32_t>(plan.blocks.size());
  if (is_shared && !plan.shared.insert(key_of(sequence.tier, b), place)) {
    plan.places.push_back(*plan.shared.find(key_of(sequence.tier, b)));
    if (!is_ahead)
      plan.is_ahead[plan.places.back()] = false;  // one of the sequences has written it
    return;
  }
  plan.places.push_back(place);
  plan.blocks.push_back(b);
  plan.is_ahead.push_back(is_ahead);
}

bool Swaps::allocate_some(Session& session, int64_t& left) {
  Swapping& plan = session.swapping;
  const size_t num = plan.blocks.size();
  BlockStore& there = stores_[plan.destination];
  if (plan.copies.empty() && num) {
    plan.shared.clear();
    plan.copies.reserve(num);
    there.promise(session.handle, static_cast<int64_t>(num));
  }
  if (const auto num_missing = static_cast<int64_t>(num - plan.copies.size())) {
    const int64_t now = std::clamp<int64_t>(left, 0, num_missing);
    tables_.obtain(session, plan.destination, now, plan.copies);
    plan.is_used.resize(plan.copies.size());
    left -= now;
    if (now < num_missing) return true;
  }
  if (std::exchange(plan.has_all, true)) return false;
  for (const uint32_t index : plan.indices)
    families_.claim_device(session, index, plan.destination == kDevice);
  std::vector<Transfer>& transfers = session.record.transfers;
  if (const size_t wanted = transfers.size() + num; wanted > transfers.capacity())
    transfers.reserve(std::max(wanted, 2 * transfers.capacity()));
  (plan.destination == kHost ? shared_.counters.num_swapped_out
                             : shared_.counters.num_swapped_in) += static_cast<int64_t>(num);
  return false;
}

bool Swaps::move_some(Session& session, int64_t& left) {
  Swapping& plan = session.swapping;
  const Tier destination = plan.destination, source = destination == kHost ? kDevice : kHost;
  for (size_t& i = plan.next_block; i < plan.blocks.size(); ++i, --left) {
    if (left <= 0) return true;
    const Block old = plan.blocks[i], copy = plan.copies[i];
    if (session.resync_due) session.allocated.insert(destination, copy);
    // This plan may allocate the old one, and copy its former contents to the host tier; but it may
    // allocate no block twice, even if it copies nothing to it.
    if (plan.is_ahead[i])
      session.destinations.insert(destination, copy);
    else
      plans_.transfer(session, {source, old, stores_[source].generation(old)}, destination, copy,
                      static_cast<uint32_t>(block_size_));
  }
  for (; plan.next_sequence < plan.indices.size(); ++plan.next_sequence) {
    if (left <= 0) return true;
    const uint32_t index = plan.indices[plan.next_sequence];
    left -= sequences_[index].table.size;
    move(session, index, plan);
  }
  return false;
}

// Lets the sequence's table refer to the copies of its blocks.
void Swaps::move(Session& session, uint32_t index, Swapping& plan) {
  Sequence& sequence = sequences_[index];
  publisher_.clear_producers(sequence, index, 0);
  const int64_t size = sequence.table.size, num_trimmed = sequence.num_trimmed;
  tables_.cut(session, sequence, 0, session.number);
  sequence.tier = plan.destination;
  std::vector<Block> table(static_cast<size_t>(num_trimmed), kNoBlock);
  std::vector<uint8_t> allocated;
  while (static_cast<int64_t>(table.size()) < size) {
    assert(plan.next_place < plan.places.size());
    const uint32_t place = plan.places[plan.next_place++];
    table.push_back(plan.copies[place]);
    const bool is_used = std::exchange(plan.is_used[place], true);
    if (is_used) stores_[plan.destination].share(&table.back(), 1);
    allocated.push_back(!is_used);
  }
  tables_.push(session, sequence, table);
  sequence.num_trimmed = num_trimmed;
  sequence.moved_by = session.number;
  sequence.progress_s = shared_.now_s;
  publisher_.restart(session, sequence);
  plans_.touch(session, index);
  send_table(session, sequence, allocated);
}

bool Swaps::release_some(Session& session, int64_t plan_number, int64_t& left) {
  Swapping& plan = session.swapping;
  stores_[plan.destination].promise(session.handle, 0);
  for (; !plan.copies.empty(); plan.copies.pop_back(), plan.is_used.pop_back(), --left) {
    if (left <= 0) return true;
    if (!plan.is_used.back())
      tables_.release(session, plan.destination, &plan.copies.back(), 1, plan_number);
  }
  return false;
}

void Swaps::check(const Session& session, BlockUses& uses) const {
  const Swapping& swapping = session.swapping;
  const Require require("swap");
  const size_t num = swapping.blocks.size();
  require(swapping.is_ahead.size() == num && swapping.next_block <= num &&
              swapping.copies.size() <= num && swapping.is_used.size() == swapping.copies.size(),
          "its columns differ");
  for (size_t i = 0; i < swapping.indices.size(); ++i) {
    const Sequence& sequence = sequences_[swapping.indices[i]];
    require((sequence.tier == swapping.destination) == (i < swapping.next_sequence),
            "a table moves too early or too late", sequence.id);
  }
  for (size_t i = 0; i < swapping.copies.size(); ++i) {
    if (swapping.is_used[i]) continue;
    ++uses.refs[swapping.destination - 1][swapping.copies[i]];
    uses.held[session.owner] += swapping.destination == kDevice;
  }
}

// Sends the whole table, in place of the data plane's.
void Swaps::send_table(Session& session, Sequence& sequence,
                       const std::vector<uint8_t>& allocated) {
  if (sequence.table.size == 0 || session.resync_due) {
    sequence.table_sent = sequence.table_sent || sequence.table.size;
    return;
  }
  // Trimmed entries are left out in front.
  tables_.set_entries(session, sequence, ChangeKind::kReplace, sequence.num_trimmed,
                      sequence.table.size, &allocated);
}

}  // namespace kvplane::blocks
