#include "memory/retention.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "core/require.h"

namespace kvplane::blocks {

namespace {

// Entries whose retentions `expire` ends in one call, about.
constexpr int64_t kMaxExpired = 16384;

uint64_t first_bytes(const Hash& hash) {
  uint64_t key;
  std::memcpy(&key, hash.data(), sizeof key);
  return key;
}

}  // namespace

uint64_t Retention::key_of(EntryId e) const { return first_bytes(index_.hash(e)); }

int64_t Retention::num_new(uint32_t owner, const std::vector<EntryId>& path) const {
  return std::count_if(path.begin(), path.end(), [&](EntryId e) { return !counts_for(owner, e); });
}

void Retention::retain(uint32_t owner, const std::vector<EntryId>& path, uint8_t priority,
                       double expires_at_s, uint64_t key) {
  std::vector<uint32_t>& here = at_[path.back()];
  const auto same = std::find_if(here.begin(), here.end(), [&](uint32_t r) {
    const Record& record = records_[r];
    return record.owner == owner && record.priority == priority && record.key == key;
  });
  if (same != here.end()) {
    Record& record = records_[*same];
    by_expiry_.erase({record.expires_at_s, *same});
    record.expires_at_s = std::max(record.expires_at_s, expires_at_s);
    by_expiry_.insert({record.expires_at_s, *same});
  } else {
    const uint32_t r = records_.take();
    records_[r] = {owner, priority, path.back(), expires_at_s, key};
    here.push_back(r);
    by_expiry_.insert({expires_at_s, r});
    for (const EntryId e : path) add_count(e, owner, priority);
  }
  for (auto e = path.rbegin(); e != path.rend(); ++e) apply(*e);  // tails are evicted first
}

uint64_t Retention::key_of(EntryId e, int64_t num, Span<int32_t> tokens) const {
  const int64_t block_size = index_.block_size();
  Hash hash = index_.hash(e);
  for (int64_t i = num; i < tokens.size / block_size; ++i)
    hash = chained_hash(hash, tokens.data + i * block_size, static_cast<size_t>(block_size) * 4);
  return first_bytes(hash);
}

int64_t Retention::release(EntryId root, uint32_t owner, Span<int32_t> tokens) {
  if (root == kNoEntry) return 0;
  std::vector<EntryId> path;
  EntryId last = root;
  for (int64_t i = 0; i < tokens.size / index_.block_size(); ++i) {
    const EntryId e = index_.find(last, tokens.data + i * index_.block_size());
    if (e == kNoEntry) break;
    path.push_back(last = e);
  }
  const uint64_t key = key_of(last, static_cast<int64_t>(path.size()), tokens);
  const int64_t before = num_entries(owner);
  for (const EntryId e : path) {
    const auto it = at_.find(e);
    if (it == at_.end()) continue;
    const std::vector<uint32_t> here = it->second;
    for (const uint32_t r : here)
      if (records_[r].owner == owner && records_[r].key == key) end(r);
  }
  return before - num_entries(owner);
}

void Retention::end_below(EntryId top) {
  std::vector<EntryId> stack{top};
  std::vector<uint32_t> found;
  while (!stack.empty()) {
    const EntryId e = stack.back();
    stack.pop_back();
    if (!index_[e].retention) continue;  // nor is anything below it
    if (const auto it = at_.find(e); it != at_.end())
      found.insert(found.end(), it->second.begin(), it->second.end());
    for (EntryId c = index_[e].child; c != kNoEntry; c = index_[c].next) stack.push_back(c);
  }
  for (const uint32_t r : found) end(r);
}

void Retention::expire(double now_s) {
  int64_t num = 0;
  while (!by_expiry_.empty() && by_expiry_.begin()->first <= now_s && num < kMaxExpired)
    num += end(by_expiry_.begin()->second);
}

void Retention::changed(Change change, EntryId e, Tier tier) {
  const Entry& entry = index_[e];
  if (change == Change::kStored) stores_[tier].set_priority(entry.block(tier), priority(e));
  if (change == Change::kRemoved && !entry.has_blocks() && !entry.num_arriving) lost(e);
}

void Retention::lost(EntryId e) {
  const auto it = at_.find(e);
  if (it == at_.end()) return;
  const std::vector<uint32_t> here = std::move(it->second);
  at_.erase(it);
  EntryId tail = index_[e].parent;
  while (!index_.is_root(tail) && !index_[tail].has_blocks()) tail = index_[tail].parent;
  for (const uint32_t r : here) {
    Record& record = records_[r];
    drop_counts(record, tail);
    record.tail = tail;
    at_[tail].push_back(r);
    if (index_.is_root(tail)) {
      end(r);
      continue;
    }
    for (const uint32_t other : at_[tail]) {
      const Record& that = records_[other];
      if (other == r || that.owner != record.owner || that.priority != record.priority ||
          !is_cut(that))
        continue;
      end(that.expires_at_s < record.expires_at_s ? other : r);
      break;
    }
  }
}

int64_t Retention::end(uint32_t r) {
  Record& record = records_[r];
  assert(record.tail != kNoEntry);
  unlist(r);
  by_expiry_.erase({record.expires_at_s, r});
  const int64_t num = drop_counts(record, kNoEntry);
  record.tail = kNoEntry;
  records_.give_back(r);
  return 1 + num;
}

void Retention::unlist(uint32_t r) {
  const auto it = at_.find(records_[r].tail);
  std::vector<uint32_t>& here = it->second;
  here.erase(std::find(here.begin(), here.end(), r));
  if (here.empty()) at_.erase(it);
}

int64_t Retention::drop_counts(const Record& record, EntryId end) {
  int64_t num = 0;
  for (EntryId e = record.tail; e != end && !index_.is_root(e); e = index_[e].parent, ++num) {
    const uint8_t before = priority(e);
    drop_count(e, record.owner, record.priority);
    if (priority(e) != before) apply(e);
  }
  return num;
}

// Gives the entry's blocks its priority.
void Retention::apply(EntryId e) {
  for (BlockStore& blocks : stores_) {
    const Block b = index_[e].block(blocks.tier);
    if (b != kNoBlock) blocks.set_priority(b, priority(e));
  }
}

bool Retention::counts_for(uint32_t owner, EntryId e) const {
  for (uint32_t c = index_[e].retention; c; c = counts_[c - 1].next)
    if (counts_[c - 1].owner == owner) return true;
  return false;
}

void Retention::add_count(EntryId e, uint32_t owner, uint8_t priority) {
  num_entries_[owner] += !counts_for(owner, e);
  uint32_t* link = &index_[e].retention;
  while (*link && counts_[*link - 1].priority >= priority) {
    Count& count = counts_[*link - 1];
    if (count.owner == owner && count.priority == priority) {
      ++count.num;
      return;
    }
    link = &count.next;
  }
  const uint32_t c = counts_.take() + 1;
  counts_[c - 1] = {owner, 1, *link, priority};
  *link = c;
}

void Retention::drop_count(EntryId e, uint32_t owner, uint8_t priority) {
  uint32_t* link = &index_[e].retention;
  while (counts_[*link - 1].owner != owner || counts_[*link - 1].priority != priority)
    link = &counts_[*link - 1].next;
  const uint32_t c = *link;
  assert(c && counts_[c - 1].num > 0);
  if (--counts_[c - 1].num) return;
  *link = counts_[c - 1].next;
  counts_.give_back(c - 1);
  if (counts_for(owner, e)) return;
  const auto it = num_entries_.find(owner);
  if (--it->second == 0) num_entries_.erase(it);
}

void Retention::check() const {
  const Require require("retention");
  struct Wanted {
    uint32_t num = 0;
    uint8_t priority = 0;
  };
  std::unordered_map<EntryId, Wanted> wanted;
  size_t num_records = 0;
  for (const auto& [tail, here] : at_) {
    require(!here.empty() && (index_[tail].has_blocks() || index_[tail].num_arriving),
            "lies at an entry without blocks");
    for (const uint32_t r : here) {
      const Record& record = records_[r];
      ++num_records;
      require(record.tail == tail, "lies at another entry");
      require(by_expiry_.count({record.expires_at_s, r}) == 1, "never expires");
      for (EntryId e = tail; !index_.is_root(e); e = index_[e].parent) {
        Wanted& want = wanted[e];
        ++want.num;
        want.priority = std::max(want.priority, record.priority);
      }
    }
  }
  require(num_records == by_expiry_.size(), "what is gone expires");
  require(num_records == records_.num_taken(), "records are lost");
  size_t num_counts = 0;
  std::unordered_map<uint32_t, int64_t> owned;
  for (EntryId e = 0; e < index_.end(); ++e) {
    uint32_t num = 0, last = 101;
    std::set<uint32_t> owners;
    for (uint32_t c = index_[e].retention; c; c = counts_[c - 1].next) {
      const Count& count = counts_[c - 1];
      ++num_counts;
      num += count.num;
      require(count.num && count.priority <= last, "counts are out of order");
      last = count.priority;
      if (owners.insert(count.owner).second) ++owned[count.owner];
    }
    const auto it = wanted.find(e);
    require(num == (it == wanted.end() ? 0 : it->second.num), "an entry's count differs");
    require(!num || priority(e) == it->second.priority, "an entry's priority differs");
    for (const BlockStore& blocks : stores_) {
      const Block b = index_[e].block(blocks.tier);
      require(b == kNoBlock || blocks.priority(b) == priority(e), "a block's priority differs");
    }
  }
  require(num_counts == counts_.num_taken(), "counts are lost");
  require(owned == num_entries_, "owners' counts differ");
}

}  // namespace kvplane::blocks
