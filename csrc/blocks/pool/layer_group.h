// All block metadata of one layer group of a pool: both tiers, the prefix index, sessions with
// their sequences, and the drafts of their plans. Ints and bytes only. Single-threaded.
#pragma once

#include <string>
#include <string_view>

#include "core/shared.h"
#include "feeds/announcements.h"
#include "feeds/watch.h"
#include "index/prefix_index.h"
#include "memory/block_store.h"
#include "memory/retention.h"
#include "sessions/sessions.h"
#include "steps/admit.h"
#include "steps/append.h"
#include "steps/families.h"
#include "steps/forget.h"
#include "steps/pins.h"
#include "steps/plans.h"
#include "steps/publish.h"
#include "steps/sequences.h"
#include "steps/swap.h"
#include "steps/tables.h"

namespace kvplane::blocks {

// The classes of a group, each the only owner of its state; each is given those before it that it
// needs. The group itself makes them, opens and ends sessions, and checks that what they know of
// blocks adds up to what the stores count.
struct LayerGroup : Shared {
  explicit LayerGroup(PoolConfig config);
  LayerGroup(const LayerGroup&) = delete;

  void set_time(double now_s);
  SessionHandle open_session(std::string_view root, uint32_t owner);
  // Ends a session; `end_some` releases its blocks, and returns whether some are left. When none
  // are left and the data planes have fenced it, call `session_fenced`.
  void end_session(SessionHandle handle);
  bool end_some(SessionHandle handle, int64_t max_blocks);
  void session_fenced(SessionHandle handle);
  bool is_ending(SessionHandle handle) const {
    const Session& session = sessions[handle];
    return !session.ending.empty() || !session.plans.empty() || !session.swapping.copies.empty();
  }

  // While a pool is rebuilt (rebuild.h): enters a reported block below its parent; kNoEntry if its
  // hash does not follow from the tokens or another block has the prefix.
  EntryId restore(EntryId parent, const int32_t* tokens, const Hash& hash, Block b);

  uint64_t num_touched() const;  // how often a block or an entry of the index was looked at
  int64_t num_sequences_in(Tier tier) const;
  // The longest time that a block has waited for a receipt or a fence so far; 0: none waits.
  double oldest_release_s() const;
  // Throws std::logic_error saying what is wrong.
  void check() const;

  PrefixIndex index;
  Stores stores;
  Retention retention;
  ChangeFeed feed;
  Announcements announcements;
  Sessions sessions;
  SequenceStore sequences;
  Tables tables;
  Pins pins;
  PlanLog plans;
  Publisher publisher;
  Families families;
  Lifecycle lifecycle;
  Growth growth;
  Swaps swaps;
  Admitter admitter;
  Forgetter forgetter;

 private:
  void evicted(Tier tier, SessionHandle handle, Span<Block> blocks, Eviction why);
};

using Groups = Span<LayerGroup*>;

}  // namespace kvplane::blocks
