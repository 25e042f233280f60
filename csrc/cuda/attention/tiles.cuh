// Tiles of rows in shared memory, in the form that the tensor cores read.
//
// A row takes an odd number of 16-byte chunks, so that the eight rows of an 8 x 8 matrix are in
// different banks for every head size. Columns past the head size are zeros. 8-bit numbers are
// stored in a tile as in the pages: ldmatrix reads two of them as one 16-bit number, and each lane
// converts its own to fp16 afterwards. So the 32 bytes of a row that one instruction reads, for 16
// rows, are one 16 x 16 factor or two:
//
//                              16-bit numbers       8-bit numbers
//   a lane's part of 8 rows    columns 2t, 2t + 1   columns 4t to 4t + 3:
//   read by rows: column of    2t, 2t + 1           4t, 4t + 1
//       k = 2t and on, 2t + 8  2t + 8, 2t + 9       4t + 2, 4t + 3
//   read by columns: those of  g                    2g
//       the factor's two parts g + 8                2g + 1
//
// A sum over columns may take them in any order, if both factors have the same order; and where
// columns are outputs, each is written to its own place.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/batch.cuh"
#include "cuda/attention/tile_sizes.h"
#include "cuda/device/eight_bits.cuh"
#include "cuda/device/ptx.cuh"

namespace kvplane::cuda {

constexpr int kChunkBytes = 16;
constexpr int kReadBytes = 32;  // that one instruction reads of each row

template <typename Kv>
constexpr bool kIs8Bits = sizeof(Kv) == 1;

// The type in which keys and values are multiplied.
template <typename Kv>
using FactorOf = std::conditional_t<kIs8Bits<Kv>, Half, Kv>;

// Probabilities are multiplied by this before they become factors, and the outputs divided by it: a
// power of two, so that nothing rounds. Without it, fp16 would lose probabilities below 2^-24, of
// which a long context may have many.
template <typename Factor>
constexpr float kLift = std::is_same_v<Factor, Half> ? 32768.0f : 1.0f;

// The number of 16 x 16 factors in 16 rows of kReadBytes.
template <typename Kv>
constexpr int kFactors = kReadBytes / (16 * static_cast<int>(sizeof(Kv)));

// The distance from one row of a tile to the next, in bytes.
template <typename T, int kHeadSize>
constexpr int kPitch = (kHeadSize * static_cast<int>(sizeof(T)) / kChunkBytes | 1) * kChunkBytes;

template <typename Factor>
__device__ uint32_t pack_probabilities(float low, float high) {
  return pack<Factor>(low * kLift<Factor>, high * kLift<Factor>);
}

// Read by rows, the column of 16 that is k = 2t + 8j of a factor; the next column is k + 1.
template <typename Kv>
__device__ constexpr int column_of(int t, int j) {
  return kIs8Bits<Kv> ? 4 * t + 2 * j : 2 * t + 8 * j;
}

// Starts the copies of `num_columns` columns of 16 rows, by one warp, into a tile of kWidth
// columns; the others are zeros. Lane first_lane + r has the offset of row r, negative if the row
// is not wanted: then the row is zeros, since an unused slot may hold NaN, and zero times NaN is
// not zero.
template <typename Kv, int kWidth, int kUnroll = 4>
__device__ void load_tile_rows(const Kv* data, int64_t offset_of_lane, int first_lane,
                               int32_t num_columns, unsigned char* to) {
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Kv));
  constexpr int kChunks = kWidth / kElements;
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfWarp;
  // Not unrolled further: the addresses of every copy would take registers of their own.
#pragma unroll(kChunks > 24 && kUnroll > 2 ? 2 : kUnroll)
  for (int i = 0; i < kTileRows * kChunks / kLanesOfWarp; ++i) {
    const int row = (i * kLanesOfWarp + lane) / kChunks;
    const int chunk = (i * kLanesOfWarp + lane) % kChunks;
    const int64_t offset = __shfl_sync(kWholeWarp, offset_of_lane, first_lane + row);
    const bool wanted = offset >= 0 && chunk * kElements < num_columns;
    copy_async_16(to + row * kPitch<Kv, kWidth> + chunk * kChunkBytes,
                  wanted ? data + offset + chunk * kElements : data, wanted);
  }
}

// Returns whether a tile of 16 positions is wanted whole and lies in one block, so that its rows
// follow each other at the token stride: the same for all lanes.
__device__ inline bool is_in_one_block(const Work& work, int32_t position, Range wanted) {
  return work.p.pages.block_size % kTileRows == 0 && position >= wanted.begin &&
         position + kTileRows <= wanted.end;
}

// Starts the copies of such a tile, as `load_tile_rows`. Lane first_lane has the offset of the
// first row, negative where the table's entry is not the id of a block.
template <typename Kv, int kWidth>
__device__ void load_tile_of_block(const Kv* data, int64_t offset_of_lane, int first_lane,
                                   int64_t token_stride, int32_t num_columns, unsigned char* to) {
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Kv));
  constexpr int kChunks = kWidth / kElements;
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfWarp;
  const int64_t first = __shfl_sync(kWholeWarp, offset_of_lane, first_lane);
  if constexpr (kLanesOfWarp % kChunks == 0) {
    constexpr int kRows = kLanesOfWarp / kChunks;  // at once
    const int row = lane / kChunks, chunk = lane % kChunks;
    const bool wanted = first >= 0 && chunk * kElements < num_columns;
    const Kv* from = wanted ? data + first + row * token_stride + chunk * kElements : data;
    const int64_t step = wanted ? kRows * token_stride : 0;
    unsigned char* const at = to + row * kPitch<Kv, kWidth> + chunk * kChunkBytes;
#pragma unroll
    for (int i = 0; i < kTileRows / kRows; ++i) {
      copy_async_16(at + i * kRows * kPitch<Kv, kWidth>, from, wanted);
      from += step;
    }
  } else {
#pragma unroll 4
    for (int i = 0; i < kTileRows * kChunks / kLanesOfWarp; ++i) {
      const int row = (i * kLanesOfWarp + lane) / kChunks;
      const int chunk = (i * kLanesOfWarp + lane) % kChunks;
      const bool wanted = first >= 0 && chunk * kElements < num_columns;
      copy_async_16(to + row * kPitch<Kv, kWidth> + chunk * kChunkBytes,
                    wanted ? data + first + row * token_stride + chunk * kElements : data, wanted);
    }
  }
}

// By one warp: the offset of row lane % 16 of a tile of 16 positions, in the lower half of the warp
// of its key, in the upper half of its value.
__device__ inline int64_t find_tile_row(const Work& work, const Item& item, int32_t position,
                                        Range wanted) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  return find_row(work, item.sequence.index, item.kv_head, position + lane % kTileRows, wanted,
                  lane >= kTileRows);
}

// kReadBytes of 16 rows of a tile as factors A, not transposed.
template <typename Kv, int kHeadSize>
__device__ void load_rows(uint32_t (&a)[kFactors<Kv>][4], const unsigned char* tile, int byte) {
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfWarp;
  const unsigned char* row =
      tile + lane % 16 * kPitch<Kv, kHeadSize> + byte + lane / 16 * kChunkBytes;
  if constexpr (!kIs8Bits<Kv>) {
    load_matrices(a[0], row);
  } else {
    uint32_t read[4];  // rows 0-7 and 8-15 of one factor, then of the other
    load_matrices(read, row);
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      widen_pairs<Kv>(read[2 * f], a[f][0], a[f][2]);
      widen_pairs<Kv>(read[2 * f + 1], a[f][1], a[f][3]);
    }
  }
}

// The same, transposed: columns become rows.
template <typename Kv, int kHeadSize>
__device__ void load_columns(uint32_t (&a)[kFactors<Kv>][4], const unsigned char* tile, int byte) {
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfWarp;
  const unsigned char* row =
      tile + (lane / 16 * 8 + lane % 8) * kPitch<Kv, kHeadSize> + byte + lane / 8 % 2 * kChunkBytes;
  if constexpr (!kIs8Bits<Kv>) {
    load_matrices_transposed(a[0], row);
  } else {
    uint32_t read[4];  // rows 0-7 of both factors, then rows 8-15
    load_matrices_transposed(read, row);
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      widen_every_second<Kv>(read[f], a[f][0], a[f][1]);
      widen_every_second<Kv>(read[f + 2], a[f][2], a[f][3]);
    }
  }
}

// kReadBytes of 16 rows of a tile as factors B, eight rows each: B's columns are the tile's rows.
template <typename Kv, int kHeadSize>
__device__ void load_rows_as_b(uint32_t (&low)[kFactors<Kv>][2], uint32_t (&high)[kFactors<Kv>][2],
                               const unsigned char* tile, int byte) {
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfWarp;
  uint32_t read[4];  // rows 0-7, two chunks; then rows 8-15
  load_matrices(read, tile + (lane / 16 * 8 + lane % 8) * kPitch<Kv, kHeadSize> + byte +
                          lane / 8 % 2 * kChunkBytes);
  if constexpr (!kIs8Bits<Kv>) {
    low[0][0] = read[0], low[0][1] = read[1], high[0][0] = read[2], high[0][1] = read[3];
  } else {
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      widen_pairs<Kv>(read[f], low[f][0], low[f][1]);
      widen_pairs<Kv>(read[f + 2], high[f][0], high[f][1]);
    }
  }
}

// kReadBytes of 16 rows of a tile as factors B, eight columns each: B's rows are the tile's rows.
// `left` and `right` are the two parts of a factor's columns.
template <typename Kv, int kHeadSize>
__device__ void load_columns_as_b(uint32_t (&left)[kFactors<Kv>][2],
                                  uint32_t (&right)[kFactors<Kv>][2], const unsigned char* tile,
                                  int byte) {
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfWarp;
  uint32_t read[4];  // rows 0-7 and 8-15 of one chunk, then of the other
  load_matrices_transposed(
      read, tile + lane % 16 * kPitch<Kv, kHeadSize> + byte + lane / 16 * kChunkBytes);
  if constexpr (!kIs8Bits<Kv>) {
    left[0][0] = read[0], left[0][1] = read[1], right[0][0] = read[2], right[0][1] = read[3];
  } else {
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      widen_every_second<Kv>(read[2 * f], left[f][0], right[f][0]);
      widen_every_second<Kv>(read[2 * f + 1], left[f][1], right[f][1]);
    }
  }
}

// Calls `run` with the head size of the kernel: one of these, to which others are rounded up. The
// added columns are zeros and are not read from memory.
template <typename Run>
auto with_head_size(int64_t head_size, const Run& run) {
  if (head_size <= 64) return run(std::integral_constant<int, 64>{});
  if (head_size <= 128) return run(std::integral_constant<int, 128>{});
  if (head_size <= 192) return run(std::integral_constant<int, 192>{});
  if (head_size <= 256) return run(std::integral_constant<int, 256>{});
  return run(std::integral_constant<int, 512>{});
}

}  // namespace kvplane::cuda
