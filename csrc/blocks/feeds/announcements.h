// Publications that are still to be sent to data planes.
#pragma once

#include <vector>

#include "core/types.h"
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
class Announcements {
 public:
  Announcements(const PrefixIndex& index, BlockStore& device) : index_(index), device_(device) {}

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
  const PrefixIndex& index_;
  BlockStore& device_;
  std::vector<Announcement> queue_;
  size_t num_taken_ = 0;             // of the queue
  std::vector<Announcement> again_;  // to be taken before the rest of the queue
};

}  // namespace kvplane::blocks
