// All block metadata of one layer group of a pool: both tiers, the prefix index, sessions with
// their sequences, and the drafts of their plans. Ints and bytes only.
//
// An operation checks, counts the blocks it needs, then changes: a refused item changes nothing.
// Operations on sequences take several groups, which they keep in step: an item is done in all of
// them or in none (grouped_pool.h). Single-threaded.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "containers/chunk_hints.h"
#include "core/operations.h"
#include "core/session.h"
#include "core/types.h"
#include "index/prefix_index.h"
#include "index/watch.h"
#include "memory/block_store.h"
#include "memory/retention.h"

namespace kvplane::blocks {

struct Counters {
  int64_t num_lookup_tokens = 0;
  int64_t num_hit_tokens = 0;
  int64_t num_copies_on_write = 0;
  int64_t num_swapped_out = 0;
  int64_t num_swapped_in = 0;
  int64_t num_publications = 0;
  int64_t max_held = 0;
  int64_t num_host_hit_tokens = 0;
  int64_t num_demoted = 0;
  int64_t num_forgotten = 0;
};

struct PoolConfig {
  uint32_t block_size_tokens = 16;
  uint32_t num_blocks[2] = {0, 0};
  std::vector<int64_t> generations[2];
  std::string eviction_policy = "lru";
  int64_t window_tokens = 0;
  int64_t max_sequences = 65536;
  int64_t max_table_entries = 4194304;
  // Device blocks that tables of an owner's sessions may refer to; 0: any number.
  int64_t max_owner_blocks = 0;
  uint64_t seed = 0;
};

class Pool;
using Groups = Span<Pool*>;

class Pool {
 public:
  explicit Pool(PoolConfig config);
  Pool(const Pool&) = delete;

  void set_time(double now_s);

  // Sessions
  SessionHandle open_session(std::string_view root, uint32_t owner);
  // Ends a session; `end_some` releases its blocks, and returns whether some are left. When none
  // are left and the data planes have fenced it, call `session_fenced`.
  void end_session(SessionHandle handle);
  bool end_some(SessionHandle handle, int64_t max_blocks);
  void session_fenced(SessionHandle handle);

  // A step. `only_check`: changes nothing, and answers each item as the step's only one.
  void begin(SessionHandle handle, int64_t number) { sessions_[handle].number = number; }
  static std::variant<Admitted, Failure> admit(Groups groups, SessionHandle handle,
                                               const Admission& admission, bool only_check = false);
  static std::variant<Admitted, Failure> grant(Groups groups, SessionHandle handle,
                                               int64_t admitted_by, const Admission& admission);
  static ItemResults append(Groups groups, SessionHandle handle, const AppendColumns& columns,
                            bool only_check);
  static ItemResults truncate(Groups groups, SessionHandle handle, Span<int64_t> ids,
                              Span<int32_t> num_tokens, bool only_check);
  static ItemResults fork(Groups groups, SessionHandle handle, Span<int64_t> parents,
                          Span<int64_t> ids, bool only_check);
  static ItemResults free(Groups groups, SessionHandle handle, Span<int64_t> ids, bool only_check);
  // Blocks that each item would take now; 0 for one that would be refused for another reason.
  std::vector<int32_t> growth(SessionHandle handle, const AppendColumns& columns) const;
  // Returns how many blocks it moves: about `max_blocks` at once, the others by `swap_some`, which
  // must be called before any other call of the session until it returns false.
  static std::variant<int64_t, Failure> swap(Groups groups, SessionHandle handle, Span<int64_t> ids,
                                             Tier destination, int64_t headroom, int64_t max_blocks,
                                             bool only_check);
  static bool swap_some(Groups groups, SessionHandle handle, int64_t max_blocks);
  int64_t cut(SessionHandle handle, int64_t sequence_id);
  static bool reserve(Groups groups, SessionHandle handle, int64_t sequence_id, int64_t num_blocks);
  // What happened to families of the session's sequences since the last call, each family once.
  std::vector<FamilyEvent> take_family_events(SessionHandle handle);
  // Ids of the members of a family that claim device blocks, ascending; none of one that has ended.
  std::vector<int64_t> on_device(SessionHandle handle, int64_t family) const;
  // Another group of the same pool counts the families.
  void count_no_families() { counts_families_ = false; }
  // Writes whole tables to the plan, if they are due; returns whether some are left for the next
  // call.
  static bool prepare(Groups groups, SessionHandle handle, int64_t max_blocks);
  // Writes the plan to the memory that `make(num_bytes)` returns; returns false when there is
  // nothing to carry out.
  static bool finish(Groups groups, SessionHandle handle, std::string_view prefix,
                     const std::function<char*(size_t)>& make);

  // After a step
  std::vector<Failure> deferred_tokens(SessionHandle handle, const DeferredColumns& columns);
  // Records that plans up to `plan` have run. Returns whether some of the work is left for the next
  // call, which must then come before any other call of the session.
  bool receipted(SessionHandle handle, int64_t plan,
                 int64_t max_blocks = std::numeric_limits<int64_t>::max());
  // Aborts all plans in flight; returns as `receipted` does. `keeps`: the next plan need not send
  // table entries that the data plane has.
  static bool abort(Groups groups, SessionHandle handle, int64_t next_plan, bool keeps,
                    int64_t max_blocks);

  // Queries
  Session& session(SessionHandle handle) { return sessions_[handle]; }
  const Session& session(SessionHandle handle) const { return sessions_[handle]; }
  BlockStore& store(Tier tier) { return stores_[tier]; }
  const BlockStore& store(Tier tier) const { return stores_[tier]; }
  const PrefixIndex& index() const { return index_; }
  const Counters& counters() const { return counters_; }
  uint64_t num_touched() const;  // how often a block or an entry of the index was looked at
  size_t num_token_chunks() const { return token_store_.num_used(); }
  const Sequence* find(SessionHandle handle, int64_t sequence_id) const;
  std::vector<const Sequence*> sequences_of(SessionHandle handle) const;  // ids ascending
  std::vector<uint32_t> indices_of(SessionHandle handle) const;           // in the same order
  std::vector<Block> table_of(const Sequence& sequence) const;
  // Leading full blocks that are cached: their entries.
  std::vector<EntryId> match(std::string_view root, Span<int32_t> tokens,
                             int64_t most = std::numeric_limits<int64_t>::max()) const;
  double now_s() const { return now_s_; }

  bool is_unfenced(SessionHandle handle) const {
    return handle < sessions_.size() && sessions_[handle].ended;
  }
  bool is_ending(SessionHandle handle) const {
    return !sessions_[handle].ending.empty() || !sessions_[handle].plans.empty();
  }
  bool has_session(SessionHandle handle) const {
    return handle < sessions_.size() && sessions_[handle].open;
  }

  // Publications to announce to data planes, at most as many as asked for; the rest waits for the
  // next call. Blocks that are no longer published are left out.
  struct Announcement {
    EntryId root;
    EntryId entry;
    uint32_t uid;
    bool below;  // those below the entry too
  };
  std::vector<Announcement> take_announcements(size_t max_entries);
  bool has_announcements() const { return !announcements_.empty(); }
  std::vector<Announcement> findable() const;
  std::vector<Announcement> findable_in(Block begin, Block& end) const;  // on the device, by root

  // Retention: see retention.h and _native.pyi.
  static std::variant<Retained, Failure> retain(Groups groups, std::string_view root,
                                                uint32_t owner, Span<int32_t> tokens,
                                                uint8_t priority, double expires_at_s,
                                                int64_t most_blocks);
  int64_t release_retained(std::string_view root, uint32_t owner, Span<int32_t> tokens);
  // Device blocks that tables of the owner's sessions refer to.
  int64_t num_owned(uint32_t owner) const { return owner < held_.size() ? held_[owner] : 0; }
  int64_t num_retained(uint32_t owner) const { return retention_.num_entries(owner); }

  // For metrics.
  const BlockTimes& block_times(Tier tier) const { return block_times_[tier - 1]; }
  int64_t num_sequences_in(Tier tier) const;
  // The longest time that a block has waited for a receipt or a fence so far; 0: none waits.
  double oldest_release_s() const;

  // Forgetting (forget.cpp): the prefix cannot be found from now on; `forget_some` removes its
  // entries, and returns whether some are left. Without `force` nothing changes if tables refer to
  // its blocks. Of more than `most_counted` entries the answer counts fewer than there are.
  static Forgotten forget(Groups groups, std::string_view root, Span<int32_t> tokens, bool force,
                          int64_t most_counted);
  static Forgotten forget_roots(Groups groups, const std::vector<std::string_view>& roots,
                                bool force);
  bool forget_some(int64_t max_entries);
  std::deque<std::pair<Block, int64_t>>& forgotten() { return forgotten_; }

  ChangeFeed& feed() { return feed_; }
  const ChangeFeed& feed() const { return feed_; }

  // Rebuilding (rebuild.h). `restore` enters a reported block below its parent; kNoEntry if its
  // hash does not follow from the tokens or another block has the prefix.
  EntryId open_root(std::string_view name) { return index_.open_root(name); }
  void close_root(EntryId root) { index_.close_root(root); }
  EntryId restore(EntryId parent, const int32_t* tokens, const Hash& hash, Block b);

  void check() const;
  int64_t held_by(const Sequence& sequence) const;

  // The same calls as those of GroupedPool.
  int64_t num_blocks(Tier tier) const { return stores_[tier].num_blocks; }
  int64_t num_in(Tier tier, State state) const { return stores_[tier].num_in(state); }
  int64_t num_obtainable(SessionHandle handle, Tier tier) const {
    return stores_[tier].num_obtainable(handle);
  }
  int64_t num_coming(SessionHandle handle, Tier tier) const {
    return stores_[tier].num_coming(handle);
  }
  int64_t num_own_retired(SessionHandle handle, Tier tier) const {
    return stores_[tier].num_own_retired(handle);
  }
  int64_t num_held(SessionHandle handle, int64_t id) const { return held_by(*find(handle, id)); }
  int64_t num_blocks_held(SessionHandle handle) const { return sessions_[handle].num_held; }

 private:
  struct Hit;
  struct AdmitPlan;
  struct AppendPlan;

  void evicted(Tier tier, Span<Block> blocks, Eviction why);

  // Forgetting (forget.cpp)
  uint64_t prefix_key(EntryId e, int64_t num, Span<int32_t> tokens) const;
  Forgotten count_below(EntryId top, int64_t most) const;
  int64_t num_in_use(const std::vector<EntryId>& roots, Span<int32_t> tokens, EntryId top) const;
  void forget_prefix(EntryId root, Span<int32_t> tokens, const Forgotten& result);
  std::vector<uint32_t> keep_private(EntryId root, Span<int32_t> tokens, int64_t num_blocks);
  void forget_root(EntryId root);
  void take_apart(EntryId e, EntryId root);

  // Sequences (sequences.cpp)
  uint32_t new_sequence(Session& session, int64_t id, int64_t admitted_by);
  void forget_sequence(uint32_t index);
  // Counts what `max_table_entries` bounds: table entries, also those that known tokens will need.
  int64_t num_entries(const Session& session) const;
  uint32_t add_fork(Session& session, uint32_t parent, int64_t id, int64_t admitted_by);
  Failure check_new_id(const Session& session, int64_t id, int64_t num_more, int64_t item) const;
  Failure check_fork(const Session& session, int64_t parent, int64_t id, int64_t item) const;
  Failure check_free(const Session& session, int64_t id, int64_t item) const;
  Failure check_truncate(const Session& session, int64_t id, int64_t num, int64_t item) const;
  Failure plan_swap(const Session& session, Span<int64_t> ids, int64_t headroom,
                    Swapping& plan) const;
  void add_to_swap(const Sequence& sequence, int64_t i, IdMap& shared, Swapping& plan) const;
  void begin_swap(Session& session, Swapping& plan);
  bool swap_some(Session& session, int64_t& left);
  void end_swap(Session& session);
  bool is_lost(const Sequence& sequence) const;
  void set_producers(uint32_t index, const int32_t* tokens, EntryId last, int64_t first,
                     int64_t end);
  void clear_producers(Sequence& sequence, uint32_t index, int64_t from);
  int64_t fewest_tokens(const Sequence& sequence) const;
  int64_t truncate_one(Session& session, uint32_t index, int64_t num);
  void move(Session& session, uint32_t index, Swapping& plan);
  void send_table(Session& session, Sequence& sequence, const std::vector<uint8_t>& allocated);
  int64_t drop(Session& session, uint32_t index, int64_t plan);

  // Families (families.cpp)
  void join_family(Session& session, uint32_t index, int64_t family);
  void leave_family(Session& session, uint32_t index);
  void claim_device(Session& session, uint32_t index, bool claims);
  void check_families(const Session& session) const;

  // Tables (tables.cpp): references of chunks are counted here, and changes are noted.
  void own_chunk(Session& session, Sequence& sequence, size_t chunk);
  void push_blocks(Session& session, Sequence& sequence, const std::vector<Block>& blocks);
  void put_block(Session& session, Sequence& sequence, int64_t i, Block b);
  int64_t cut_table(Session& session, Sequence& sequence, int64_t num, int64_t plan);
  void trim_table(Session& session, Sequence& sequence, int64_t num, int64_t plan);
  void share(Session& session, Tier tier, const std::vector<Block>& blocks);
  int64_t release(Session& session, Tier tier, const Block* blocks, size_t num, int64_t plan);
  bool remember(Session& session, Tier tier, const Block* blocks, size_t num, int64_t plan);
  void end_release(const Release& release);
  void add_entries(const Sequence& sequence, int64_t first, int64_t end,
                   TableChanges& changes) const;
  void set_entries(Session& session, Sequence& sequence, ChangeKind kind, int64_t first,
                   int64_t end, const std::vector<uint8_t>* allocated);
  void allocate(Session& session, Tier tier, int64_t num, std::vector<Block>& out);
  void obtain(Session& session, Tier tier, int64_t num, std::vector<Block>& out);

  // Growth (append.cpp)
  static Failure in_proportion(Groups groups, const Pool& pool, Failure failure);
  static bool fit_in_place(std::vector<AppendPlan>& plans, const AppendColumns& columns,
                           int64_t item);
  int64_t max_tokens() const;
  bool is_in_place(const Session& session, const Sequence& sequence, int64_t first,
                   int64_t num_slots) const;
  Failure check_append(const Session& session, const AppendColumns& columns, int64_t item,
                       const int32_t* tokens, AppendPlan& plan) const;
  int64_t append_one(Session& session, const AppendColumns& columns, int64_t item,
                     const int32_t* tokens, AppendPlan& plan);
  int64_t num_needed(const Session& session, const Sequence& sequence, int64_t first, int64_t end,
                     int64_t cover) const;
  bool may_write(const Session& session, const Sequence& sequence, int64_t i, int64_t first) const;
  int64_t num_ahead_of(const Sequence& sequence, int64_t cover) const;
  void copy_on_write(Session& session, uint32_t index, int64_t i, int64_t first);
  void touch(Session& session, uint32_t index);
  void touch_plan(Session& session, int64_t plan, uint32_t index);
  void grow(Session& session, uint32_t index, int64_t first, int64_t end, int64_t cover);
  void schedule(Session& session, uint32_t index, int64_t num_slots);
  void trim(Session& session, Sequence& sequence);
  int64_t num_replaced(const Sequence& sequence, int64_t first, int64_t end) const;
  int64_t num_allowed(const Session& session) const;
  Failure never_fits(Tier tier, int64_t item, int64_t needed) const;
  Failure no_room(const Session& session, Tier tier, int64_t item, int64_t needed,
                  int64_t available, int64_t headroom) const;

  // Admission (admit.cpp)
  static std::variant<Admitted, Failure> admit_with(Groups groups, SessionHandle handle,
                                                    const Admission& admission, int64_t admitted_by,
                                                    bool computes, bool only_check);
  Failure check_admission(const Session& session, const Admission& admission) const;
  static void find_agreed_hits(Groups groups, SessionHandle handle, const Admission& admission,
                               int64_t most, std::vector<AdmitPlan>& plans);
  void count_needed(const Session& session, const Admission& admission, bool computes,
                    AdmitPlan& plan) const;
  uint32_t admit_one(Session& session, const Admission& admission, int64_t admitted_by,
                     bool computes, const AdmitPlan& plan);
  void take_tokens(Sequence& sequence, Span<int32_t> tokens, const std::vector<Hit>& hits);
  static void agree(Groups groups, SessionHandle handle, int64_t id);
  Failure over_quota(const Session& session, const AdmitPlan& plan) const;
  void find_hits(const Session& session, const Admission& admission, int64_t most,
                 std::vector<Hit>& hits) const;
  bool find_led(const Session& session, EntryId e, int64_t i, std::vector<Hit>& hits) const;
  std::pair<int64_t, int64_t> window_hits(const std::vector<uint8_t>& present,
                                          int64_t num_tokens) const;
  void use_hits(Session& session, Sequence& sequence, const std::vector<Hit>& hits);

  // Plans (plans.cpp)
  void transfer(Session& session, BlockRef source, Tier tier, Block copy, uint32_t num_tokens);
  void note(Session& session, const Transfer& transfer);
  bool write_whole_tables(Session& session, int64_t max_blocks);
  void write_whole_table(Session& session, Sequence& sequence);
  bool write_transfers(Session& session, int64_t max_blocks);
  void end_draft(Session& session);
  void save(Session& session, Block b);
  void end_demotions(Session& session, const PlanRecord& record, bool has_run, int64_t next_plan);
  bool end_plans(Session& session, int64_t next_plan, int64_t& left);
  bool has_plan(const Session& session) const;
  void complete_draft(Session& session);
  void end_step(Session& session);
  static void begin_abort(Groups groups, SessionHandle handle);
  static bool note_origins(Session& session, int64_t& left);
  int64_t cut_one(Session& session, int64_t id, int64_t next_plan, bool keeps);

  // Publication (publish.cpp)
  void publish(Session& session, uint32_t index);
  bool end_receipted(Session& session, int64_t left);
  void advance(Session& session, uint32_t index, int64_t done);
  bool set_chain(Session& session, Sequence& sequence);
  void enter(Session& session, Sequence& sequence, uint32_t index, Block b);
  EntryId entry_for(const Sequence& sequence, uint32_t index);
  struct Given;
  Failure check_deferred(Session& session, const DeferredColumns& columns, int64_t item,
                         const int32_t* tokens, std::vector<Given>& given);
  bool announce(EntryId root, EntryId entry);
  void publish_fresh();
  void announce_promoted();
  void cut_to_written(Session& session, uint32_t index, const Origins& origins, int64_t next_plan);

  void check_session(const Session& session, std::unordered_map<uint32_t, uint32_t>& table_owners,
                     std::unordered_map<uint32_t, uint32_t>& token_owners,
                     std::vector<uint32_t>* refs) const;

  PoolConfig config_;
  bool counts_families_ = true;
  int64_t block_size_;
  int block_shift_;  // its logarithm
  PrefixIndex index_;
  Stores stores_;
  TableStore table_store_;
  TokenStore token_store_;
  ChunkHints chunk_hints_;
  std::deque<Session> sessions_;
  std::vector<SessionHandle> free_handles_;
  std::vector<int64_t> held_;  // by owner: device blocks that its tables refer to
  Slab<Sequence> sequences_;
  std::vector<uint32_t> free_sequences_;
  Counters counters_;
  BlockTimes block_times_[2];  // by tier
  double now_s_ = 0;
  std::vector<Announcement> announcements_;
  size_t num_announced_ = 0;                // of these
  std::vector<Announcement> re_announced_;  // to be taken before the rest of these
  Retention retention_;
  ChangeFeed feed_;
  // Entries to be removed. `old_root`: the root that they still name, if there are many.
  struct Forgetting {
    EntryId root;
    uint32_t uid;
    EntryId old_root;
  };
  std::deque<Forgetting> forgetting_;
  std::vector<std::pair<EntryId, uint32_t>> path_;   // down in the first of these: (entry, uid)
  std::deque<std::pair<Block, int64_t>> forgotten_;  // device blocks: (block, generation)

  Session* allocating_ = nullptr;     // for whom device blocks are allocated now
  std::vector<Block> scratch_, cut_;  // cut_: of cut_table
  std::vector<Block> entered_;        // by publish
  std::vector<Block> fresh_;          // see publish_fresh
};

}  // namespace kvplane::blocks
