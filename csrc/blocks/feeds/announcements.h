// Publications that are still to be sent to data planes.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "core/types.h"
#include "feeds/findable.h"
#include "index/prefix_index.h"
#include "memory/block_store.h"

namespace kvplane::blocks {

struct Announcement {
  EntryId root;
  EntryId entry;
  uint32_t uid;
  bool below;  // those below the entry too
};

// Owns the queue of published entries that were not announced yet. An entry is announced after its
// parent, which it names; if that is announced again, so is what is below it. Entries that are no
// longer published are left out when they are taken. Who publishes a block adds it; the layer group
// takes.
//
// An entry of states names the block of the same prefix in another group, which has all blocks of a
// prefix that is found. Whenever that one is announced, the entry is announced again.
class Announcements {
 public:
  Announcements(PrefixIndex& index, BlockStore& device) : index_(index), device_(device) {}
  Announcements(const Announcements&) = delete;
  ~Announcements() {
    if (whole_) whole_->of_states_ = nullptr;
    if (of_states_) of_states_->whole_ = nullptr;
  }

  // These are of states, and name blocks of `whole`.
  void name_blocks_of(Announcements& whole) {
    whole_ = &whole;
    whole.of_states_ = this;
  }
  // The device block that an entry's publication names as its parent, with its generation: kNoBlock
  // below a root; nothing if there is none now.
  std::optional<std::pair<Block, int64_t>> parent_of(EntryId e) const;

  // Adds the entry's block, and again those below it, which name it. Returns whether there are
  // such.
  bool add(EntryId root, EntryId e);
  // Adds the spares that took the place of allocated blocks.
  void add_promoted();
  bool empty() const { return queue_.empty(); }
  // At most as many as asked for; the rest waits for the next call.
  std::vector<Announcement> take(size_t max_entries);
  // All that can be found in device blocks [begin, end), by root; includes entries whose parents
  // are not on the device. If it takes long, `end` becomes the first block that was not scanned.
  std::vector<Announcement> all_in(Block begin, Block& end) const;
  // Throws std::logic_error saying what is wrong.
  void check() const;

 private:
  std::optional<bool> may_announce(EntryId e, Findable& findable) const;
  EntryId in_whole(EntryId e) const;

  PrefixIndex& index_;
  BlockStore& device_;
  Announcements* whole_ = nullptr;
  Announcements* of_states_ = nullptr;
  // The last entry looked up in the other group, and what was found there; with their uids.
  mutable std::pair<EntryId, uint32_t> last_{kNoEntry, 0}, last_in_whole_{kNoEntry, 0};
  std::vector<Announcement> queue_;
  size_t num_taken_ = 0;             // of the queue
  std::vector<Announcement> again_;  // to be taken before the rest of the queue
};

}  // namespace kvplane::blocks
