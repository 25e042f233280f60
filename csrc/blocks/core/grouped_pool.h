// The layer groups of one pool, kept in step: they have the same sessions, sequences, tokens and
// plans; each has its own blocks, tables, prefix index and eviction. An item of an operation is
// done in all groups or in none, and a prompt is found cached as far as every group has the blocks
// that it needs.
//
// A number of blocks for all groups counts blocks of the smallest group, and those of others in
// proportion: needed blocks are those of the group with the highest need, available blocks those of
// the group with the fewest. So an operation that fits by these numbers fits in each group.
#pragma once

#include <string>
#include <vector>

#include "core/pool.h"

namespace kvplane::blocks {

// Converts numbers of blocks of one tier between a pool's groups.
class Proportion {
 public:
  Proportion(Groups groups, Tier tier);
  // Blocks of a group as blocks of the smallest one, rounded up or down.
  int64_t up(const Pool& group, int64_t num) const;
  int64_t down(const Pool& group, int64_t num) const;
  // Blocks of the smallest group as blocks of a group, rounded up.
  int64_t of_group(const Pool& group, int64_t num) const;
  int64_t smallest() const { return smallest_; }

 private:
  Tier tier_;
  int64_t smallest_;
};

// While it lives, a session is in the step of this number.
class InStep {
 public:
  InStep(Groups groups, SessionHandle handle, int64_t number)
      : groups_(groups), handle_(handle), before_(groups[0]->session(handle).number) {
    set(number);
  }
  InStep(const InStep&) = delete;
  ~InStep() { set(before_); }

 private:
  void set(int64_t number) {
    for (int64_t g = 0; g < groups_.size; ++g) groups_[g]->session(handle_).number = number;
  }

  Groups groups_;
  SessionHandle handle_;
  int64_t before_;
};

class GroupedPool {
 public:
  // `groups`: at least one. They have the same block size, and no sessions.
  explicit GroupedPool(std::vector<Pool*> groups) : pools_(std::move(groups)) {
    // All groups have the same families: the first counts them for all.
    for (size_t g = 1; g < pools_.size(); ++g) pools_[g]->count_no_families();
  }

  Groups groups() const { return {pools_.data(), static_cast<int64_t>(pools_.size())}; }
  const Pool& first() const { return *pools_[0]; }

  SessionHandle open_session(std::string_view root, uint32_t owner);
  void end_session(SessionHandle handle);
  bool end_some(SessionHandle handle, int64_t max_blocks);
  bool is_ending(SessionHandle handle) const;
  void session_fenced(SessionHandle handle);
  void begin(SessionHandle handle, int64_t number);
  std::vector<int32_t> growth(SessionHandle handle, const AppendColumns& columns) const;
  int64_t cut(SessionHandle handle, int64_t sequence_id);
  std::vector<FamilyEvent> take_family_events(SessionHandle handle) {
    return pools_[0]->take_family_events(handle);
  }
  std::vector<Failure> deferred_tokens(SessionHandle handle, const DeferredColumns& columns);
  bool receipted(SessionHandle handle, int64_t plan,
                 int64_t max_blocks = std::numeric_limits<int64_t>::max());
  int64_t release_retained(std::string_view root, uint32_t owner, Span<int32_t> tokens);
  // Leading full blocks that an admission would find: their entries in the first group.
  std::vector<EntryId> match(std::string_view root, Span<int32_t> tokens) const;
  int64_t num_blocks(Tier tier) const { return Proportion(groups(), tier).smallest(); }
  int64_t num_obtainable(SessionHandle handle, Tier tier) const;
  int64_t num_coming(SessionHandle handle, Tier tier) const;
  int64_t num_own_retired(SessionHandle handle, Tier tier) const;
  int64_t num_in(Tier tier, State state) const;
  int64_t num_held(SessionHandle handle, int64_t sequence_id) const;
  int64_t num_blocks_held(SessionHandle handle) const;

 private:
  std::vector<Pool*> pools_;
};

}  // namespace kvplane::blocks
