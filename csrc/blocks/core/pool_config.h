// What a layer group is made from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvplane::blocks {

struct PoolConfig {
  uint32_t block_size_tokens = 16;
  uint32_t num_blocks[2] = {0, 0};
  std::vector<int64_t> generations[2];
  std::string eviction_policy = "lru";
  int64_t window_tokens = 0;
  bool holds_states = false;  // checkpoints, at the ends of some blocks
  int64_t max_sequences = 65536;
  int64_t max_table_entries = 4194304;
  int64_t max_pinned_blocks = 4096;  // of a session, at one time
  // Device blocks that tables and pins of an owner's sessions may refer to; 0: any number.
  int64_t max_owner_blocks = 0;
  uint64_t seed = 0;

  // Whether a prefix is there only with all its blocks. Otherwise tables lack those that no later
  // position needs: those behind the window, or all but the deepest checkpoint.
  bool needs_all_blocks() const { return !window_tokens && !holds_states; }
};

}  // namespace kvplane::blocks
