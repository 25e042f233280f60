#include "core/prefix_index.h"

#include <cstring>
#include <stdexcept>

#include "core/hash.h"

namespace kvplane::blocks {

namespace {

constexpr size_t kMinHashes = 64;

size_t power_of_two_above(size_t n) {
  size_t size = kMinHashes;
  while (size < n) size *= 2;
  return size;
}

}  // namespace

PrefixIndex::PrefixIndex(uint32_t block_size_tokens, uint32_t num_device_blocks,
                         uint32_t num_host_blocks, uint64_t seed)
    : block_size_(block_size_tokens),
      seed_(seed),
      tokens_(block_size_tokens),
      entry_of_{std::vector<EntryId>(num_device_blocks, kNoEntry),
                std::vector<EntryId>(num_host_blocks, kNoEntry)},
      spare_links_(num_device_blocks),
      // Room for an entry a block, so that a pool does not stop to grow the table.
      hashes_(power_of_two_above(2 * (size_t(num_device_blocks) + num_host_blocks)), kNoEntry) {}

// Roots

EntryId PrefixIndex::open_root(std::string_view name) {
  const auto [it, is_new] = roots_.try_emplace(std::string(name), kNoEntry);
  if (is_new) {
    it->second = add(kNoEntry, nullptr, root_hash(name));
    root_names_[it->second] = &it->first;
  }
  ++root_users_[it->second];
  return it->second;
}

void PrefixIndex::close_root(EntryId root) {
  const auto it = root_users_.find(root);
  if (--it->second == 0) {
    root_users_.erase(it);
    prune(root);
  }
}

EntryId PrefixIndex::find_root(std::string_view name) const {
  const auto it = roots_.find(std::string(name));
  return it == roots_.end() ? kNoEntry : it->second;
}

EntryId PrefixIndex::root_of(EntryId e) const {
  while (!is_root(e)) e = entries_[e].parent;
  return e;
}

std::vector<EntryId> PrefixIndex::roots() const {
  std::vector<EntryId> roots;
  for (const auto& [name, root] : roots_) roots.push_back(root);
  return roots;
}

// Look-ups

EntryId PrefixIndex::find(EntryId parent, const int32_t* tokens) const {
  const EntryId first = entries_[parent].child;
  if (first == kNoEntry) return kNoEntry;
  const size_t num_bytes = block_size_ * sizeof(int32_t);
  if (std::memcmp(tokens_.row(first), tokens, num_bytes) == 0) return first;
  if (entries_[first].next == kNoEntry) return kNoEntry;
  const Hash hash = chained_hash(entries_[parent].hash, tokens, num_bytes);
  for (size_t i = place(hash); hashes_[i] != kNoEntry; i = (i + 1) & (hashes_.size() - 1)) {
    const EntryId e = hashes_[i];
    if (entries_[e].parent == parent && entries_[e].hash == hash &&
        std::memcmp(tokens_.row(e), tokens, num_bytes) == 0)
      return e;
  }
  return kNoEntry;
}

EntryId PrefixIndex::find_hash(const Hash& hash) const {
  for (size_t i = place(hash); hashes_[i] != kNoEntry; i = (i + 1) & (hashes_.size() - 1))
    if (entries_[hashes_[i]].hash == hash) return hashes_[i];
  return kNoEntry;
}

// Changes

EntryId PrefixIndex::find_or_add(EntryId parent, const int32_t* tokens) {
  const EntryId e = find(parent, tokens);
  if (e != kNoEntry) return e;
  return add(parent, tokens,
             chained_hash(entries_[parent].hash, tokens, block_size_ * sizeof(int32_t)));
}

bool PrefixIndex::set_block(EntryId e, Tier tier, Block b) {
  Entry& entry = entries_[e];
  entry_of_[tier - 1][b] = e;
  if (entry.block(tier) == kNoBlock) {
    entry.block(tier) = b;
    if (listener_) listener_->changed(Change::kStored, e, tier);
    return true;
  }
  List list{entry.spares, entry.spares, 0};
  spare_links_.push_front(list, b);
  entry.spares = list.head;
  return false;
}

Block PrefixIndex::clear_block(Tier tier, Block b) {
  const EntryId e = entry_of_[tier - 1][b];
  if (e == kNoEntry) return kNoBlock;
  entry_of_[tier - 1][b] = kNoEntry;
  Entry& entry = entries_[e];
  if (entry.block(tier) != b) {
    remove_spare(entry, b);
    return kNoBlock;
  }
  const Block spare = tier == kDevice ? entry.spares : kNoBlock;
  if (spare != kNoBlock) {
    remove_spare(entry, spare);
    entry.block(tier) = spare;
    return spare;
  }
  entry.block(tier) = kNoBlock;
  if (listener_) listener_->changed(Change::kRemoved, e, tier);
  prune(e);
  return kNoBlock;
}

void PrefixIndex::clear_entry(EntryId e) {
  Entry& entry = entries_[e];
  while (entry.spares != kNoBlock) {
    entry_of_[0][entry.spares] = kNoEntry;
    remove_spare(entry, entry.spares);
  }
  for (const Tier tier : {kDevice, kHost}) {
    if (entry.block(tier) == kNoBlock) continue;
    entry_of_[tier - 1][entry.block(tier)] = kNoEntry;
    entry.block(tier) = kNoBlock;
    if (listener_) listener_->changed(Change::kRemoved, e, tier);
  }
}

void PrefixIndex::set_leader(EntryId e, uint32_t leader, uint32_t uid) {
  entries_[e].leader = leader;
  entries_[e].leader_uid = uid;
}

void PrefixIndex::clear_leader(EntryId e, uint32_t leader, uint32_t uid) {
  Entry& entry = entries_[e];
  if (entry.leader != leader || entry.leader_uid != uid) return;
  entry.leader = kNoEntry;
  prune(e);
}

void PrefixIndex::prune(EntryId e) {
  while (true) {
    Entry& entry = entries_[e];
    if (entry.child != kNoEntry || entry.block(kDevice) != kNoBlock ||
        entry.block(kHost) != kNoBlock || entry.leader != kNoEntry)
      return;
    const EntryId parent = entry.parent;
    if (parent == kNoEntry) {
      if (root_users_.count(e)) return;
      const std::string* name = root_names_.at(e);
      root_names_.erase(e);
      roots_.erase(roots_.find(*name));
    } else {
      (entry.prev == kNoEntry ? entries_[parent].child : entries_[entry.prev].next) = entry.next;
      if (entry.next != kNoEntry) entries_[entry.next].prev = entry.prev;
      erase_hash(e);
    }
    ++entry.uid;
    free_.push_back(e);
    --num_entries_;
    if (parent == kNoEntry) return;
    e = parent;
  }
}

EntryId PrefixIndex::add(EntryId parent, const int32_t* tokens, const Hash& hash) {
  EntryId e;
  if (free_.empty()) {
    e = entries_.add();
    tokens_.add();
  } else {
    e = free_.back();
    free_.pop_back();
  }
  Entry& entry = entries_[e];
  const uint32_t uid = entry.uid;
  entry = Entry{};
  entry.uid = uid;
  entry.parent = parent;
  entry.hash = hash;
  ++num_entries_;
  if (parent == kNoEntry) return e;
  std::memcpy(tokens_.row(e), tokens, block_size_ * sizeof(int32_t));
  Entry& above = entries_[parent];
  entry.next = above.child;
  if (above.child != kNoEntry) entries_[above.child].prev = e;
  above.child = e;
  insert_hash(e);
  return e;
}

void PrefixIndex::remove_spare(Entry& entry, Block b) {
  List list{entry.spares, kEnd, 1};
  spare_links_.remove(list, b);
  entry.spares = list.head;
}

// The hash table: keys are entries, found by 64 bits of their hash. Deletion moves later keys of
// the run back (Knuth, The Art of Computer Programming, vol. 3, 6.4, algorithm R).

size_t PrefixIndex::place(const Hash& hash) const {
  uint64_t halves[2];
  std::memcpy(halves, hash.data(), sizeof halves);
  const uint64_t x = (halves[0] ^ seed_) * 0x9E3779B97F4A7C15u + halves[1];
  return (x ^ (x >> 32)) & (hashes_.size() - 1);
}

void PrefixIndex::insert_hash(EntryId e) {
  if (4 * (num_hashes_ + 1) > 3 * hashes_.size()) grow_hashes();
  size_t i = place(entries_[e].hash);
  while (hashes_[i] != kNoEntry) i = (i + 1) & (hashes_.size() - 1);
  hashes_[i] = e;
  ++num_hashes_;
}

void PrefixIndex::erase_hash(EntryId e) {
  const size_t mask = hashes_.size() - 1;
  size_t hole = place(entries_[e].hash);
  while (hashes_[hole] != e) hole = (hole + 1) & mask;
  for (size_t i = (hole + 1) & mask; hashes_[i] != kNoEntry; i = (i + 1) & mask) {
    const size_t home = place(entries_[hashes_[i]].hash);
    if (((i - home) & mask) >= ((i - hole) & mask)) {
      hashes_[hole] = hashes_[i];
      hole = i;
    }
  }
  hashes_[hole] = kNoEntry;
  --num_hashes_;
}

void PrefixIndex::grow_hashes() {
  std::vector<EntryId> old(hashes_.size() * 2, kNoEntry);
  old.swap(hashes_);
  num_hashes_ = 0;
  for (const EntryId e : old)
    if (e != kNoEntry) insert_hash(e);
}

void PrefixIndex::check() const {
  size_t num_found = 0;
  size_t num_blocks[2] = {0, 0};
  auto require = [](bool ok, const char* what) {
    if (!ok) throw std::logic_error(std::string("prefix index: ") + what);
  };
  for (const auto& [name, root] : roots_) {
    ++num_found;
    require(is_root(root) && root_name(root) == name, "a root has another name");
    require(entries_[root].child != kNoEntry || root_users_.count(root),
            "a root that nobody needs");
    walk(root, [&](EntryId e) {
      const Entry& entry = entries_[e];
      ++num_found;
      require(find(entry.parent, tokens_.row(e)) == e, "an entry cannot be found");
      require(entry.child != kNoEntry || entry.block(kDevice) != kNoBlock ||
                  entry.block(kHost) != kNoBlock || entry.leader != kNoEntry,
              "an entry that nothing needs");
      for (const Tier tier : {kDevice, kHost}) {
        if (entry.block(tier) == kNoBlock) continue;
        ++num_blocks[tier - 1];
        require(entry_of(tier, entry.block(tier)) == e, "a published block is another entry's");
      }
      require(entry.block(kDevice) != kNoBlock || entry.spares == kNoBlock,
              "a spare is left where no block is published");
      for (Block b = entry.spares; b != kNoBlock; b = next_spare(b)) {
        ++num_blocks[0];
        require(entry_of(kDevice, b) == e, "a spare is another entry's");
      }
    });
  }
  require(num_found == num_entries_, "entries are lost");
  require(num_hashes_ + roots_.size() == num_entries_, "the hash table differs");
  for (int t = 0; t < 2; ++t) {
    size_t num = 0;
    for (const EntryId e : entry_of_[t]) num += e != kNoEntry;
    require(num == num_blocks[t], "a block has an entry that does not know it");
  }
}

}  // namespace kvplane::blocks
