// Pins: cached blocks that a session holds for reading, in either tier, with no sequence and no
// plan.
#pragma once

#include <set>
#include <tuple>
#include <vector>

#include "core/operations.h"
#include "core/shared.h"
#include "index/prefix_index.h"
#include "memory/block_store.h"
#include "sessions/sessions.h"
#include "steps/tables.h"

namespace kvplane::blocks {

// Owns, in a session, `pins` and `num_pinned`, and when each pin ends.
//
// Invariants: each block of a pin has a reference of the pin, so it is neither evicted nor written;
// a pin ends when it is undone, when its time is over or with its session. No plan touches a block
// for a pin, and a reader compares generations, so nothing waits for a receipt or a fence when one
// ends. The pool looks prompts up in all groups before it pins in any.
class Pins {
 public:
  Pins(Shared& shared, PrefixIndex& index, Stores& stores, Sessions& sessions, Tables& tables)
      : shared_(shared), index_(index), stores_(stores), sessions_(sessions), tables_(tables) {}

  Failure check_id(const Session& session, int64_t id, int64_t item) const;
  // Whether the blocks of these entries can be held, of which the tier keeps `headroom` available.
  Failure check_room(const Session& session, const std::vector<EntryId>& entries, int64_t headroom,
                     int64_t item) const;
  // Holds the blocks of the entries, each that of the one before and one block more. Those without
  // a block lie behind the attention window.
  const Pin& pin(Session& session, int64_t id, const std::vector<EntryId>& entries,
                 double expires_at_s);
  // Ends a pin, if there is one.
  void unpin(Session& session, int64_t id);
  void end_all(Session& session);
  // Ends those whose time is over.
  void expire();

  // Throws std::logic_error saying what is wrong, besides references.
  void check() const;

 private:
  struct Expiry {
    double at_s;
    SessionHandle handle;
    int64_t id;

    bool operator<(const Expiry& other) const {
      return std::tie(at_s, handle, id) < std::tie(other.at_s, other.handle, other.id);
    }
  };

  Tier tier_of(EntryId e) const { return index_[e].block(kDevice) != kNoBlock ? kDevice : kHost; }
  void release(Session& session, int64_t id, const Pin& pin);

  Shared& shared_;
  PrefixIndex& index_;
  Stores& stores_;
  Sessions& sessions_;
  Tables& tables_;
  std::set<Expiry> expiries_;  // of all pins
};

}  // namespace kvplane::blocks
