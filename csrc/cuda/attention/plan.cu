// Cuts a batch into items of work, on the device: the host need not know the lengths, so a graph
// that was captured with some lengths can run with others. Once for all layers of a step.

#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/batch.cuh"
#include "cuda/device/launch.h"

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

__device__ int32_t check_sequence(const Work& work, int32_t s) {
  const PagedAttentionParams& p = work.p;
  const int64_t begin = p.query_starts[s], end = p.query_starts[s + 1];
  if (begin < 0 || end < begin || end > p.num_tokens) return kBadQueryStarts;
  if ((s == 0 && begin != 0) || (s + 1 == p.num_sequences && end != p.num_tokens)) {
    return kBadQueryStarts;
  }
  const int64_t query_len = end - begin;
  if (work.max_query_len > 0 && query_len > work.max_query_len) return kBadQueryStarts;
  const int64_t context_len = p.context_lens[s];
  if (context_len < query_len) return kBadContextLens;
  if (query_len > 0 && context_len > p.max_blocks * p.pages.block_size) return kBadContextLens;
  return 0;
}

// A sequence whose lengths are wrong has no query tokens, and so no items.
__device__ Sequence read_sequence(const Work& work, int32_t s) {
  const int32_t fault = check_sequence(work, s);
  if (fault != 0) {
    report(work.faults, fault);
    return {0, 0, s, 0, 0, cut_of(work.cutting, 0, 0), 1};
  }
  const int64_t begin = work.p.query_starts[s];
  const int32_t query_len = static_cast<int32_t>(work.p.query_starts[s + 1] - begin);
  // The context length of a sequence without query tokens may be anything; it is not used.
  const int32_t context_len = query_len == 0 ? 0 : static_cast<int32_t>(work.p.context_lens[s]);
  const Cut cut = cut_of(work.cutting, query_len, context_len);
  return {begin, 0, s, query_len, context_len, cut, weight_of(cut, context_len)};
}

// One warp; each lane handles a sequence, 32 at a time.
__global__ void plan_items(Work work) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  const int32_t num_sequences = static_cast<int32_t>(work.p.num_sequences);
  let_next_kernel_begin();
  int32_t short_end = 0, long_end = 0, split_end = 0;
  int64_t partial_end = 0, weight_end = 0;
  for (int32_t first = 0; first < num_sequences; first += kLanesOfWarp) {
    const int32_t s = first + lane;
    Sequence sequence = {};
    if (s < num_sequences) sequence = read_sequence(work, s);
    const int64_t partials = num_partials(sequence.cut, sequence.query_len);
    const int64_t partial_end_of_lane = partial_end + sum_up_to_lane(partials);
    // Partial results for which there is no room are never computed.
    const bool fits = partials == 0 || partial_end_of_lane <= work.max_partials;
    if (!fits) report(work.faults, kBadWorkspace);
    const int32_t rows = fits ? sequence.query_len * work.cutting.group : 0;
    const bool in_short_list =
        work.long_tile_rows == 0 || is_short(sequence.query_len, work.cutting.group);
    const int32_t tile_rows = in_short_list ? work.short_tile_rows : work.long_tile_rows;
    const int32_t parts = in_short_list ? 1 : work.long_parts;
    const int32_t items =
        div_ceil(rows, tile_rows) * work.cutting.num_kv_heads * sequence.cut.splits * parts;
    const int32_t short_end_of_lane = short_end + sum_up_to_lane(in_short_list ? items : 0);
    const int32_t long_end_of_lane = long_end + sum_up_to_lane(in_short_list ? 0 : items);
    const int64_t weight = in_short_list ? int64_t{items} * sequence.weight : 0;
    const int64_t weight_end_of_lane = weight_end + sum_up_to_lane(weight);
    const bool is_split = fits && partials > 0;
    const int32_t split_end_of_lane = split_end + sum_up_to_lane(is_split ? sequence.query_len : 0);
    if (s < num_sequences) {
      sequence.first_partial = (partial_end_of_lane - partials) * work.p.num_heads;
      work.plan.sequences[s] = sequence;
      work.plan.short_ends[s] = short_end_of_lane;
      work.plan.weights[s] = weight_end_of_lane;
      work.plan.long_ends[s] = long_end_of_lane;
      work.plan.split_ends[s] = split_end_of_lane;
    }
    short_end = __shfl_sync(kWholeWarp, short_end_of_lane, kLanesOfWarp - 1);
    long_end = __shfl_sync(kWholeWarp, long_end_of_lane, kLanesOfWarp - 1);
    split_end = __shfl_sync(kWholeWarp, split_end_of_lane, kLanesOfWarp - 1);
    partial_end = __shfl_sync(kWholeWarp, partial_end_of_lane, kLanesOfWarp - 1);
    weight_end = __shfl_sync(kWholeWarp, weight_end_of_lane, kLanesOfWarp - 1);
  }
}

}  // namespace

void launch_plan(const Work& work, uintptr_t stream) {
  launch<&plan_items>({1}, kLanesOfWarp, 0, stream, work);
}

}  // namespace kvplane::cuda
