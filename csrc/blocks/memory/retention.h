// Soft pins: cached prefixes that are evicted after all others, those of the lowest priority first.
//
// A retention is of one owner and one prefix, with a priority, until a time. It lies at the
// prefix's last entry and counts for every entry from there up to the root. So an entry's priority,
// the highest that counts for it, is never below that of an entry that continues its prefix.
//
//     root --> A --> B --> C        retentions: 50 at C, 20 at B
//              50    50    50
//              20    20             when that at C ends, A and B have 20
//
// When an entry loses its last block, its retentions move to the nearest entry before it that has
// one. Adding and ending a retention takes time proportional to its entries. Memory is bounded by
// the retained entries: an entry has, for an owner and a priority, at most one retention of the
// whole prefix and one that was cut short.
#pragma once

#include <memory>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "containers/slab.h"
#include "core/types.h"
#include "index/prefix_index.h"
#include "memory/block_store.h"

namespace kvplane::blocks {

class Retention {
 public:
  Retention(PrefixIndex& index, Stores& stores) : index_(index), stores_(stores) {}

  // 0: not retained.
  uint8_t priority(EntryId e) const {
    const uint32_t head = index_[e].retention;
    return head ? counts_[head - 1].priority : 0;
  }
  // Entries that are retained for the owner.
  int64_t num_entries(uint32_t owner) const {
    const auto it = num_entries_.find(owner);
    return it == num_entries_.end() ? 0 : it->second;
  }
  // Entries of the path, heads first, that are not.
  int64_t num_new(uint32_t owner, const std::vector<EntryId>& path) const;

  // Retains a path from a root's child on. `key` tells prefixes that were asked for apart.
  void retain(uint32_t owner, const std::vector<EntryId>& path, uint8_t priority,
              double expires_at_s, uint64_t key);
  // Ends the owner's retentions of exactly these full blocks below the root. Returns how many
  // entries no longer count for it.
  int64_t release(EntryId root, uint32_t owner, Span<int32_t> tokens);
  // The key of all full blocks of the tokens; `e` is the entry of the first `num` of them.
  uint64_t key_of(EntryId e, int64_t num, Span<int32_t> tokens) const;
  // Ends retentions at the entry or below it; takes time proportional to all retained entries.
  void end_below(EntryId top);
  // Ends expired retentions; those left after some thousand entries wait for the next call.
  void expire(double now_s);
  // As `Listener::changed`, of an entry that is retained.
  void changed(Change change, EntryId e, Tier tier);
  // The entry has just lost its last block, and no copy of it is under way.
  void lost(EntryId e);

  // Throws std::logic_error saying what is wrong.
  void check() const;

 private:
  struct Record {
    uint32_t owner = 0;
    uint8_t priority = 0;
    EntryId tail = kNoEntry;
    double expires_at_s = 0;
    uint64_t key = 0;
  };
  // How many retentions of an owner and a priority count for an entry: a list, highest priorities
  // first.
  struct Count {
    uint32_t owner;
    uint32_t num;
    uint32_t next;  // 0: the last
    uint8_t priority;
  };

  bool counts_for(uint32_t owner, EntryId e) const;
  void add_count(EntryId e, uint32_t owner, uint8_t priority);
  void drop_count(EntryId e, uint32_t owner, uint8_t priority);
  void apply(EntryId e);
  // Takes the record out of the entries from its tail up to `end`, which is not one of them.
  int64_t drop_counts(const Record& record, EntryId end);
  int64_t end(uint32_t r);
  void unlist(uint32_t r);
  bool is_cut(const Record& record) const { return record.key != key_of(record.tail); }
  uint64_t key_of(EntryId e) const;

  PrefixIndex& index_;
  Stores& stores_;
  Slab<Record> records_;
  std::unordered_map<EntryId, std::vector<uint32_t>> at_;  // records by tail
  std::set<std::pair<double, uint32_t>> by_expiry_;
  Slab<Count> counts_;
  std::unordered_map<uint32_t, int64_t> num_entries_;  // by owner
};

}  // namespace kvplane::blocks
