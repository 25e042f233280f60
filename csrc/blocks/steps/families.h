// Families of sequences: an admission and its forks hold the same blocks, so the queue for device
// blocks takes them as one.
#pragma once

#include <vector>

#include "core/operations.h"
#include "sessions/sessions.h"

namespace kvplane::blocks {

// Owns a session's families and who of a sequence's family claims device blocks. All layer groups
// of a pool have the same families, so one of them counts. Invariant: a live sequence is a member
// of one family, which knows how many members claim device blocks. What begins, moves or ends a
// sequence calls it.
class Families {
 public:
  explicit Families(SequenceStore& sequences) : sequences_(sequences) {}

  // Another group of the same pool counts.
  void count_none() { counts_ = false; }
  void join(Session& session, uint32_t index, int64_t id);
  void leave(Session& session, uint32_t index);
  void claim_device(Session& session, uint32_t index, bool claims);
  // What happened to families of the session's sequences since the last call, each family once.
  std::vector<FamilyEvent> take_events(Session& session) const;
  // Ids of the members of a family that claim device blocks, ascending; none of one that has ended.
  std::vector<int64_t> on_device(const Session& session, int64_t family) const;
  // Throws std::logic_error saying what is wrong.
  void check(const Session& session) const;

 private:
  SequenceStore& sequences_;
  bool counts_ = true;
};

}  // namespace kvplane::blocks
