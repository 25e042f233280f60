// The latest changes of the index, so that others can follow it: which prefixes are cached, in
// which tier. Each change has a revision; revisions of logged changes have no gaps. A watcher
// takes a snapshot and then the changes since, or starts again when those are no longer here.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "containers/slab.h"
#include "core/types.h"
#include "index/prefix_index.h"
#include "memory/retention.h"

namespace kvplane::blocks {

struct ChangeColumns {
  int64_t revision = 0;  // the changes of the root up to this one are there
  std::vector<uint8_t> kinds;
  std::vector<uint8_t> tiers;
  std::string hashes;
  std::string parent_hashes;       // zero bytes below a root, and unless stored
  std::vector<int32_t> token_ids;  // of those stored

  void add(Change kind, Tier tier, const Hash& hash, const Hash& parent, const int32_t* tokens,
           size_t block_size);
};

// A part of what is published below the root: entries from `cursor` on, in the order of their ids,
// up to about max_blocks blocks. Returns where the next part begins, kNoEntry if this was the
// last. An entry that stays published keeps its id, so the parts contain it; the changes since the
// first part began bring the others.
EntryId snapshot(const PrefixIndex& index, std::string_view root, EntryId cursor, size_t max_blocks,
                 ChangeColumns& columns);

class ChangeLog {
 public:
  // Holds the last max_events changes from now on; 0: none.
  void restart(size_t max_events, uint32_t block_size, int64_t revision);
  bool is_on() const { return max_events_ > 0; }
  void add(int64_t revision, Change change, const PrefixIndex& index, EntryId e, Tier tier);
  // Reads the root's changes after `revision`, as many as asked for. False: the log does not reach
  // back so far.
  bool since(int64_t revision, std::string_view root, size_t max_events,
             ChangeColumns& columns) const;
  // Throws std::logic_error saying what is wrong; `revision`: of the index.
  void check(int64_t revision) const;

 private:
  struct Event {
    Hash hash;
    Hash parent_hash;
    uint32_t root;
    Change change;
    Tier tier;
  };

  uint32_t number_of_name(const PrefixIndex& index, EntryId root);
  size_t place_of(int64_t revision) const {
    return static_cast<size_t>(revision - start_ - 1) % max_events_;
  }

  size_t max_events_ = 0;
  uint32_t block_size_ = 0;
  int64_t start_ = 0;          // revision when it was switched on
  int64_t revision_ = 0;       // of the last event
  std::vector<Event> events_;  // a ring
  Slab<int32_t, 0> tokens_;
  std::unordered_map<std::string, uint32_t> roots_;    // names of the events' roots
  Slab<std::pair<const std::string*, size_t>> names_;  // and how many events each has
  EntryId last_root_ = kNoEntry;  // of the last event, and the number of its name
  uint32_t last_root_uid_ = 0;
  uint32_t last_name_ = 0;
};

// Numbers the changes of an index, and keeps the latest of them for watchers.
//
// Owns the revision and the log. The index and the operation that detaches prefixes tell it of each
// change. While entries still name a root that they were detached from, nothing is kept: watchers
// start again afterwards.
class ChangeFeed final : public Listener {
 public:
  ChangeFeed(PrefixIndex& index, Retention& retention) : index_(index), retention_(retention) {
    index_.set_listener(this);
  }
  ChangeFeed(const ChangeFeed&) = delete;

  // Kept short: it is called for each block.
  void changed(Change change, EntryId e, Tier tier) override {
    if (index_[e].retention) retention_.changed(change, e, tier);
    if (log_.is_on()) return add(change, e, tier);
    ++revision_;
  }
  // Keeps the last `max_events` changes from now on; none at first.
  void keep(size_t max_events) {
    num_kept_ = max_events;
    if (!index_.names_former_roots()) resume();
  }
  void pause() { log_.restart(0, index_.block_size(), revision_); }
  void resume() {
    assert(!index_.names_former_roots());
    log_.restart(num_kept_, index_.block_size(), revision_);
  }

  const ChangeLog& log() const { return log_; }
  int64_t revision() const { return revision_; }
  // Throws std::logic_error saying what is wrong.
  void check() const;

 private:
  void add(Change change, EntryId e, Tier tier);

  PrefixIndex& index_;
  Retention& retention_;
  ChangeLog log_;
  int64_t revision_ = 0;
  size_t num_kept_ = 0;
};

}  // namespace kvplane::blocks
