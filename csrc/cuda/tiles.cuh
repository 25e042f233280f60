// Tiles of rows in shared memory, as the tensor cores read them.
//
// A row takes an odd number of 16-byte chunks, so that the eight rows of an 8 x 8 matrix lie in
// different banks for every head size. Columns past the head size are zeros.
#pragma once

#include <cstdint>

#include "batch.cuh"
#include "ptx.cuh"

namespace kvplane::cuda {

constexpr int kTileRows = 16;
constexpr int kElementsOfChunk = 8;  // of 16 bits

template <int kHeadSize>
constexpr int kPitch = (kHeadSize / kElementsOfChunk | 1) * kElementsOfChunk;

// Starts the copies of 16 rows of keys and of values by one warp. Lane r % 16 knows where row r's
// key lies, or that it is not wanted (negative): then the row is zeros, since what an unused slot
// holds may be NaN, and zero times NaN is not zero.
template <int kHeadSize>
__device__ void load_keys_and_values(const PagesParams& pages, int64_t key_of_lane, uint16_t* keys,
                                     uint16_t* values) {
  constexpr int kChunks = kHeadSize / kElementsOfChunk;
  const uint16_t* data = static_cast<const uint16_t*>(pages.data);
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfWarp;
  // Unrolled no further, since the addresses of every copy would take registers of their own.
#pragma unroll(kHeadSize > 192 ? 2 : 4)
  for (int i = 0; i < kTileRows * kChunks / kLanesOfWarp; ++i) {
    const int row = (i * kLanesOfWarp + lane) / kChunks;
    const int column = (i * kLanesOfWarp + lane) % kChunks * kElementsOfChunk;
    const int64_t key = __shfl_sync(kWholeWarp, key_of_lane, row);
    const bool wanted = key >= 0 && column < pages.head_size;
    const uint16_t* from = wanted ? data + key + column : data;
    copy_async_16(keys + row * kPitch<kHeadSize> + column, from, wanted);
    copy_async_16(values + row * kPitch<kHeadSize> + column, wanted ? from + pages.kv_stride : data,
                  wanted);
  }
}

// A 16 x 16 piece of a tile as the factor A: rows as they are.
template <int kHeadSize>
__device__ void load_rows(uint32_t (&a)[4], const uint16_t* tile, int column) {
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfWarp;
  load_matrices(a, tile + lane % 16 * kPitch<kHeadSize> + column + lane / 16 * 8);
}

// A 16 x 16 piece of a tile as the factor A, transposed: columns become rows.
template <int kHeadSize>
__device__ void load_columns(uint32_t (&a)[4], const uint16_t* tile, int column) {
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfWarp;
  const int row = lane / 16 * 8 + lane % 8;
  load_matrices_transposed(a, tile + row * kPitch<kHeadSize> + column + lane / 8 % 2 * 8);
}

// A 16 x 16 piece of a tile as two factors B, eight rows each: B's columns are the tile's rows.
template <int kHeadSize>
__device__ void load_rows_as_b(uint32_t (&low)[2], uint32_t (&high)[2], const uint16_t* tile,
                               int column) {
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfWarp;
  const int row = lane / 16 * 8 + lane % 8;
  uint32_t both[4];
  load_matrices(both, tile + row * kPitch<kHeadSize> + column + lane / 8 % 2 * 8);
  low[0] = both[0], low[1] = both[1], high[0] = both[2], high[1] = both[3];
}

// A 16 x 16 piece of a tile as two factors B, eight columns each: B's rows are the tile's rows.
template <int kHeadSize>
__device__ void load_columns_as_b(uint32_t (&left)[2], uint32_t (&right)[2], const uint16_t* tile,
                                  int column) {
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfWarp;
  uint32_t both[4];
  load_matrices_transposed(both, tile + lane % 16 * kPitch<kHeadSize> + column + lane / 16 * 8);
  left[0] = both[0], left[1] = both[1], right[0] = both[2], right[1] = both[3];
}

}  // namespace kvplane::cuda
