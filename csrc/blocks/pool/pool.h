// The pool: one or several layer groups, kept in step. They have the same sessions, sequences,
// tokens and plans; each has its own blocks, tables, prefix index and eviction. An item of an
// operation is done in all groups or in none, and a prompt is found cached as far as every group
// has the blocks that it needs.
//
// An operation checks, counts the blocks it needs, then changes: a refused item changes nothing.
//
// A group of states, if there is one, is the last. It has blocks for checkpoints alone, which no
// number of blocks for all groups counts: an admission or append that lacks one goes without it.
//
// A number of blocks for all groups counts blocks of the smallest group, and those of others in
// proportion: needed blocks are those of the group with the highest need, available blocks those of
// the group with the fewest. So an operation that fits by these numbers fits in each group.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/operations.h"
#include "pool/layer_group.h"

namespace kvplane::blocks {

// Owns the order of its groups, and nothing else. Python alone calls it.
class Pool {
 public:
  // `groups`: at least one. They have the same block size, and no sessions.
  explicit Pool(std::vector<LayerGroup*> groups) : groups_(std::move(groups)) {
    // All groups have the same families: the first counts them for all.
    for (size_t g = 1; g < groups_.size(); ++g) groups_[g]->families.count_none();
    if (!holds_states() || groups_.size() == 1) return;
    groups_.back()->announcements.name_blocks_of(whole().announcements);
    // What is still to be written has no checkpoint.
    for (LayerGroup* group : groups_) group->admitter.share_written_only();
  }

  Groups groups() const { return {groups_.data(), static_cast<int64_t>(groups_.size())}; }
  bool holds_states() const { return groups_.back()->config.holds_states; }
  // The first group without an attention window, in which prefixes are whole; the first if all have
  // one.
  LayerGroup& whole() const {
    for (LayerGroup* group : groups_)
      if (group->config.needs_all_blocks()) return *group;
    return first();
  }
  // The group to ask about sequences, which are the same in all.
  LayerGroup& first() const { return *groups_[0]; }

  // Sessions
  SessionHandle open_session(std::string_view root, uint32_t owner);
  // Returns as `end_some` does.
  bool end_session(SessionHandle handle, int64_t max_blocks);
  bool end_some(SessionHandle handle, int64_t max_blocks);
  bool is_ending(SessionHandle handle) const;
  void session_fenced(SessionHandle handle);

  // A step. `only_check`: changes nothing, and answers each item as the step's only one.
  void begin(SessionHandle handle, int64_t number);
  std::variant<Admitted, Failure> admit(SessionHandle handle, const Admission& admission,
                                        bool only_check);
  std::variant<Admitted, Failure> grant(SessionHandle handle, int64_t admitted_by,
                                        const Admission& admission);
  ItemResults append(SessionHandle handle, const AppendColumns& columns, bool only_check);
  std::vector<int32_t> growth(SessionHandle handle, const AppendColumns& columns) const;
  ItemResults truncate(SessionHandle handle, Span<int64_t> ids, Span<int32_t> num_tokens,
                       bool only_check);
  ItemResults fork(SessionHandle handle, Span<int64_t> parents, Span<int64_t> ids, bool only_check);
  ItemResults free(SessionHandle handle, Span<int64_t> ids, bool only_check);
  Pinned pin(SessionHandle handle, const PinColumns& columns, bool only_check);
  void unpin(SessionHandle handle, Span<int64_t> pin_ids);
  // How many blocks a swap has moved, or why it was refused; nothing while some work is left.
  using Swapped = std::optional<std::variant<int64_t, Failure>>;
  // Handles about `max_blocks` blocks, and `swap_some` as many more, which must be called before
  // any other call of the session until there is an answer.
  Swapped swap(SessionHandle handle, Span<int64_t> ids, Tier destination, int64_t headroom,
               int64_t max_blocks, bool only_check);
  Swapped swap_some(SessionHandle handle, int64_t max_blocks);
  // Writes whole tables to the plan, if they are due; returns whether some are left for the next
  // call.
  bool prepare(SessionHandle handle, int64_t max_blocks);
  // Writes the plan to the memory that `make(num_bytes)` returns; returns false when there is
  // nothing to carry out.
  bool finish(SessionHandle handle, std::string_view prefix,
              const std::function<char*(size_t)>& make);

  // Outside of a step
  int64_t cut(SessionHandle handle, int64_t sequence_id);
  // The same of a sequence that was to end with a plan, which has run or was aborted.
  void finish_sequence(SessionHandle handle, int64_t sequence_id);
  // Allocates blocks ahead for a sequence; the next plan has its table. It grows by as many in all
  // groups: a table has an entry for each block of tokens in each of them.
  bool reserve(SessionHandle handle, int64_t sequence_id, int64_t num_blocks);
  std::vector<Failure> deferred_tokens(SessionHandle handle, const DeferredColumns& columns);
  // Records that plans up to `plan` have run. Returns whether some of the work is left for the next
  // call, which must then come before any other call of the session.
  bool receipted(SessionHandle handle, int64_t plan, int64_t max_blocks);
  // Aborts all plans in flight; returns as `receipted` does. `keeps`: the next plan need not send
  // table entries that the data plane has.
  bool abort(SessionHandle handle, int64_t next_plan, bool keeps, int64_t max_blocks);

  // Prefixes
  std::variant<Retained, Failure> retain(std::string_view root, uint32_t owner,
                                         Span<int32_t> tokens, uint8_t priority,
                                         double expires_at_s, int64_t most_blocks);
  int64_t release_retained(std::string_view root, uint32_t owner, Span<int32_t> tokens);
  // The prefix cannot be found from now on. Without `force` nothing changes if tables refer to its
  // blocks. Of more than `most_counted` entries the answer counts fewer than there are.
  Forgotten forget(std::string_view root, Span<int32_t> tokens, bool force, int64_t most_counted);
  Forgotten forget_roots(const std::vector<std::string_view>& roots, bool force);

  // Numbers of blocks
  int64_t num_blocks(Tier tier) const;
  int64_t num_in(Tier tier, State state) const;
  int64_t num_obtainable(SessionHandle handle, Tier tier) const;
  int64_t num_coming(SessionHandle handle, Tier tier) const;
  int64_t num_own_retired(SessionHandle handle, Tier tier) const;
  int64_t num_held(SessionHandle handle, const Sequence& sequence) const;
  // Of several sequences on the device. Shared ones count once, at least if the sum is more than a
  // pool has.
  int64_t num_held(SessionHandle handle, const std::vector<int64_t>& ids) const;
  int64_t num_blocks_held(SessionHandle handle) const;

 private:
  std::variant<Admitted, Failure> admit_with(SessionHandle handle, const Admission& admission,
                                             int64_t admitted_by, bool computes, bool only_check);
  Failure check_checkpoint(const AppendColumns& columns, int64_t item) const;
  Failure check_room(const LayerGroup& group, SessionHandle handle, const Swapping& plan) const;

  std::vector<LayerGroup*> groups_;
};

// While it lives, a session is in the step of this number.
class InStep {
 public:
  InStep(Groups groups, SessionHandle handle, int64_t number)
      : groups_(groups), handle_(handle), before_(groups[0]->sessions[handle].number) {
    set(number);
  }
  InStep(const InStep&) = delete;
  ~InStep() { set(before_); }

 private:
  void set(int64_t number) {
    for (int64_t g = 0; g < groups_.size; ++g) groups_[g]->sessions[handle_].number = number;
  }

  Groups groups_;
  SessionHandle handle_;
  int64_t before_;
};

}  // namespace kvplane::blocks
