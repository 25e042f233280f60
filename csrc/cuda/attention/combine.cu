// Combines the splits of each row into its output.
//
//   block   one query token at one query head; warp w adds up splits w, w + 8, ..., and the block
//           adds up the warps, in order: the same bits on any device and in any batch

#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/batch.cuh"
#include "cuda/device/launch.h"

namespace kvplane::cuda {
namespace {

constexpr int kCombineWarps = 8;
constexpr int kCombineThreads = kCombineWarps * kLanesOfWarp;
constexpr int kDimsOfLane = 4;  // that are read at once
constexpr int kDimsOfWarp = kDimsOfLane * kLanesOfWarp;

struct alignas(16) Four {
  float x[kDimsOfLane];
};

// By a whole warp: the largest score of a row, of all splits.
__device__ float maximum_of(const Work& work, int64_t row, int64_t stride, int32_t splits) {
  float maximum = -INFINITY;
  for (int32_t i = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp; i < splits;
       i += kLanesOfWarp) {
    maximum = fmaxf(maximum, work.scratch.partial_states[2 * (row + i * stride)]);
  }
  for (int bits = kLanesOfWarp / 2; bits > 0; bits /= 2) {
    maximum = fmaxf(maximum, __shfl_xor_sync(kWholeWarp, maximum, bits));
  }
  return maximum;
}

// By one warp: adds up its splits of up to kDimsOfWarp dims from `first_dim` on. Returns the sum
// of the weights, the same in each lane.
__device__ float add_splits(const Work& work, int64_t row, int64_t stride, int32_t splits,
                            float base, int32_t first_dim, float* to) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  const int32_t head_size = static_cast<int32_t>(work.p.pages.value_head_size);
  const int32_t dim = first_dim + kDimsOfLane * lane;
  Four out = {};
  float sum = 0.0f;
#pragma unroll 2
  for (int32_t i = warp; i < splits; i += kCombineWarps) {
    const int64_t from = row + i * stride;
    const float weight = exp2_fast(work.scratch.partial_states[2 * from] - base);
    sum += weight * work.scratch.partial_states[2 * from + 1];
    if (dim < head_size) {
      const Four values =
          *reinterpret_cast<const Four*>(work.scratch.partial_outs + from * head_size + dim);
#pragma unroll
      for (int j = 0; j < kDimsOfLane; ++j) out.x[j] += weight * values.x[j];
    }
  }
  if (dim < head_size) *reinterpret_cast<Four*>(to + dim) = out;
  return sum;
}

__device__ void combine_row(const Work& work, const Sequence& sequence, int32_t token, int32_t head,
                            float* outs, float* sums) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const int32_t head_size = static_cast<int32_t>(work.p.pages.value_head_size);
  const int64_t first = partial_row(work, sequence, 0, token, head);
  const int64_t stride = int64_t{sequence.query_len} * work.p.num_heads;
  const int32_t splits = sequence.cut.splits;
  const float base = finite_maximum(maximum_of(work, first, stride, splits));
  float sum = 0.0f;
  for (int32_t dim = 0; dim < head_size; dim += kDimsOfWarp) {
    sum = add_splits(work, first, stride, splits, base, dim, outs + warp * head_size);
  }
  if (threadIdx.x % kLanesOfWarp == 0) sums[warp] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kCombineWarps; ++w) sum += sums[w];
  const int64_t row = (sequence.first_token + token) * work.p.num_heads + head;
  const Total total = with_sink(work, head, base, sum);
  const float scale = value_scale(work.p.pages, head / work.cutting.group) * total.factor;
  for (int32_t d = static_cast<int32_t>(threadIdx.x); d < head_size; d += kCombineThreads) {
    float value = 0.0f;
#pragma unroll
    for (int w = 0; w < kCombineWarps; ++w) value += outs[w * head_size + d];
    store_number(work.p, row * head_size + d, value / total.sum * scale);
  }
  if (work.p.lse != nullptr && threadIdx.x == 0)
    work.p.lse[row] = log_sum_exp(total.maximum, total.sum);
  __syncthreads();  // Until the sums have been read.
}

__global__ void __launch_bounds__(kCombineThreads) combine_splits(Work work) {
  KVPLANE_DYNAMIC_SHARED(float, shared);
  wait_for_kernel_before();
  float* const sums = shared + kCombineWarps * work.p.pages.value_head_size;
  const int32_t num_sequences = static_cast<int32_t>(work.p.num_sequences);
  const int64_t num_rows = work.plan.split_ends[num_sequences - 1] * work.p.num_heads;
  for (int64_t i = blockIdx.x; i < num_rows; i += gridDim.x) {
    const int32_t token = static_cast<int32_t>(i / work.p.num_heads);
    const int32_t s = find_sequence(work.plan.split_ends, num_sequences, token);
    const int32_t local = token - (s == 0 ? 0 : work.plan.split_ends[s - 1]);
    combine_row(work, work.plan.sequences[s], local, static_cast<int32_t>(i % work.p.num_heads),
                shared, sums);
  }
}

}  // namespace

void launch_combine(const Work& work, uintptr_t stream) {
  const size_t floats = static_cast<size_t>(kCombineWarps * (work.p.pages.value_head_size + 1));
  const size_t bytes = floats * sizeof(float);
  const int64_t at_once = resident_blocks<&combine_splits>(kCombineThreads, bytes);
  const int64_t num_rows = min_of(work.p.num_tokens, work.max_partials / 2) * work.p.num_heads;
  launch_when<&combine_splits>(Begins::kEarly, {min_of(at_once, num_rows)}, kCombineThreads, bytes,
                               stream, work);
}

}  // namespace kvplane::cuda
