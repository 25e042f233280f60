// Which block holds which prefix: a trie of exact entries, one for each full block of tokens.
//
//     root --[t0..t15]--> entry --[t16..t31]--> entry --[t32..t47]--> entry
//                         device 7   |          no block (evicted)    device 3
//                                    +--[u16..u31]--> entry
//                                                     host 9
//
// An entry is (parent entry, the block's tokens): two prompts share an entry only if all their
// tokens up to there are equal, so a hit cannot be wrong. Different roots share no entries; a root
// is identified by bytes that the caller chooses. An entry has at most one published block in each
// tier. More blocks of the device tier that hold the same tokens are its spares: when the published
// one is evicted, a spare takes its place. An entry without blocks stays while a descendant lives.
//
// The chained hash, xxh3-128 (Yann Collet's xxHash) over the parent's hash and the tokens, starting
// from a hash of the root's bytes, finds one child among many; tokens are compared all the same.
// Only an entry that has had siblings is in the table of hashes: most of a prompt's have none. So
// hashes are computed when they are first needed, most of them for the data planes, after the
// session that published the blocks has its answer.
//
// Invariant: an entry has a block, a child, a producer or a copy under way, or is removed.
#pragma once

#include <cassert>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "containers/lists.h"
#include "containers/slab.h"
#include "core/types.h"
#include "index/hash.h"

namespace kvplane::blocks {

// A line of the cache.
struct alignas(64) Entry {
  EntryId root = kNoEntry;
  EntryId parent = kNoEntry;  // kNoEntry for a root
  EntryId child = kNoEntry;   // the latest of its children
  EntryId next = kNoEntry;    // siblings
  EntryId prev = kNoEntry;
  Block blocks[2] = {kNoBlock, kNoBlock};  // device, host
  Block spares = kNoBlock;                 // first of the list
  uint32_t uid = 0;                        // counts the prefixes that this entry stood for
  // The live sequence that will fill the block at this place of its table, for others of its
  // session.
  uint32_t producer = kNoEntry;
  uint32_t producer_uid = 0;
  uint32_t num_uses = 0;  // hits; of a root: blocks below it, spares too
  uint32_t num_arriving
      : 30;                // plans in flight that copy the block to the host tier; see hold_root
  uint32_t has_hash : 1;   // it has been computed
  uint32_t has_key : 1;    // in the hash table
  uint32_t retention = 0;  // see Retention; 0: not retained
  float published_s = 0;
  float used_s = 0;

  Block block(Tier tier) const { return blocks[tier - 1]; }
  Block& block(Tier tier) { return blocks[tier - 1]; }
  bool has_blocks() const { return blocks[0] != kNoBlock || blocks[1] != kNoBlock; }
};

static_assert(sizeof(Entry) == 64, "an entry has grown");

// A change to the index, for its watchers.
enum class Change : uint8_t { kStored = 1, kRemoved = 2, kCleared = 3 };

class Listener {
 public:
  virtual ~Listener() = default;
  // The entry's block of the tier has just been set (kStored) or cleared (kRemoved), or all below
  // the root `entry` is about to be detached (kCleared).
  virtual void changed(Change change, EntryId entry, Tier tier) = 0;
};

class PrefixIndex {
 public:
  // `seed` spreads the hashes, so that callers cannot choose prefixes that collide.
  PrefixIndex(uint32_t block_size_tokens, uint32_t num_device_blocks, uint32_t num_host_blocks,
              uint64_t seed);

  uint32_t block_size() const { return block_size_; }
  void set_listener(Listener* listener) { listener_ = listener; }

  // Roots. A root lives while a session uses it or a prefix hangs from it.
  EntryId open_root(std::string_view name);
  void close_root(EntryId root);
  EntryId find_root(std::string_view name) const;  // kNoEntry: nothing is published under it
  const std::string& root_name(EntryId root) const { return *root_names_.at(root); }
  EntryId root_of(EntryId entry) const { return entries_[entry].root; }
  uint32_t num_blocks_below(EntryId root) const { return entries_[root].num_uses; }
  uint32_t num_blocks_of(EntryId e) const;  // spares too
  // Not if it was detached.
  bool is_named(EntryId root) const {
    if (root == last_named_) return true;
    if (!root_names_.at(root)) return false;
    last_named_ = root;
    return true;
  }
  std::vector<EntryId> roots() const;

  // Look-ups
  Entry& operator[](EntryId e) { return entries_[e]; }
  const Entry& operator[](EntryId e) const { return entries_[e]; }
  bool is_root(EntryId e) const { return entries_[e].parent == kNoEntry; }
  const int32_t* tokens(EntryId e) const { return tokens_.row(e); }
  const Hash& hash(EntryId e) const {
    if (!entries_[e].has_hash) compute_hash(e);
    return hashes_[e];
  }
  bool alive(EntryId e, uint32_t uid) const { return e != kNoEntry && entries_[e].uid == uid; }
  // The child of `parent` with these tokens, kNoEntry when there is none.
  EntryId find(EntryId parent, const int32_t* tokens) const;
  // The child of `parent` with this chained hash.
  EntryId find_hash(EntryId parent, const Hash& hash) const;
  // Calls f(entry) for each entry with this chained hash that `add_key` was called for.
  template <typename F>
  void with_hash(const Hash& hash, F f) const {
    do_delayed();
    const size_t mask = keys_.size() - 1;
    for (size_t i = tag_of(hash) & mask; keys_[i].entry != kNoEntry; i = (i + 1) & mask)
      if (hashes_[keys_[i].entry] == hash) f(keys_[i].entry);
  }
  // The entry of the first `num` blocks of the tokens below a root.
  EntryId find_path(EntryId root, Span<int32_t> tokens, int64_t num) const;
  // Leading entries below the root that have blocks; `may_lack`: the last of which has one.
  std::vector<EntryId> match(EntryId root, Span<int32_t> tokens, bool may_lack = false) const;
  // Entries' ids are below this.
  EntryId end() const { return entries_.size(); }
  // The entry that the block belongs to, as its published block or as a spare.
  EntryId entry_of(Tier tier, Block b) const { return entry_of_[tier - 1][b]; }
  void prefetch(EntryId e) const { __builtin_prefetch(&entries_[e], 1); }
  bool is_published(Tier tier, Block b) const {
    const EntryId e = entry_of_[tier - 1][b];
    return e != kNoEntry && entries_[e].block(tier) == b;
  }

  // Changes
  EntryId find_or_add(EntryId parent, const int32_t* tokens);
  // Has the entry be in the table of hashes.
  void add_key(EntryId e) {
    if (entries_[e].has_key) return;
    const uint32_t tag = tag_of(hash(e));
    entries_[e].has_key = 1;
    delay({e, tag}, true);
  }
  // Adds entries for `num` blocks of tokens, each below the one before it and with this producer.
  // The first is below `parent`, which has no such child yet.
  void add_produced(EntryId parent, const int32_t* tokens, int64_t num, uint32_t producer,
                    uint32_t uid, std::vector<EntryId>& added);
  // As find_or_add, when the chained hash is known.
  EntryId find_or_add(EntryId parent, const int32_t* tokens, const Hash& hash);
  // Hides an entry, and all below it, from every look-up. Returns the root, without a name, under
  // which the entries are until they are removed. A root loses the entries below it; if it is in
  // use, its name then has a new root. The entry must have a child or a block. Unless `moves_all`,
  // entries below it name the old root, which is held, until they are moved one by one.
  EntryId detach(EntryId top, bool moves_all);
  void move(EntryId e, EntryId root);
  // Keeps a root though nothing is below it: entries that were detached still name it.
  void hold_root(EntryId root) {
    ++entries_[root].num_arriving;
    ++num_holds_;
  }
  void drop_root(EntryId root) {
    assert(num_holds_ > 0 && entries_[root].num_arriving > 0);
    --num_holds_;
    --entries_[root].num_arriving;
    prune(root);
  }
  bool names_former_roots() const { return num_holds_ > 0; }
  int64_t num_holds() const { return num_holds_; }
  // The block holds the entry's tokens. True: it is published now; false: it is a spare.
  bool set_block(EntryId e, Tier tier, Block b);
  // Removes the block from its entry: it is neither published nor a spare. Returns the spare that
  // took its place, kNoBlock when none did. Entries that nothing needs are removed.
  Block clear_block(Tier tier, Block b);
  void set_producer(EntryId e, uint32_t producer, uint32_t uid);
  void clear_producer(EntryId e, uint32_t producer, uint32_t uid) {
    Entry& entry = entries_[e];
    if (entry.producer != producer || entry.producer_uid != uid) return;
    entry.producer = kNoEntry;
    if (!entry.has_blocks()) prune(e);
  }
  // Removes the entry, and then its ancestors, as far as nothing needs them.
  void prune(EntryId e);

  size_t num_entries() const { return num_entries_; }
  size_t num_spares() const { return num_spares_; }
  // How often a look-up or a change has visited an entry so far.
  uint64_t num_touched() const { return num_touched_; }
  // Bytes of the columns that have an element a block, and of the entries with their tokens.
  size_t num_bytes_of_blocks() const;
  size_t num_bytes_of_entries() const;
  // Calls f(entry) for all below `top`, parents first.
  template <typename F>
  void walk(EntryId top, F f) const {
    std::vector<EntryId> stack;
    for (EntryId c = entries_[top].child; c != kNoEntry; c = entries_[c].next) stack.push_back(c);
    while (!stack.empty()) {
      const EntryId e = stack.back();
      stack.pop_back();
      ++num_touched_;
      f(e);
      for (EntryId c = entries_[e].child; c != kNoEntry; c = entries_[c].next) stack.push_back(c);
    }
  }
  Block next_spare(Block b) const { return spare_links_.next(b); }
  // Throws std::logic_error saying what is wrong.
  void check() const;

 private:
  // Adds an entry. Its hash is `hash`, or if that is null computed when it is first asked for.
  EntryId add(EntryId parent, const int32_t* tokens, const Hash* hash = nullptr);
  EntryId add_root(const Hash& hash);
  EntryId new_entry();
  void set_hash(EntryId e, const Hash& hash);
  void compute_hash(EntryId e) const;
  void unlink(const Entry& entry);
  bool has_tokens(EntryId e, const int32_t* tokens) const;
  void put_tokens(EntryId e, const int32_t* tokens) {
    constexpr uint32_t kUsual = 16;  // a number that the compiler knows needs no call
    if (block_size_ == kUsual)
      std::memcpy(tokens_.row(e), tokens, kUsual * sizeof(int32_t));
    else
      std::memcpy(tokens_.row(e), tokens, block_size_ * sizeof(int32_t));
  }
  EntryId prefetch_after(EntryId e, EntryId next) const;
  EntryId lookup(EntryId parent, const int32_t* tokens, const Hash& hash) const;
  void remove_spare(Entry& entry, Block b);
  // The hash table: see prefix_index.cpp.
  struct Key {
    EntryId entry = kNoEntry;
    uint32_t tag = 0;  // bits of the hash, which say where the key's run begins
  };
  struct Delayed {
    Key key;
    bool is_insert;
  };
  uint32_t tag_of(const Hash& hash) const;
  void delay(Key key, bool is_insert);
  void do_delayed() const;
  void insert_key(Key key);
  void erase_key(Key key);
  void grow_keys();

  uint32_t block_size_;
  uint64_t seed_;
  Slab<Entry> entries_;
  Slab<int32_t, 0> tokens_;
  Slab<Hash> hashes_;
  std::vector<EntryId> free_;
  size_t num_entries_ = 0;  // roots too
  mutable uint64_t num_touched_ = 0;
  std::vector<EntryId> entry_of_[2];  // by tier
  Links spare_links_;                 // device blocks
  size_t num_spares_ = 0;
  std::vector<Key> keys_;  // open addressing, linear probing
  size_t num_keys_ = 0;
  std::vector<Delayed> delayed_;
  std::unordered_map<std::string, EntryId> roots_;
  std::unordered_map<EntryId, const std::string*> root_names_;  // null: detached
  mutable EntryId last_named_ = kNoEntry;                       // a root with a name
  int64_t num_holds_ = 0;                                       // see hold_root
  std::unordered_map<EntryId, uint32_t> root_users_;
  Listener* listener_ = nullptr;
};

}  // namespace kvplane::blocks
