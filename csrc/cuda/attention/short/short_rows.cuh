// The rows of a short tile: each thread's part of them, and their queries as factors of a product.
#pragma once

#include <type_traits>

#include "cuda/attention/batch.cuh"
#include "cuda/attention/queries.cuh"
#include "cuda/attention/tiles.cuh"

namespace kvplane::cuda {

// The warps of a block: two where the tiles of four would not fit in its shared memory.
template <typename Kv, int kHeadSize>
constexpr int kShortWarps = kHeadSize * sizeof(Kv) <= 512 ? 4 : 2;

// The rows whose scores a thread holds: 2t and 2t + 1 of each eight.
template <int kColumns>
struct RowsOfThread {
  int32_t position[kColumns][2];  // -1 for a missing row, which attends to nothing
  float scale[kColumns][2];       // of products, to scores in base 2; one number for 16-bit keys
  float slope[kColumns][2];       // in base 2
  float maximum[kColumns][2];
  float sum[kColumns][2];  // of this thread's tokens
};

// Resets the rows to their state before the first token of a split.
template <int kColumns>
__device__ void begin_rows(RowsOfThread<kColumns>& rows) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      rows.maximum[c][j] = -INFINITY;
      rows.sum[c][j] = 0.0f;
    }
  }
}

template <bool kIsShared, int kColumns>
__device__ void set_rows(const Work& work, const Item& item, int32_t first_row, int32_t num_rows,
                         RowsOfThread<kColumns>& rows) {
  const int32_t t = static_cast<int32_t>(threadIdx.x) % 4;
  const float scale = finite(work.p.scale * kLog2E * key_scale(work.p.pages, item.kv_head));
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int32_t row = 8 * c + 2 * t + j;
      const bool there = row < num_rows;
      const RowPlace at = place_of_row<kIsShared>(work, item, first_row + row);
      rows.position[c][j] = there ? at.sequence->first_position() + at.token : -1;
      rows.scale[c][j] = scale;
      rows.slope[c][j] =
          there && work.p.alibi_slopes != nullptr ? work.p.alibi_slopes[at.head] * kLog2E : 0.0f;
    }
  }
  begin_rows(rows);
}

// Loads row g of column c of the queries as a factor B, straight from global memory: the dims from
// k = 2t on. Returns the factor for the row's scores.
template <typename Kv, int kHeadSize, bool kIsShared>
__device__ float load_query_column(const Work& work, const Item& item, int32_t first_row,
                                   int32_t num_rows, int c, uint32_t (&column)[kHeadSize / 8]) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  const int32_t row = 8 * c + lane / 4;
  const RowPlace at = place_of_row<kIsShared>(work, item, first_row + row);
  const uint16_t* from = static_cast<const uint16_t*>(work.p.query) +
                         (at.sequence->first_token + at.token) * work.p.query_token_stride +
                         at.head * work.p.query_head_stride;
#pragma unroll
  for (int k = 0; k < kHeadSize / 16; ++k) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int32_t dim = 16 * k + column_of<Kv>(lane % 4, j);
      const bool there = row < num_rows && dim < work.p.pages.head_size;
      column[2 * k + j] = there ? *reinterpret_cast<const uint32_t*>(from + dim) : 0u;
    }
  }
  return kIs8Bits<Kv> && work.p.query_dtype == Dtype::kBFloat16 ? scale_row<4>(column) : 1.0f;
}

// Queries in registers, for tiles that leave room there.
template <typename Kv, int kHeadSize, int kColumns>
struct QueryRegisters {
  uint32_t columns[kColumns][kHeadSize / 8];

  template <bool kIsShared>
  __device__ void load(const Work& work, const Item& item, int32_t first_row, int32_t num_rows,
                       unsigned char*, RowsOfThread<kColumns>& rows) {
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float back = load_query_column<Kv, kHeadSize, kIsShared>(work, item, first_row,
                                                                     num_rows, c, columns[c]);
      if constexpr (!kIs8Bits<Kv>) continue;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float of_row = __shfl_sync(kWholeWarp, back, (2 * t + j) * 4);
        rows.scale[c][j] = finite(rows.scale[c][j] * of_row);
      }
    }
  }

  __device__ void get(int c, int k, uint32_t (&b)[2]) const {
    b[0] = columns[c][2 * k];
    b[1] = columns[c][2 * k + 1];
  }
};

// Queries in shared memory, where a lane finds its part of a factor as one piece: the warps share
// them. Each loads a part, so the block waits once.
template <typename Kv, int kHeadSize, int kColumns>
struct SharedQueries {
  static constexpr bool kIsUsed = kColumns * kHeadSize > 384;
  static constexpr int kWords = kColumns * kHeadSize / 8 * kLanesOfWarp;
  static constexpr int kBytes = kIsUsed ? (kWords + 8 * kColumns) * 4 : 0;

  const uint32_t* parts;  // of this lane

  template <bool kIsShared>
  __device__ void load(const Work& work, const Item& item, int32_t first_row, int32_t num_rows,
                       unsigned char* shared, RowsOfThread<kColumns>& rows) {
    const int warp = static_cast<int>(threadIdx.x) / kLanesOfWarp;
    const int lane = static_cast<int>(threadIdx.x) % kLanesOfWarp;
    uint32_t* const words = reinterpret_cast<uint32_t*>(shared);
    float* const backs = reinterpret_cast<float*>(words + kWords);
    for (int c = warp; c < kColumns; c += kShortWarps<Kv, kHeadSize>) {
      uint32_t column[kHeadSize / 8];
      const float back =
          load_query_column<Kv, kHeadSize, kIsShared>(work, item, first_row, num_rows, c, column);
#pragma unroll
      for (int i = 0; i < kHeadSize / 8; ++i) {
        words[((c * (kHeadSize / 16) + i / 2) * kLanesOfWarp + lane) * 2 + i % 2] = column[i];
      }
      if (lane % 4 == 0) backs[8 * c + lane / 4] = back;
    }
    __syncthreads();
    parts = words + 2 * lane;
    if constexpr (!kIs8Bits<Kv>) return;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        rows.scale[c][j] = finite(rows.scale[c][j] * backs[8 * c + 2 * (lane % 4) + j]);
      }
    }
  }

  __device__ void get(int c, int k, uint32_t (&b)[2]) const {
    const uint32_t* part = parts + (c * (kHeadSize / 16) + k) * kLanesOfWarp * 2;
    b[0] = part[0];
    b[1] = part[1];
  }
};

}  // namespace kvplane::cuda
