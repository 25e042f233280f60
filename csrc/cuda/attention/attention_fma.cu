// Attention in fp32 arithmetic, for fp32 and for every mixture of types that the kernels for tensor
// cores do not take.
//
//   block   16 rows of one KV head, four per warp; a tile of 32 tokens in shared memory as fp32
//   scores  each lane has one token;  output  each lane has every 32nd dim

#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/batch.cuh"
#include "cuda/device/launch.h"

namespace kvplane::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kLanesOfWarp;
constexpr int kRowsOfWarp = kRowsOfFmaTile / kWarps;
constexpr int kTokens = kTokensOfFmaTile;
static_assert(kTokens == kLanesOfWarp);

// Dims that a lane holds of a row's output: for heads of up to 256, and for larger ones.
constexpr int kFewDims = 256 / kLanesOfWarp;
constexpr int kMostDims = kMaxHeadSize / kLanesOfWarp;

// A block's shared memory, in floats. A key's pitch is odd, so that lanes read different banks.
// Where heads are large, values take the place of the keys: both would not fit on every device.
struct Layout {
  int32_t head_size;
  int32_t value_size;  // at most head_size

  __host__ __device__ bool in_turn() const { return head_size > kFewDims * kLanesOfWarp; }
  __host__ __device__ int32_t queries() const { return 0; }  // [16, head_size]
  __host__ __device__ int32_t keys() const { return kRowsOfFmaTile * head_size; }
  __host__ __device__ int32_t values() const {
    return in_turn() ? keys() : keys() + kTokens * (head_size + 1);
  }
  __host__ __device__ int32_t probabilities() const {
    return keys() + kTokens * (head_size + 1) + (in_turn() ? 0 : kTokens * value_size);
  }
  __host__ __device__ int32_t size() const {
    return probabilities() + kRowsOfFmaTile * kTokens;  // [16, 32]
  }
};

Layout layout_of(const PagedAttentionParams& p) {
  return {static_cast<int32_t>(p.pages.head_size), static_cast<int32_t>(p.pages.value_head_size)};
}

template <int kDims>
struct Row {
  int32_t position;  // -1 for a missing row
  float slope;       // in base 2
  float maximum;
  float sum;  // of this lane's tokens
  float out[kDims];
};

// Missing rows, and tokens that no row attends to, are zeros.
template <typename T>
__device__ void load_row(const T* from, int32_t head_size, float* to) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  for (int32_t d = lane; d < head_size; d += kLanesOfWarp) {
    to[d] = from == nullptr ? 0.0f : to_float(from[d]);
  }
}

// Loads a tile of keys or of values.
template <typename Kv>
__device__ void load_tile(const Work& work, const Item& item, Range seen, int32_t tile,
                          bool is_value, int32_t size, int32_t pitch, float* to) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const Kv* data = static_cast<const Kv*>(work.p.pages.data);
  for (int32_t i = warp; i < kTokens; i += kWarps) {
    const int64_t row =
        find_row(work, item.sequence.index, item.kv_head, tile * kTokens + i, seen, is_value);
    load_row(row < 0 ? nullptr : data + row, size, to + i * pitch);
  }
}

__device__ float dot(const float* query, const float* key, int32_t head_size) {
  float sums[4] = {};
  for (int32_t d = 0; d < head_size; d += 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += query[d + i] * key[d + i];
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Scores a tile for a warp's rows and turns the scores into probabilities. `scale` turns products
// into scores in base 2.
template <int kDims>
__device__ void take_keys(const Work& work, const Item& item, int32_t first_row, Range seen,
                          int32_t tile, float scale, Layout layout, float* shared,
                          Row<kDims> (&rows)[kRowsOfWarp]) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  const int32_t position = tile * kTokens + lane;
  const SoftCap cap = soft_cap(work);
  float* probabilities = shared + layout.probabilities() + warp * kRowsOfWarp * kTokens;
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    Row<kDims>& row = rows[i];
    const Range own = visible(work.cutting.window, row.position);
    bool is_seen =
        position >= max_of(own.begin, seen.begin) && position < min_of(own.end, seen.end);
    if (work.p.blocks.seen != nullptr) {
      const RowPlace at = place_of_row<false>(work, item, first_row + warp * kRowsOfWarp + i);
      is_seen &= sees_block(work, item.sequence.index, at.head, row.position, position);
    }
    const float* query = shared + layout.queries() + (warp * kRowsOfWarp + i) * layout.head_size;
    const float* key = shared + layout.keys() + lane * (layout.head_size + 1);
    float score = cap.of<false>(dot(query, key, layout.head_size) * scale) +
                  row.slope * static_cast<float>(position - row.position);
    score = is_seen ? score : -INFINITY;
    float maximum = fmaxf(row.maximum, score);
#pragma unroll
    for (int bits = kLanesOfWarp / 2; bits > 0; bits /= 2) {
      maximum = fmaxf(maximum, __shfl_xor_sync(kWholeWarp, maximum, bits));
    }
    const float base = finite_maximum(maximum);
    const float rescale = exp2f(row.maximum - base);
    const float probability = exp2f(score - base);
    row.maximum = maximum;
    row.sum = row.sum * rescale + probability;
    probabilities[i * kTokens + lane] = probability;
#pragma unroll
    for (int d = 0; d < kDims; ++d) row.out[d] *= rescale;
  }
  __syncwarp();
}

template <int kDims>
__device__ void add_values(Layout layout, const float* shared, Row<kDims> (&rows)[kRowsOfWarp]) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  const float* probabilities = shared + layout.probabilities() + warp * kRowsOfWarp * kTokens;
  for (int32_t token = 0; token < kTokens; ++token) {
    const float* value = shared + layout.values() + token * layout.value_size;
#pragma unroll
    for (int d = 0; d < kDims; ++d) {
      const int32_t dim = d * kLanesOfWarp + lane;
      if (dim >= layout.value_size) break;
#pragma unroll
      for (int i = 0; i < kRowsOfWarp; ++i) {
        rows[i].out[d] += probabilities[i * kTokens + token] * value[dim];
      }
    }
  }
}

// The query's element at an index of the tensor, from any of its types.
__device__ void load_query(const PagedAttentionParams& p, bool there, int64_t index,
                           int32_t head_size, float* to) {
  if (p.query_dtype == Dtype::kFloat32) {
    load_row(there ? static_cast<const float*>(p.query) + index : nullptr, head_size, to);
  } else if (p.query_dtype == Dtype::kFloat16) {
    load_row(there ? static_cast<const Half*>(p.query) + index : nullptr, head_size, to);
  } else {
    load_row(there ? static_cast<const Bfloat*>(p.query) + index : nullptr, head_size, to);
  }
}

template <int kDims>
__device__ void begin_rows(const Work& work, const Item& item, int32_t first_row, int32_t num_rows,
                           Layout layout, float* shared, Row<kDims> (&rows)[kRowsOfWarp]) {
  const int32_t group = work.cutting.group;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    const int32_t index = warp * kRowsOfWarp + i;
    const bool there = index < num_rows;
    const int32_t token = (first_row + index) / group;
    const int32_t head = item.kv_head * group + (first_row + index) % group;
    const int64_t query = (item.sequence.first_token + token) * work.p.query_token_stride +
                          head * work.p.query_head_stride;
    load_query(work.p, there, query, layout.head_size,
               shared + layout.queries() + index * layout.head_size);
    const bool is_biased = there && work.p.alibi_slopes != nullptr;
    rows[i] = {there ? item.sequence.first_position() + token : -1,
               is_biased ? work.p.alibi_slopes[head] * kLog2E : 0.0f,
               -INFINITY,
               0.0f,
               {}};
  }
}

template <int kDims>
__device__ void end_rows(const Work& work, const Item& item, int32_t first_row, int32_t num_rows,
                         const Row<kDims> (&rows)[kRowsOfWarp]) {
  const int32_t group = work.cutting.group;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  const int32_t head_size = static_cast<int32_t>(work.p.pages.value_head_size);
  const bool is_whole = item.sequence.cut.splits == 1;
  const float scale = value_scale(work.p.pages, item.kv_head);
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    const Row<kDims>& row = rows[i];
    float sum = row.sum;
#pragma unroll
    for (int bits = kLanesOfWarp / 2; bits > 0; bits /= 2) {
      sum += __shfl_xor_sync(kWholeWarp, sum, bits);
    }
    const int32_t index = warp * kRowsOfWarp + i;
    if (index >= num_rows) continue;
    const int32_t token = (first_row + index) / group;
    const int32_t head = item.kv_head * group + (first_row + index) % group;
    const int64_t at = (item.sequence.first_token + token) * work.p.num_heads + head;
    const int64_t partial = partial_row(work, item.sequence, item.split, token, head);
    const Total total = with_sink(work, head, row.maximum, sum);
#pragma unroll
    for (int d = 0; d < kDims; ++d) {
      const int32_t dim = d * kLanesOfWarp + lane;
      if (dim >= head_size) break;
      if (is_whole) {
        store_number(work.p, at * head_size + dim, row.out[d] / total.sum * (scale * total.factor));
      } else {
        work.scratch.partial_outs[partial * head_size + dim] = row.out[d];
      }
    }
    if (lane != 0) continue;
    if (!is_whole) {
      work.scratch.partial_states[2 * partial] = row.maximum;
      work.scratch.partial_states[2 * partial + 1] = sum;
    } else if (work.p.lse != nullptr) {
      work.p.lse[at] = log_sum_exp(total.maximum, total.sum);
    }
  }
}

template <typename Kv, int kDims>
__global__ void __launch_bounds__(kThreads) attend_fma(Work work, Layout layout) {
  KVPLANE_DYNAMIC_SHARED(float, shared);
  wait_for_kernel_before();
  let_next_kernel_begin();
  begin_call(work);
  const int32_t num_items = work.plan.short_ends[work.p.num_sequences - 1];
  for (int32_t i = static_cast<int32_t>(blockIdx.x); i < num_items;
       i += static_cast<int32_t>(gridDim.x)) {
    const Item item = find_item(work, work.plan.short_ends, nullptr, kRowsOfFmaTile, 1, i);
    const int32_t first_row = item.tile * kRowsOfFmaTile;
    const int32_t all_rows = item.sequence.query_len * work.cutting.group;
    const int32_t num_rows = min_of(kRowsOfFmaTile, all_rows - first_row);
    const Range seen = range_of(work, item, first_row, num_rows);
    const float scale = finite(work.p.scale * kLog2E * key_scale(work.p.pages, item.kv_head));
    const auto load_values = [&](int32_t tile) {
      load_tile<Kv>(work, item, seen, tile, true, layout.value_size, layout.value_size,
                    shared + layout.values());
    };
    Row<kDims> rows[kRowsOfWarp];
    begin_rows(work, item, first_row, num_rows, layout, shared, rows);
    for (int32_t tile = seen.begin / kTokens; tile * kTokens < seen.end; ++tile) {
      if (rows_that_see(work, item, first_row, num_rows, tile * kTokens, kTokens) == 0) {
        continue;
      }
      __syncthreads();  // Until the previous tile has been read.
      load_tile<Kv>(work, item, seen, tile, false, layout.head_size, layout.head_size + 1,
                    shared + layout.keys());
      if (!layout.in_turn()) load_values(tile);
      __syncthreads();
      take_keys(work, item, first_row, seen, tile, scale, layout, shared, rows);
      if (layout.in_turn()) {
        __syncthreads();  // Until the keys have been read.
        load_values(tile);
        __syncthreads();
      }
      add_values(layout, shared, rows);
    }
    end_rows(work, item, first_row, num_rows, rows);
    __syncthreads();  // Until the queries have been read.
  }
}

template <typename Kv, int kDims>
void launch_fma_with(const Work& work, const Launch& how) {
  const Layout layout = layout_of(work.p);
  const size_t bytes = static_cast<size_t>(layout.size()) * sizeof(float);
  constexpr auto kKernel = &attend_fma<Kv, kDims>;
  const int64_t at_once = resident_blocks<kKernel>(kThreads, bytes);
  launch_when<kKernel>(how.begins, {min_of(at_once, how.max_items)}, kThreads, bytes, how.stream,
                       work, layout);
}

template <typename Kv>
void launch_fma_of(const Work& work, const Launch& how) {
  if (work.p.pages.head_size <= kFewDims * kLanesOfWarp) {
    launch_fma_with<Kv, kFewDims>(work, how);
  } else {
    launch_fma_with<Kv, kMostDims>(work, how);
  }
}

}  // namespace

void launch_fma(const Work& work, const Launch& how) {
  switch (work.p.pages.dtype) {
    case Dtype::kFloat32:
      return launch_fma_of<float>(work, how);
    case Dtype::kFloat16:
      return launch_fma_of<Half>(work, how);
    case Dtype::kBFloat16:
      return launch_fma_of<Bfloat>(work, how);
    case Dtype::kFloat8E4M3:
      return launch_fma_of<E4m3>(work, how);
    case Dtype::kFloat8E5M2:
      return launch_fma_of<E5m2>(work, how);
  }
}

}  // namespace kvplane::cuda
