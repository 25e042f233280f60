// Cuts a batch into items of work, on the device: the host does not know the lengths, so a graph
// that was captured with some lengths can run with others.

#include "attention_kernels.h"
#include "batch.cuh"
#include "launch.h"

namespace kvplane::cuda {
namespace {

template <typename T>
__device__ T sum_up_to_lane(T value) {
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfWarp;
  for (int by = 1; by < kLanesOfWarp; by *= 2) {
    const T other = __shfl_up_sync(kWholeWarp, value, static_cast<unsigned>(by));
    if (lane >= by) value += other;
  }
  return value;
}

// Each lane checks a head, 32 at a time.
__device__ void check_scales(const Work& work, const float* scales, int64_t stride, int32_t fault) {
  if (scales == nullptr) return;
  for (int64_t head = threadIdx.x; head < work.p.pages.num_kv_heads; head += kLanesOfWarp) {
    if (!is_scale(scales[head * stride])) report(work.faults, fault);
  }
}

// One warp; each lane handles a sequence, 32 at a time.
__global__ void plan_items(Work work) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  const int32_t num_sequences = static_cast<int32_t>(work.p.num_sequences);
  const int32_t group = static_cast<int32_t>(group_of(work.p));
  const int32_t num_kv_heads = static_cast<int32_t>(work.p.pages.num_kv_heads);
  const PagesParams& pages = work.p.pages;
  check_scales(work, pages.key_scales, pages.key_scale_stride, kBadKeyScales);
  check_scales(work, pages.value_scales, pages.value_scale_stride, kBadValueScales);
  int32_t num_short = 0, num_long = 0;
  int64_t num_partials = 0;
  for (int32_t first = 0; first < num_sequences; first += kLanesOfWarp) {
    const int32_t s = first + lane;
    int32_t short_items = 0, long_items = 0;
    int64_t partials = 0;
    if (s < num_sequences) {
      const int32_t fault = check_sequence(work, s);
      if (fault != 0) report(work.faults, fault);
      const Sequence sequence = sequence_at(work, s);
      const int32_t rows = sequence.query_len * group;
      const int32_t splits = num_splits(work, sequence);
      if (work.long_tile_rows == 0 || is_short(sequence.query_len, group)) {
        short_items = div_ceil(rows, work.short_tile_rows) * num_kv_heads * splits;
      } else {
        long_items = div_ceil(rows, work.long_tile_rows) * num_kv_heads;
      }
      if (splits > 1) partials = int64_t{splits} * sequence.query_len * work.p.num_heads;
    }
    const int32_t short_end = num_short + sum_up_to_lane(short_items);
    const int32_t long_end = num_long + sum_up_to_lane(long_items);
    const int64_t partial_end = num_partials + sum_up_to_lane(partials);
    if (s < num_sequences) {
      work.plan.short_ends[s] = short_end;
      work.plan.long_ends[s] = long_end;
      work.plan.partial_starts[s] = partial_end - partials;
    }
    num_short = __shfl_sync(kWholeWarp, short_end, kLanesOfWarp - 1);
    num_long = __shfl_sync(kWholeWarp, long_end, kLanesOfWarp - 1);
    num_partials = __shfl_sync(kWholeWarp, partial_end, kLanesOfWarp - 1);
  }
}

constexpr int kCombineWarps = 4;

// One warp for each query head of a sequence: combines the splits of its rows, in order.
__global__ void combine_splits(Work work) {
  const Sequence sequence = sequence_at(work, static_cast<int32_t>(blockIdx.x));
  const int32_t splits = num_splits(work, sequence);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kLanesOfWarp;
  const int32_t head = static_cast<int32_t>(blockIdx.y) * kCombineWarps + warp;
  if (splits == 1 || head >= work.p.num_heads) return;
  const int32_t head_size = static_cast<int32_t>(work.p.pages.head_size);
  for (int32_t token = 0; token < sequence.query_len; ++token) {
    float maximum = -INFINITY;
    for (int32_t i = lane; i < splits; i += kLanesOfWarp) {
      const int64_t row = partial_row(work, sequence, i, token, head);
      maximum = fmaxf(maximum, work.plan.partial_states[2 * row]);
    }
    for (int bits = kLanesOfWarp / 2; bits > 0; bits /= 2) {
      maximum = fmaxf(maximum, __shfl_xor_sync(kWholeWarp, maximum, bits));
    }
    maximum = finite_maximum(maximum);
    float sum = 0.0f;
    float out[kMaxHeadSize / kLanesOfWarp] = {};
#pragma unroll 4
    for (int32_t i = 0; i < splits; ++i) {
      const int64_t row = partial_row(work, sequence, i, token, head);
      const float weight = exp2_fast(work.plan.partial_states[2 * row] - maximum);
      sum += weight * work.plan.partial_states[2 * row + 1];
#pragma unroll
      for (int32_t d = 0; d < kMaxHeadSize / kLanesOfWarp; ++d) {
        const int32_t dim = d * kLanesOfWarp + lane;
        if (dim < head_size) out[d] += weight * work.plan.partial_outs[row * head_size + dim];
      }
    }
    const int64_t row = (sequence.first_token + token) * work.p.num_heads + head;
    const float scale = value_scale(work.p.pages, head / group_of(work.p));
#pragma unroll
    for (int32_t d = 0; d < kMaxHeadSize / kLanesOfWarp; ++d) {
      const int32_t dim = d * kLanesOfWarp + lane;
      if (dim < head_size) store_number(work.p, row * head_size + dim, out[d] / sum * scale);
    }
    if (work.p.lse != nullptr && lane == 0) work.p.lse[row] = log_sum_exp(maximum, sum);
  }
}

}  // namespace

void launch_plan(const Work& work, uintptr_t stream) {
  launch(&plan_items, {1}, kLanesOfWarp, 0, stream, work);
}

void launch_combine(const Work& work, uintptr_t stream) {
  const Grid grid = {work.p.num_sequences, div_ceil<int64_t>(work.p.num_heads, kCombineWarps)};
  launch(&combine_splits, grid, kCombineWarps * kLanesOfWarp, 0, stream, work);
}

}  // namespace kvplane::cuda
