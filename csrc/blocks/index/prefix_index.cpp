#include "index/prefix_index.h"

#include <algorithm>
#include <cstring>

#include "core/require.h"
#include "index/hash.h"

namespace kvplane::blocks {

namespace {

constexpr size_t kMinKeys = 64;
constexpr size_t kMaxDelayed = 32;
constexpr uint32_t kAhead = 8;  // how far entries are fetched from memory

size_t power_of_two_above(size_t n) {
  size_t size = kMinKeys;
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
      keys_(power_of_two_above(2 * (size_t(num_device_blocks) + num_host_blocks))) {
  delayed_.reserve(kMaxDelayed);
}

// Roots

EntryId PrefixIndex::open_root(std::string_view name) {
  const auto [it, is_new] = roots_.try_emplace(std::string(name), kNoEntry);
  if (is_new) {
    it->second = add_root(root_hash(name));
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

std::vector<EntryId> PrefixIndex::roots() const {
  std::vector<EntryId> roots;
  for (const auto& [name, root] : roots_) roots.push_back(root);
  return roots;
}

// Look-ups

// Compares one block's tokens: too few for a call of memcmp to pay.
bool PrefixIndex::has_tokens(EntryId e, const int32_t* tokens) const {
  const int32_t* own = tokens_.row(e);
  int32_t differs = 0;
  for (uint32_t i = 0; i < block_size_; ++i) differs |= own[i] ^ tokens[i];
  return differs == 0;
}

// Entries of a prompt mostly lie one after another: `next`, used after `e`, says which way. Returns
// the one that was fetched, or kNoEntry.
EntryId PrefixIndex::prefetch_after(EntryId e, EntryId next) const {
  const uint32_t step = next - e;
  if (step != 1 && step != uint32_t(-1)) return kNoEntry;
  const EntryId later = next + kAhead * step;
  if (later >= entries_.size()) return kNoEntry;
  __builtin_prefetch(&entries_[later], 1);
  return later;
}

EntryId PrefixIndex::find(EntryId parent, const int32_t* tokens) const {
  ++num_touched_;
  const EntryId first = entries_[parent].child;
  if (first == kNoEntry) return kNoEntry;
  if (const EntryId later = prefetch_after(parent, first); later != kNoEntry)
    __builtin_prefetch(tokens_.row(later));
  if (has_tokens(first, tokens)) return first;
  if (entries_[first].next == kNoEntry) return kNoEntry;
  return lookup(parent, tokens, chained_hash(hash(parent), tokens, block_size_ * sizeof(int32_t)));
}

EntryId PrefixIndex::find_hash(EntryId parent, const Hash& hash) const {
  return lookup(parent, nullptr, hash);
}

EntryId PrefixIndex::find_path(EntryId e, Span<int32_t> tokens, int64_t num) const {
  for (int64_t i = 0; i < num && e != kNoEntry; ++i) e = find(e, tokens.data + i * block_size_);
  return e;
}

std::vector<EntryId> PrefixIndex::match(EntryId e, Span<int32_t> tokens, bool may_lack) const {
  std::vector<EntryId> found;
  const int64_t num_full = tokens.size / block_size_;
  for (int64_t i = 0; e != kNoEntry && i < num_full; ++i) {
    e = find(e, tokens.data + i * block_size_);
    if (e == kNoEntry || (!may_lack && !entries_[e].has_blocks())) break;
    found.push_back(e);
  }
  while (!found.empty() && !entries_[found.back()].has_blocks()) found.pop_back();
  return found;
}

// Tokens are compared unless they are null.
EntryId PrefixIndex::lookup(EntryId parent, const int32_t* tokens, const Hash& hash) const {
  const EntryId first = entries_[parent].child;
  if (first == kNoEntry || entries_[first].next == kNoEntry) {
    const bool is_it =
        first != kNoEntry && this->hash(first) == hash && (!tokens || has_tokens(first, tokens));
    return is_it ? first : kNoEntry;
  }
  const uint32_t tag = tag_of(hash);
  do_delayed();
  const size_t mask = keys_.size() - 1;
  for (size_t i = tag & mask; keys_[i].entry != kNoEntry; i = (i + 1) & mask) {
    const EntryId e = keys_[i].entry;
    if (keys_[i].tag == tag && entries_[e].parent == parent && hashes_[e] == hash &&
        (!tokens || has_tokens(e, tokens)))
      return e;
  }
  return kNoEntry;
}

// Changes

EntryId PrefixIndex::find_or_add(EntryId parent, const int32_t* tokens) {
  const EntryId e = find(parent, tokens);
  return e != kNoEntry ? e : add(parent, tokens);
}

EntryId PrefixIndex::find_or_add(EntryId parent, const int32_t* tokens, const Hash& hash) {
  const EntryId e = lookup(parent, tokens, hash);
  return e != kNoEntry ? e : add(parent, tokens, &hash);
}

EntryId PrefixIndex::detach(EntryId top, bool moves_all) {
  if (is_root(top)) {
    const std::string* name = root_names_.at(top);
    const auto users = root_users_.find(top);
    if (users == root_users_.end()) {
      roots_.erase(roots_.find(*name));
    } else {
      const EntryId fresh = add_root(hashes_[top]);
      roots_.find(*name)->second = fresh;
      root_names_[fresh] = name;
      const uint32_t num_users = users->second;
      root_users_.erase(users);
      root_users_[fresh] = num_users;
    }
    root_names_[top] = nullptr;
    last_named_ = kNoEntry;
    return top;
  }
  hash(top);  // while its parent is known
  const EntryId root = add_root(Hash{});
  root_names_[root] = nullptr;
  Entry& entry = entries_[top];
  const EntryId above = entry.parent;
  unlink(entry);
  entry.parent = root;
  entry.next = entry.prev = kNoEntry;
  entries_[root].child = top;
  if (moves_all) walk(root, [&](EntryId e) { move(e, root); });
  prune(above);
  return root;
}

void PrefixIndex::move(EntryId e, EntryId root) {
  const uint32_t num = num_blocks_of(e);
  entries_[entries_[e].root].num_uses -= num;
  entries_[root].num_uses += num;
  entries_[e].root = root;
}

uint32_t PrefixIndex::num_blocks_of(EntryId e) const {
  const Entry& entry = entries_[e];
  uint32_t num = (entry.block(kDevice) != kNoBlock) + (entry.block(kHost) != kNoBlock);
  for (Block b = entry.spares; b != kNoBlock; b = next_spare(b)) ++num;
  return num;
}

void PrefixIndex::unlink(const Entry& entry) {
  (entry.prev == kNoEntry ? entries_[entry.parent].child : entries_[entry.prev].next) = entry.next;
  if (entry.next != kNoEntry) entries_[entry.next].prev = entry.prev;
}

bool PrefixIndex::set_block(EntryId e, Tier tier, Block b) {
  assert(entry_of_[tier - 1][b] == kNoEntry && !is_root(e));
  assert(tier == kDevice || entries_[e].block(tier) == kNoBlock);  // the host tier has no spares
  ++num_touched_;
  Entry& entry = entries_[e];
  entry_of_[tier - 1][b] = e;
  ++entries_[entry.root].num_uses;
  if (entry.block(tier) == kNoBlock) {
    entry.block(tier) = b;
    if (listener_) listener_->changed(Change::kStored, e, tier);
    return true;
  }
  List list{entry.spares, entry.spares, 0};
  spare_links_.push_front(list, b);
  ++num_spares_;
  entry.spares = list.head;
  return false;
}

Block PrefixIndex::clear_block(Tier tier, Block b) {
  const EntryId e = entry_of_[tier - 1][b];
  if (e == kNoEntry) return kNoBlock;
  ++num_touched_;
  entry_of_[tier - 1][b] = kNoEntry;
  Entry& entry = entries_[e];
  assert(entries_[entry.root].num_uses > 0);
  --entries_[entry.root].num_uses;
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

void PrefixIndex::set_producer(EntryId e, uint32_t producer, uint32_t uid) {
  entries_[e].producer = producer;
  entries_[e].producer_uid = uid;
}

void PrefixIndex::prune(EntryId e) {
  for (;; ++num_touched_) {
    Entry& entry = entries_[e];
    if (entry.child != kNoEntry || entry.block(kDevice) != kNoBlock ||
        entry.block(kHost) != kNoBlock || entry.producer != kNoEntry || entry.num_arriving)
      return;
    const EntryId parent = entry.parent;
    if (parent == kNoEntry) {
      if (root_users_.count(e)) return;
      const std::string* name = root_names_.at(e);
      root_names_.erase(e);
      last_named_ = kNoEntry;
      if (name) roots_.erase(roots_.find(*name));
    } else {
      unlink(entry);
      if (entry.has_key) delay({e, tag_of(hashes_[e])}, false);
    }
    ++entry.uid;
    free_.push_back(e);
    --num_entries_;
    if (parent == kNoEntry) return;
    e = parent;
  }
}

EntryId PrefixIndex::add_root(const Hash& hash) {
  const EntryId e = new_entry();
  entries_[e].root = e;
  set_hash(e, hash);
  return e;
}

EntryId PrefixIndex::add(EntryId parent, const int32_t* tokens, const Hash* hash) {
  const EntryId e = new_entry();
  if (hash) set_hash(e, *hash);
  Entry& entry = entries_[e];
  entry.parent = parent;
  put_tokens(e, tokens);
  Entry& above = entries_[parent];
  entry.root = above.root;
  entry.next = above.child;
  if (above.child != kNoEntry) {
    entries_[above.child].prev = e;
    for (const EntryId sibling : {above.child, e}) add_key(sibling);
  }
  above.child = e;
  return e;
}

void PrefixIndex::add_produced(EntryId parent, const int32_t* tokens, int64_t num,
                               uint32_t producer, uint32_t uid, std::vector<EntryId>& added) {
  for (int64_t i = 0; i < num; ++i, tokens += block_size_) {
    if (i == 0) {
      parent = add(parent, tokens);
    } else {  // as `add` does, for entries without siblings
      const EntryId e = new_entry();
      put_tokens(e, tokens);
      Entry& above = entries_[parent];
      above.child = e;
      entries_[e].parent = parent;
      entries_[e].root = above.root;
      parent = e;
    }
    set_producer(parent, producer, uid);
    added.push_back(parent);
  }
}

// A new entry, empty.
EntryId PrefixIndex::new_entry() {
  EntryId e;
  if (free_.empty()) {
    e = entries_.add();
    tokens_.add();
    hashes_.add();
  } else {
    e = free_.back();
    free_.pop_back();
    if (free_.size() >= kAhead) {
      const EntryId later = free_[free_.size() - kAhead];
      __builtin_prefetch(&entries_[later], 1);
      __builtin_prefetch(tokens_.row(later), 1);
    }
  }
  Entry& entry = entries_[e];
  const uint32_t uid = entry.uid;
  ++num_touched_;
  entry = Entry{};
  entry.uid = uid;
  ++num_entries_;
  return e;
}

void PrefixIndex::set_hash(EntryId e, const Hash& hash) {
  hashes_[e] = hash;
  entries_[e].has_hash = 1;
}

// Computes the hashes of the entry and of those before it that have none.
void PrefixIndex::compute_hash(EntryId e) const {
  // The index's contents do not change.
  auto* self = const_cast<PrefixIndex*>(this);
  const auto follow = [&](EntryId parent, EntryId child) {
    const size_t num_bytes = block_size_ * sizeof(int32_t);
    ++num_touched_;
    self->set_hash(child, chained_hash(hashes_[parent], tokens_.row(child), num_bytes));
  };
  // The hashes of a prompt are mostly asked for from its beginning on.
  EntryId parent = entries_[e].parent;
  if (entries_[parent].has_hash) return follow(parent, e);
  std::vector<EntryId> path{e};  // to it, from behind the last one that has its hash
  for (; !entries_[parent].has_hash; parent = entries_[parent].parent) path.push_back(parent);
  for (; !path.empty(); path.pop_back()) {
    follow(parent, path.back());
    parent = path.back();
  }
}

void PrefixIndex::remove_spare(Entry& entry, Block b) {
  List list{entry.spares, kEnd, 1};
  spare_links_.remove(list, b);
  --num_spares_;
  entry.spares = list.head;
}

// The hash table. Deletion moves later keys of the run back (Knuth, The Art of Computer
// Programming, vol. 3, 6.4, algorithm R). A prompt adds, and an eviction removes, thousands of keys
// at random places: these changes wait until a few have come, or a look-up, while their places are
// fetched from memory.

uint32_t PrefixIndex::tag_of(const Hash& hash) const {
  uint64_t halves[2];
  std::memcpy(halves, hash.data(), sizeof halves);
  const uint64_t x = (halves[0] ^ seed_) * 0x9E3779B97F4A7C15u + halves[1];
  return static_cast<uint32_t>(x ^ (x >> 32));
}

void PrefixIndex::delay(Key key, bool is_insert) {
  if (delayed_.size() == kMaxDelayed) do_delayed();
  __builtin_prefetch(&keys_[key.tag & (keys_.size() - 1)], 1);
  delayed_.push_back({key, is_insert});
}

void PrefixIndex::do_delayed() const {
  if (delayed_.empty()) return;
  // The index's contents do not change, only their places.
  auto* self = const_cast<PrefixIndex*>(this);
  for (const Delayed& change : delayed_)
    change.is_insert ? self->insert_key(change.key) : self->erase_key(change.key);
  self->delayed_.clear();
}

void PrefixIndex::insert_key(Key key) {
  if (4 * (num_keys_ + 1) > 3 * keys_.size()) grow_keys();
  const size_t mask = keys_.size() - 1;
  size_t i = key.tag & mask;
  while (keys_[i].entry != kNoEntry) i = (i + 1) & mask;
  keys_[i] = key;
  ++num_keys_;
}

void PrefixIndex::erase_key(Key key) {
  const size_t mask = keys_.size() - 1;
  size_t hole = key.tag & mask;
  while (keys_[hole].entry != key.entry || keys_[hole].tag != key.tag) hole = (hole + 1) & mask;
  for (size_t i = (hole + 1) & mask; keys_[i].entry != kNoEntry; i = (i + 1) & mask) {
    if (((i - keys_[i].tag) & mask) >= ((i - hole) & mask)) {
      keys_[hole] = keys_[i];
      hole = i;
    }
  }
  keys_[hole] = Key{};
  --num_keys_;
}

void PrefixIndex::grow_keys() {
  std::vector<Key> old(keys_.size() * 2);
  old.swap(keys_);
  num_keys_ = 0;
  for (const Key& key : old)
    if (key.entry != kNoEntry) insert_key(key);
}

size_t PrefixIndex::num_bytes_of_blocks() const {
  const size_t num_device = entry_of_[0].size();
  return (num_device + entry_of_[1].size()) * sizeof(EntryId) + num_device * 2 * sizeof(Block) +
         keys_.size() * sizeof(Key);
}

size_t PrefixIndex::num_bytes_of_entries() const {
  return entries_.num_bytes() + tokens_.num_bytes() + hashes_.num_bytes() +
         free_.capacity() * sizeof(EntryId);
}

void PrefixIndex::check() const {
  size_t num_found = 0, num_keys = 0, num_spares = 0;
  size_t num_blocks[2] = {0, 0};
  std::unordered_map<EntryId, uint32_t> below;  // blocks, by root
  std::unordered_map<EntryId, Hash> expected;
  const Require require("prefix index");
  for (const auto& [name, root] : roots_)
    require(root_names_.at(root) == &name, "a root has another name");
  for (const auto& named : root_names_) {
    const EntryId root = named.first;
    ++num_found;
    require(is_root(root) && entries_[root].root == root, "a root is none");
    require(
        entries_[root].child != kNoEntry || root_users_.count(root) || entries_[root].num_arriving,
        "a root that nobody needs");
    walk(root, [&](EntryId e) {
      const Entry& entry = entries_[e];
      ++num_found;
      num_keys += entry.has_key;
      require(find(entry.parent, tokens_.row(e)) == e, "an entry cannot be found");
      // Without computing hashes: entries that have none must have none after the check.
      if (is_root(entry.parent) && hashes_[entry.parent] == Hash{}) {
        require(entry.has_hash, "a detached entry cannot know its hash");
        expected[e] = hashes_[e];
      } else {
        const Hash before = is_root(entry.parent) ? hashes_[entry.parent] : expected[entry.parent];
        expected[e] = chained_hash(before, tokens_.row(e), block_size_ * sizeof(int32_t));
      }
      require(!entry.has_hash || hashes_[e] == expected[e], "an entry has another hash");
      require(!entry.has_hash || find_hash(entry.parent, hashes_[e]) == e,
              "an entry cannot be found by its hash");
      require(entry.has_hash || !entry.has_key, "an entry without a hash is in the table");
      require(entry.root == root || (!named.second && root_names_.count(entry.root)),
              "an entry has another root");
      below[entry.root] += num_blocks_of(e);
      require(entry.child != kNoEntry || entry.block(kDevice) != kNoBlock ||
                  entry.block(kHost) != kNoBlock || entry.producer != kNoEntry ||
                  entry.num_arriving,
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
        ++num_spares;
        require(entry_of(kDevice, b) == e, "a spare is another entry's");
      }
    });
  }
  for (const auto& named : root_names_)
    require(below[named.first] == num_blocks_below(named.first), "a root's blocks are miscounted");
  require(num_found == num_entries_, "entries are lost");
  require(num_spares == num_spares_, "spares are miscounted");
  do_delayed();
  require(num_keys_ == num_keys, "the hash table differs");
  for (int t = 0; t < 2; ++t) {
    size_t num = 0;
    for (const EntryId e : entry_of_[t]) num += e != kNoEntry;
    require(num == num_blocks[t], "a block has an entry that does not know it");
  }
}

}  // namespace kvplane::blocks
