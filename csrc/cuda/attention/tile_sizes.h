// Sizes of the attention kernels' tiles: rows are query tokens times the query heads of a KV head.
#pragma once

#include <cstdint>

namespace kvplane::cuda {

// Up to so many rows are a short item (decodes, most verifications), more a long one (prefill).
constexpr int kShortRows = 32;
constexpr int kRowsOfLongTile = 64;
constexpr int kRowsOfFmaTile = 16;
constexpr int kTokensOfFmaTile = 32;
constexpr int kRowsOfMaskedTile = 16;  // the most of a short tile under a mask of blocks
constexpr int kTileRows = 16;          // tokens whose keys or values a warp reads at a time

constexpr int tokens_of_long_tile(int head_size) {
  return head_size <= 128 ? 64 : head_size <= 256 ? 32 : 16;
}

// A long item attends to so many dims of the values: more would not fit in registers.
constexpr int kDimsOfLongPart = 256;

constexpr int32_t long_parts(int64_t value_head_size) {
  return static_cast<int32_t>((value_head_size + kDimsOfLongPart - 1) / kDimsOfLongPart);
}

// Rows of a short tile: eight, sixteen or thirty-two. Tiles of more rows read keys and values less
// often, but do not fit in a thread's registers with the largest heads. The width changes no bit.
constexpr int short_tile_rows(int64_t rows, int64_t head_size) {
  if (rows <= 8 || head_size > 192) return 8;
  return rows <= 16 || head_size > 128 ? 16 : 32;
}

// Rows of a tile of several decodes; 0 where eight are the most that fit.
constexpr int rows_of_families(int64_t head_size) {
  const int rows = short_tile_rows(32, head_size);
  return rows > 8 ? rows : 0;
}

}  // namespace kvplane::cuda
