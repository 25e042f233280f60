#include "feeds/watch.h"

#include <algorithm>
#include <utility>

#include "core/require.h"

namespace kvplane::blocks {

namespace {

// Entries, of any root, that a part of a snapshot looks at.
constexpr EntryId kMaxScanned = 65536;

}  // namespace

void ChangeColumns::add(Change kind, Tier tier, const Hash& hash, const Hash& parent,
                        const int32_t* tokens, size_t block_size) {
  kinds.push_back(static_cast<uint8_t>(kind));
  tiers.push_back(tier);
  hashes.append(reinterpret_cast<const char*>(hash.data()), hash.size());
  parent_hashes.append(reinterpret_cast<const char*>(parent.data()), parent.size());
  if (kind == Change::kStored) token_ids.insert(token_ids.end(), tokens, tokens + block_size);
}

EntryId snapshot(const PrefixIndex& index, std::string_view root, EntryId cursor, size_t max_blocks,
                 ChangeColumns& columns) {
  const EntryId top = index.find_root(root);
  if (top == kNoEntry) return kNoEntry;
  for (EntryId num = 0; cursor < index.end(); ++cursor, ++num) {
    if (num == kMaxScanned || columns.kinds.size() >= max_blocks) return cursor;
    const Entry& entry = index[cursor];
    if (entry.root != top) continue;
    const Hash parent = entry.parent == top || cursor == top ? Hash{} : index.hash(entry.parent);
    for (const Tier tier : {kDevice, kHost})
      if (entry.block(tier) != kNoBlock)
        columns.add(Change::kStored, tier, index.hash(cursor), parent, index.tokens(cursor),
                    index.block_size());
  }
  return kNoEntry;
}

void ChangeLog::restart(size_t max_events, uint32_t block_size, int64_t revision) {
  *this = ChangeLog();
  max_events_ = max_events;
  start_ = revision_ = revision;
  block_size_ = block_size;
  tokens_ = Slab<int32_t, 0>(block_size);
}

// The number of the root's name. The root is nearly always that of the event before.
uint32_t ChangeLog::number_of_name(const PrefixIndex& index, EntryId root) {
  if (root == last_root_ && index[root].uid == last_root_uid_) return last_name_;
  const auto [it, is_new] = roots_.try_emplace(index.root_name(root), 0);
  if (is_new) {
    it->second = names_.take();
    names_[it->second] = {&it->first, 0};
  }
  last_root_ = root;
  last_root_uid_ = index[root].uid;
  return last_name_ = it->second;
}

void ChangeLog::add(int64_t revision, Change change, const PrefixIndex& index, EntryId e,
                    Tier tier) {
  const uint32_t name = number_of_name(index, index.root_of(e));
  ++names_[name].second;
  Event event{{}, {}, name, change, tier};
  if (change == Change::kCleared) {
    event.tier = Tier(0);
  } else {
    event.hash = index.hash(e);
  }
  if (change == Change::kStored && !index.is_root(index[e].parent))
    event.parent_hash = index.hash(index[e].parent);
  const size_t place = place_of(revision);
  if (place == events_.size()) {
    events_.emplace_back();
    tokens_.add();
  } else if (--names_[events_[place].root].second == 0) {
    const uint32_t root = events_[place].root;
    roots_.erase(*std::exchange(names_[root].first, nullptr));
    names_.give_back(root);
    if (root == last_name_) last_root_ = kNoEntry;
  }
  events_[place] = event;
  if (change == Change::kStored) {
    const int32_t* tokens = index.tokens(e);
    std::copy(tokens, tokens + index.block_size(), tokens_.row(static_cast<uint32_t>(place)));
  }
  revision_ = revision;
}

bool ChangeLog::since(int64_t revision, std::string_view root, size_t max_events,
                      ChangeColumns& columns) const {
  if (!is_on() || revision > revision_ ||
      revision < revision_ - static_cast<int64_t>(events_.size()))
    return false;
  columns.revision = revision_;
  const auto it = roots_.find(std::string(root));
  if (it == roots_.end()) return true;
  while (++revision <= revision_) {
    const size_t place = place_of(revision);
    const Event& event = events_[place];
    if (event.root != it->second) continue;
    if (columns.kinds.size() == max_events) {
      columns.revision = revision - 1;
      break;
    }
    columns.add(event.change, event.tier, event.hash, event.parent_hash,
                tokens_.row(static_cast<uint32_t>(place)), block_size_);
  }
  return true;
}

void ChangeLog::check(int64_t revision) const {
  if (!is_on()) return;
  const Require require("change log");
  require(revision_ == revision, "it lacks the last change");
  require(events_.size() == std::min(static_cast<size_t>(revision_ - start_), max_events_),
          "changes are lost");
  std::vector<size_t> num_of_name(names_.size());
  for (const Event& event : events_) ++num_of_name[event.root];
  for (const auto& [name, number] : roots_)
    require(names_[number].first == &name && names_[number].second == num_of_name[number] &&
                num_of_name[number],
            "events of a root are miscounted");
  require(names_.num_taken() == roots_.size(), "names are lost");
}

void ChangeFeed::check() const {
  log_.check(revision_);
  Require("change feed")(!log_.is_on() || !index_.names_former_roots(),
                         "it goes on while entries name former roots");
}

[[gnu::noinline]] void ChangeFeed::add(Change change, EntryId e, Tier tier) {
  if (!index_.is_named(index_.root_of(e))) return;  // it was said to be gone
  log_.add(++revision_, change, index_, e, tier);
}

}  // namespace kvplane::blocks
