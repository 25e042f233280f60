// What earlier items of an operation would have changed, in a dry run, which changes nothing.
#pragma once

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "core/types.h"

namespace kvplane::blocks {

// What decides whether an item on a sequence can be done.
struct Sketch {
  bool live = false;
  bool computed = false;  // by this step
  int64_t table_size = 0;
  int64_t num_tokens = 0;
  int64_t num_scheduled = 0;
  int64_t num_trimmed = 0;
  std::vector<size_t> own_pieces;  // pieces of its table that it would have copied

  bool owns(size_t piece) const {
    return std::find(own_pieces.begin(), own_pieces.end(), piece) != own_pieces.end();
  }
};

struct DryRun {
  bool on = false;
  Slot slot = kNoSlot;
  int64_t number_before = 0;  // of the session

  std::unordered_map<int64_t, Sketch> sequences;         // by id
  std::unordered_map<uint32_t, uint32_t> pieces_copied;  // how many owners have a copy instead
  std::unordered_map<Block, int64_t> more_refs;
  std::unordered_map<Block, uint32_t> pinned_tokens;
  int64_t num_taken = 0;  // device blocks
  int64_t num_held = 0;   // more of these, by the session's tables
  int64_t num_new = 0;    // sequences
  int64_t num_entries = 0;

  // Another operation begins.
  void clear() {
    if (!on) return;
    sequences.clear();
    pieces_copied.clear();
    more_refs.clear();
    pinned_tokens.clear();
    num_taken = num_held = num_new = num_entries = 0;
  }
};

}  // namespace kvplane::blocks
