// The arithmetic on rows of one head, compiled once for each instruction set.
//
// All sets give the same bits: sums run over kLanes partial sums in a fixed order, and nothing is
// fused. Rows in fp32 are padded with zeros to a multiple of kLanes.
#pragma once

#include <cstdint>

#include "kvplane/dtype.h"

namespace kvplane {

constexpr int64_t kLanes = 16;
constexpr int64_t kTileTokens = 32;  // KV tokens of one step of the online softmax.

// The state of one query row between tiles: out = sum over tokens of exp(score - max) * value.
struct RowState {
  float max;          // of the scores so far; -inf at first
  float sum[kLanes];  // partial sums of exp(score - max); their total is wanted
};

// One query row against tokens [begin, end) of a tile.
struct TileView {
  const float* key;    // [kTileTokens, row_size]
  const float* value;  // [kTileTokens, row_size]
  int64_t row_size;    // head size, padded
  int64_t begin;
  int64_t end;
};

// score(token) = scale * (query . key) + slope * (token - position)
struct ScoreTerms {
  float scale;
  float slope;
  int64_t position;  // of the query row, counted from the tile's first token
};

struct RowOps {
  const char* isa;
  // Converts `count` elements.
  void (*load)(const void* source, Dtype dtype, int64_t count, float* row);
  void (*store)(const float* row, int64_t count, Dtype dtype, void* destination);
  // Takes one tile into `state` and `out` ([row_size]).
  void (*attend)(const float* query, const TileView& tile, const ScoreTerms& terms, RowState* state,
                 float* out);
  // out /= the sum of the weights. Returns that sum.
  float (*finish)(const RowState& state, int64_t row_size, float* out);
};

// The best set this machine has, or the one that KVPLANE_KERNELS_ISA names when it has that.
const RowOps& row_ops();

}  // namespace kvplane
