// Builds a layer group from what its shards report of their blocks, a few blocks at a time.
//
// Generations continue from the highest that any shard, or the caller, knows of a block. A
// publication is restored only if it is of its block's final generation, all shards report the
// same, its hash follows from its tokens, and its parent is restored too. Of states the parent is
// the block of the same prefix in another group. Equal hashes never join
// blocks; of two blocks that hold one prefix the later is left out. Nothing is made for a block:
// columns and chunks of rows only.
#pragma once

#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "containers/zeros.h"
#include "pool/layer_group.h"

namespace kvplane::blocks {

// Roots, up to which looking for unused ones does not pay.
constexpr size_t kFewRoots = 1024;

struct PublicationColumns {
  Span<int32_t> indices;
  Span<int64_t> generations;
  Span<int32_t> parent_indices;  // -1: none
  Span<int64_t> parent_generations;
  Span<uint8_t> hashes;
  Span<int32_t> token_ids;
};

class Rebuild {
 public:
  // `whole`: of a group of states, that of the group whose blocks its publications name, which is
  // built and taken before.
  Rebuild(uint32_t block_size_tokens, uint32_t num_shards, const Rebuild* whole = nullptr);

  uint32_t block_size() const { return block_size_; }
  uint32_t num_shards() const { return static_cast<uint32_t>(shards_.size()); }
  // Forgets what the shard has reported.
  void start_shard(uint32_t shard, uint32_t num_device_blocks, uint32_t num_host_blocks);
  // Add parts of its report; a later entry for a block replaces an earlier one. Throw ColumnError,
  // and then change nothing.
  void add_blocks(uint32_t shard, Tier tier, Span<int32_t> indices, Span<int64_t> generations);
  void add_publications(uint32_t shard, std::string_view root, const PublicationColumns& columns);

  // Begins a group with as many blocks as the smallest shard. All have reported; later parts do not
  // count. `config` has the generations known so far.
  void begin(PoolConfig config, double now_s);
  bool is_of_states() const { return whole_ != nullptr; }
  bool has_all_shards() const;
  bool has_begun() const { return phase_ != Phase::kCollect; }
  bool is_done() const { return phase_ == Phase::kDone; }
  // Continues by about `max_blocks`; returns whether the group is complete.
  bool step(int64_t max_blocks);
  // Returns the complete group; shards must be started anew after that.
  std::unique_ptr<LayerGroup> take();
  int64_t num_restored() const { return static_cast<int64_t>(restored_.size()); }
  // Roots that are kept: those that blocks name, and at most as many others, or a thousand.
  int64_t num_roots() const { return static_cast<int64_t>(roots_.size()); }

 private:
  struct Row {
    uint32_t block = 0;
    uint32_t root = 0;
    int64_t generation = 0;
    Block parent = kNoBlock;
    int64_t parent_generation = 0;
    Hash hash{};
  };
  struct Shard {
    bool started = false;
    uint32_t num_blocks[2] = {0, 0};
    Zeros<int64_t> generations[2];  // 0: not reported
    Zeros<uint32_t> row_after;      // by block, the row's number + 1; 0: none
    Slab<Row> rows;                 // in the order of their blocks' first reports
    Slab<int32_t, 0> tokens{1};

    uint32_t row_of(size_t block) const { return row_after[block] - 1; }  // kNoRow: none
  };
  struct Root {
    const std::string* name;
    EntryId entry;  // while building
  };
  enum class Phase { kCollect, kLearn, kMake, kAgree, kLink, kEnter, kIdle, kRest, kClose, kDone };

  bool is_agreed(uint32_t row) const;
  EntryId root_of(const Row& row);
  void enter_state(uint32_t row);
  void enter_next();
  void next(Phase phase) {
    phase_ = phase;
    at_ = 0;
  }
  void prune_roots();
  int64_t size_of_phase() const;
  void do_one(int64_t i);
  bool make_group();
  void prefetch(uint32_t block) const;
  void learn(int64_t i);
  void link(uint32_t row);
  void rest(Block b);

  uint32_t block_size_;
  const Rebuild* whole_;
  std::vector<Shard> shards_;
  std::unordered_map<std::string, uint32_t> root_ids_;
  std::vector<Root> roots_;
  size_t prune_at_ = kFewRoots;  // roots

  Phase phase_ = Phase::kCollect;
  int64_t at_ = 0;
  PoolConfig config_;
  size_t num_known_[2] = {0, 0};  // blocks of which generations are known
  double now_s_ = 0;
  std::future<std::unique_ptr<LayerGroup>>
      making_;  // in another thread: most of it is the kernel's work
  std::unique_ptr<LayerGroup> group_;
  // By row of the first shard.
  std::vector<uint8_t> agreed_;
  std::vector<uint32_t> first_child_, last_child_, next_;
  std::vector<EntryId> entries_;
  std::vector<uint32_t> stack_;  // rows to enter
  std::vector<Block> restored_;  // parents first
};

}  // namespace kvplane::blocks
