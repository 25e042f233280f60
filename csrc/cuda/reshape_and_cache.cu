// Scatters new keys and values into the slots of one layer's pages. When two tokens name one slot,
// which of them stays is not defined here; plans never do that.

#include "batch.cuh"
#include "launch.h"

namespace kvplane::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kChunkBytes = 16;

struct alignas(kChunkBytes) Chunk {
  uint32_t words[4];
};

// Converts a row by one warp. Only 8-bit numbers are scaled.
template <typename To, typename From>
__device__ void write_row(const From* from, float scale, int32_t head_size, To* to) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  for (int32_t d = lane; d < head_size; d += kLanesOfWarp) {
    const float number = to_float(from[d]);
    to[d] = from_float<To>(sizeof(To) == 1 ? number / scale : number);
  }
}

template <typename To>
__device__ void write_row_of(const void* base, int64_t row, Dtype from, float scale,
                             int32_t head_size, To* to) {
  if (from == Dtype::kFloat32) {
    write_row(static_cast<const float*>(base) + row, scale, head_size, to);
  } else if (from == Dtype::kFloat16) {
    write_row(static_cast<const Half*>(base) + row, scale, head_size, to);
  } else {
    write_row(static_cast<const Bfloat*>(base) + row, scale, head_size, to);
  }
}

// Copies a row of a key and one of a value, both in chunks, by one warp.
template <typename T>
__device__ void copy_rows_in_chunks(const T* key, const T* value, int32_t head_size, T* to,
                                    int64_t kv_stride) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  const int32_t num_chunks = head_size * static_cast<int32_t>(sizeof(T)) / kChunkBytes;
  for (int32_t i = lane; i < 2 * num_chunks; i += kLanesOfWarp) {
    const bool is_key = i < num_chunks;
    const T* from = is_key ? key : value;
    T* row = is_key ? to : to + kv_stride;
    const int32_t chunk = is_key ? i : i - num_chunks;
    reinterpret_cast<Chunk*>(row)[chunk] = reinterpret_cast<const Chunk*>(from)[chunk];
  }
}

// A warp for each token and KV head.
template <typename To>
__global__ void write_slots(ReshapeAndCacheParams p, bool in_chunks, int32_t* faults) {
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanesOfWarp;
  if (warp >= p.num_tokens * p.pages.num_kv_heads) return;
  const int64_t token = warp / p.pages.num_kv_heads, head = warp % p.pages.num_kv_heads;
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  if (slot >= p.pages.num_blocks * p.pages.block_size) {
    report(faults, kBadSlots);
    return;
  }
  const int64_t at = slot / p.pages.block_size * p.pages.block_stride +
                     slot % p.pages.block_size * p.pages.token_stride + head * p.pages.head_stride;
  const int32_t head_size = static_cast<int32_t>(p.pages.head_size);
  To* to = static_cast<To*>(p.pages.data) + at;
  const int64_t key = token * p.key_token_stride + head * p.key_head_stride;
  const int64_t value = token * p.value_token_stride + head * p.value_head_stride;
  if (in_chunks) {
    copy_rows_in_chunks(static_cast<const To*>(p.key) + key,
                        static_cast<const To*>(p.value) + value, head_size, to, p.pages.kv_stride);
  } else {
    write_row_of(p.key, key, p.key_dtype, key_scale(p.pages, head), head_size, to);
    write_row_of(p.value, value, p.value_dtype, value_scale(p.pages, head), head_size,
                 to + p.pages.kv_stride);
  }
}

bool starts_on_a_chunk(const void* data, int64_t stride, int64_t other_stride, Dtype dtype) {
  const int64_t bytes = dtype_bytes(dtype);
  return reinterpret_cast<uintptr_t>(data) % kChunkBytes == 0 &&
         stride * bytes % kChunkBytes == 0 && other_stride * bytes % kChunkBytes == 0;
}

}  // namespace

void reshape_and_cache(const ReshapeAndCacheParams& p, const Context& context) {
  const PagesParams& pages = p.pages;
  const bool in_chunks =
      p.key_dtype == pages.dtype && p.value_dtype == pages.dtype &&
      starts_on_a_chunk(pages.data, pages.block_stride, pages.kv_stride, pages.dtype) &&
      starts_on_a_chunk(pages.data, pages.head_stride, pages.token_stride, pages.dtype) &&
      starts_on_a_chunk(p.key, p.key_token_stride, p.key_head_stride, pages.dtype) &&
      starts_on_a_chunk(p.value, p.value_token_stride, p.value_head_stride, pages.dtype);
  const Grid grid = {div_ceil<int64_t>(p.num_tokens * pages.num_kv_heads, kWarps)};
  const auto run = [&](auto kernel) {
    launch(kernel, grid, kWarps * kLanesOfWarp, 0, context.stream, p, in_chunks, context.faults);
  };
  switch (pages.dtype) {
    case Dtype::kFloat32:
      return run(&write_slots<float>);
    case Dtype::kFloat16:
      return run(&write_slots<Half>);
    case Dtype::kBFloat16:
      return run(&write_slots<Bfloat>);
    case Dtype::kFloat8E4M3:
      return run(&write_slots<E4m3>);
    case Dtype::kFloat8E5M2:
      return run(&write_slots<E5m2>);
  }
}

}  // namespace kvplane::cuda
