// Scatters new keys and values into the slots of one layer's pages. If two tokens have the same
// slot, either may be stored; plans never do that.

#include "cuda/attention/batch.cuh"
#include "cuda/device/launch.h"

namespace kvplane::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kChunkBytes = 16;

struct alignas(kChunkBytes) Chunk {
  uint32_t words[4];
};

// How a warp writes rows, depending on types and alignment.
enum class Pace {
  kChunks,  // copies: types are equal
  kFours,   // each lane converts four numbers at once
  kOnes,
};

template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Numbers {
  T number[kCount];
};

// Converts a row, by one warp. Only 8-bit numbers are scaled.
template <int kAtOnce, typename To, typename From>
__device__ void write_row(const From* from, float scale, int32_t head_size, To* to) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  for (int32_t d = kAtOnce * lane; d < head_size; d += kAtOnce * kLanesOfWarp) {
    const auto given = *reinterpret_cast<const Numbers<From, kAtOnce>*>(from + d);
    Numbers<To, kAtOnce> rounded;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float number = to_float(given.number[i]);
      rounded.number[i] = from_float<To>(sizeof(To) == 1 ? number / scale : number);
    }
    *reinterpret_cast<Numbers<To, kAtOnce>*>(to + d) = rounded;
  }
}

template <int kAtOnce, typename To>
__device__ void write_row_of(const void* base, int64_t row, Dtype from, float scale,
                             int32_t head_size, To* to) {
  if (from == Dtype::kFloat32) {
    write_row<kAtOnce>(static_cast<const float*>(base) + row, scale, head_size, to);
  } else if (from == Dtype::kFloat16) {
    write_row<kAtOnce>(static_cast<const Half*>(base) + row, scale, head_size, to);
  } else {
    write_row<kAtOnce>(static_cast<const Bfloat*>(base) + row, scale, head_size, to);
  }
}

// Copies a row of keys and a row of values in chunks, by one warp.
template <typename T>
__device__ void copy_rows_in_chunks(const PagesParams& pages, const T* key, const T* value, T* keys,
                                    T* values) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  const auto chunks_of = [](int64_t size) {
    return static_cast<int32_t>(size) * static_cast<int32_t>(sizeof(T)) / kChunkBytes;
  };
  const int32_t num_chunks = chunks_of(pages.head_size);
  for (int32_t i = lane; i < num_chunks + chunks_of(pages.value_head_size); i += kLanesOfWarp) {
    const bool is_key = i < num_chunks;
    const T* from = is_key ? key : value;
    T* row = is_key ? keys : values;
    const int32_t chunk = is_key ? i : i - num_chunks;
    reinterpret_cast<Chunk*>(row)[chunk] = reinterpret_cast<const Chunk*>(from)[chunk];
  }
}

// One warp for each token and KV head.
template <typename To>
__global__ void write_slots(ReshapeAndCacheParams p, Pace pace, int32_t* faults) {
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanesOfWarp;
  if (warp >= p.num_tokens * p.pages.num_kv_heads) return;
  const int64_t token = warp / p.pages.num_kv_heads, head = warp % p.pages.num_kv_heads;
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  if (slot >= p.pages.num_blocks * p.pages.block_size) {
    report(faults, kBadSlots);
    return;
  }
  To* const block =
      static_cast<To*>(p.pages.data) + slot / p.pages.block_size * p.pages.block_stride;
  const int64_t offset = slot % p.pages.block_size;
  To* const keys = block + offset * p.pages.token_stride + head * p.pages.head_stride;
  To* const values = block + p.pages.kv_stride + offset * p.pages.value_token_stride +
                     head * p.pages.value_head_stride;
  const int32_t key_size = static_cast<int32_t>(p.pages.head_size);
  const int32_t value_size = static_cast<int32_t>(p.pages.value_head_size);
  const int64_t key = token * p.key_token_stride + head * p.key_head_stride;
  const int64_t value = token * p.value_token_stride + head * p.value_head_stride;
  if (pace == Pace::kChunks) {
    copy_rows_in_chunks(p.pages, static_cast<const To*>(p.key) + key,
                        static_cast<const To*>(p.value) + value, keys, values);
    return;
  }
  const float by_key = key_scale(p.pages, head), by_value = value_scale(p.pages, head);
  if (!is_scale(by_key)) report(faults, kBadKeyScales);
  if (!is_scale(by_value)) report(faults, kBadValueScales);
  if (pace == Pace::kFours) {
    write_row_of<4>(p.key, key, p.key_dtype, by_key, key_size, keys);
    write_row_of<4>(p.value, value, p.value_dtype, by_value, value_size, values);
  } else {
    write_row_of<1>(p.key, key, p.key_dtype, by_key, key_size, keys);
    write_row_of<1>(p.value, value, p.value_dtype, by_value, value_size, values);
  }
}

// Whether all rows of keys, of values and of the pages start at multiples of `unit` bytes, or of
// the size of `unit` numbers.
bool rows_start_at(const ReshapeAndCacheParams& p, int64_t unit, bool of_numbers) {
  const PagesParams& pages = p.pages;
  const auto fits = [&](const void* data, Dtype dtype, int64_t stride, int64_t other_stride) {
    const int64_t bytes = dtype_bytes(dtype), wanted = of_numbers ? unit * bytes : unit;
    return reinterpret_cast<intptr_t>(data) % wanted == 0 && stride * bytes % wanted == 0 &&
           other_stride * bytes % wanted == 0;
  };
  return fits(pages.data, pages.dtype, pages.block_stride, pages.kv_stride) &&
         fits(pages.data, pages.dtype, pages.head_stride, pages.token_stride) &&
         fits(pages.data, pages.dtype, pages.value_head_stride, pages.value_token_stride) &&
         fits(p.key, p.key_dtype, p.key_token_stride, p.key_head_stride) &&
         fits(p.value, p.value_dtype, p.value_token_stride, p.value_head_stride);
}

Pace pace_of(const ReshapeAndCacheParams& p) {
  const bool is_copy = p.key_dtype == p.pages.dtype && p.value_dtype == p.pages.dtype;
  if (is_copy && rows_start_at(p, kChunkBytes, false)) return Pace::kChunks;
  return rows_start_at(p, 4, true) ? Pace::kFours : Pace::kOnes;
}

}  // namespace

void reshape_and_cache(const ReshapeAndCacheParams& p, const Context& context) {
  const Pace pace = pace_of(p);
  const Grid grid = {div_ceil<int64_t>(p.num_tokens * p.pages.num_kv_heads, kWarps)};
  const auto run = [&](auto number) {
    constexpr auto kKernel = &write_slots<decltype(number)>;
    launch<kKernel>(grid, kWarps * kLanesOfWarp, 0, context.stream, p, pace, context.faults);
  };
  switch (p.pages.dtype) {
    case Dtype::kFloat32:
      return run(float{});
    case Dtype::kFloat16:
      return run(Half{});
    case Dtype::kBFloat16:
      return run(Bfloat{});
    case Dtype::kFloat8E4M3:
      return run(E4m3{});
    case Dtype::kFloat8E5M2:
      return run(E5m2{});
  }
}

}  // namespace kvplane::cuda
