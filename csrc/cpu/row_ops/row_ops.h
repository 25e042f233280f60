// The arithmetic on rows of one head: one file for each instruction set.
//
// Sums are kLanes partial sums, added in one fixed order, so a row's result does not depend on how
// rows are grouped. Except in `attend_bf16` and `attend_stored`, nothing is fused, and all sets
// give the same bits. Rows in fp32 are padded with zeros to a multiple of kLanes.
#pragma once

#include <cstdint>

#include "kvplane/dtype.h"

namespace kvplane {

constexpr int64_t kLanes = 16;
constexpr int64_t kTileTokens = 32;   // KV tokens of one step of the online softmax.
constexpr int64_t kMaxRowSize = 576;  // of a latent: 512, and 64 with rotary positions

// The state of one query row between tiles: out = sum over tokens of exp(score - max) * value.
struct RowState {
  float max;          // of the scores so far; -inf at first
  float sum[kLanes];  // partial sums of exp(score - max), to be added up at the end
};

// One query row and the tokens [begin, end) of the tile that it attends to, at least one.
// score(token) = scale * (query . key) + slope * (token - position), after the soft cap if there is
// one
struct Row {
  const void* query;  // [row_size]
  RowState* state;
  float* out;  // [value_size]
  int64_t begin;
  int64_t end;
  int64_t position;  // of the query row, counted from the tile's first token
  float slope;
};

// The rows of keys and values of one tile, padded with zeros to whole rows.
// Tokens that no row attends to have rows of zeros.
struct Tile {
  const char* key[kTileTokens];
  const char* value[kTileTokens];
};

struct AttendArgs {
  const Tile* tile;
  const Tile* prefetch;    // the next tile, to be prefetched meanwhile
  const Row* rows;         // [num_rows]
  int64_t num_rows;        // at most kAttendRows
  int64_t row_size;        // elements of a query and of a key
  int64_t value_size;      // elements of a value
  Dtype dtype;             // of the tile's rows
  int64_t prefetch_bytes;  // of one key of `prefetch`; its values have as many or fewer
  float scale;
  float soft_cap;  // 0: none
};

constexpr int64_t kAttendRows = 64;

// Rows of a tile that cannot be used in place.
struct LoadArgs {
  const char* const* rows;      // [kTileTokens]
  const char* const* prefetch;  // [kTileTokens], rows to be prefetched meanwhile
  int64_t prefetch_bytes;       // of one row of `prefetch`
  Dtype dtype;
  int64_t count;      // elements of a row
  char* to;           // [kTileTokens] rows
  int64_t row_bytes;  // of one row of `to`
};

struct RowOps {
  const char* isa;
  // Converts `count` elements.
  void (*load)(const void* source, Dtype dtype, int64_t count, float* row);
  void (*store)(const float* row, int64_t count, Dtype dtype, void* destination);
  // Converts a tile's rows to fp32.
  void (*load_tile)(const LoadArgs& args);
  // Converts a tile's rows of an 8-bit type or of bf16 to bf16. Null where `attend_bf16` is null.
  void (*load_tile_bf16)(const LoadArgs& args);
  // Adds one tile to the states and `out`s of rows. Queries, keys and values are fp32.
  void (*attend)(const AttendArgs& args);
  // As `attend`, for queries, keys and values in bf16, with both sizes a multiple of 2 * kLanes, or
  // for keys and values of 8 bits, with both a multiple of 4 * kLanes. Weights are rounded to bf16
  // as well, and products are summed in pairs. Null where there is no instruction for it.
  void (*attend_bf16)(const AttendArgs& args);
  // As `attend`, for keys and values of 16 or 8 bits, as `dtype` says, and fp32 queries, with both
  // sizes a multiple of `stored_unit`; products and sums are fused. Queries and outputs have their
  // columns in another order: `reorder` puts a row into it, or back. Null where there is no
  // instruction for it.
  void (*attend_stored)(const AttendArgs& args);
  void (*reorder)(float* row, int64_t count, Dtype dtype, bool back);
  int64_t stored_unit;
  // Merges the state of later tokens into that of earlier ones.
  void (*merge)(const RowState& later, const float* later_out, int64_t value_size, RowState* state,
                float* out);
  // out = out / the sum of the weights * scale. Adds the weight of a sink, a score without a value,
  // if there is one. Returns the sum, of the exponentials of scores - *max, and sets *max.
  float (*finish)(const RowState& state, int64_t value_size, float scale, const float* sink,
                  float* out, float* max);
  // A bare loop of the fused products that attention computes over 16-bit pages,
  // `products_of_round` in each round. Null where there is no instruction for it.
  float (*fused_products)(int64_t num_rounds);
  int64_t products_of_round;
  // Copies memory that does not overlap, bypassing the caches where the set can.
  void (*stream)(char* destination, const char* source, int64_t num_bytes);
};

// The set in use: the best one this machine has, or the one that KVPLANE_KERNELS_ISA names. Throws
// std::invalid_argument when this machine does not have that one.
const RowOps& row_ops();

}  // namespace kvplane
