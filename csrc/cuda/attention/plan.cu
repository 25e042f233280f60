// Cuts a batch into items of work, on the device: the host need not know the lengths, so a graph
// that was captured with some lengths can run with others. Once for all layers of a step.

#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/batch.cuh"
#include "cuda/attention/check_lengths.cuh"
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

// A sequence whose lengths are wrong has no query tokens, and so no items.
__device__ Sequence read_sequence(const Work& work, int32_t s) {
  const int32_t fault = check_lengths(work, s);
  if (fault != 0) {
    report(work.faults, fault);
    return {0, 0, s, 0, 0, cut_of(work.cutting, 0, 0), 1, 0};
  }
  const int64_t begin = work.p.query_starts[s];
  const int32_t query_len = static_cast<int32_t>(work.p.query_starts[s + 1] - begin);
  // The context length of a sequence without query tokens may be anything; it is not used.
  const int32_t context_len = query_len == 0 ? 0 : static_cast<int32_t>(work.p.context_lens[s]);
  const Cut cut = cut_of(work.cutting, query_len, context_len);
  return {begin, 0, s, query_len, context_len, cut, weight_of(cut, context_len), 0};
}

// By the warp: lists the members of each family, one after another. Returns how many there are.
__device__ int32_t list_members(const Work& work) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  const int32_t num_sequences = static_cast<int32_t>(work.p.num_sequences);
  const Plan& plan = work.plan;
  int32_t end = 0;
  for (int32_t first = 0; first < num_sequences; first += kLanesOfWarp) {
    const int32_t s = first + lane;
    const Kin kin = s < num_sequences ? plan.kin[s] : Kin{-1, 0, 0, 0};
    const int32_t size = kin.first == s && kin.size > 1 ? kin.size : 0;
    const int32_t end_of_lane = end + sum_up_to_lane(size);
    if (size > 0) {
      plan.family_starts[s] = end_of_lane - size;
      plan.family_splits[s] = 0;
    }
    end = __shfl_sync(kWholeWarp, end_of_lane, kLanesOfWarp - 1);
  }
  __syncwarp();
  for (int32_t s = lane; s < num_sequences; s += kLanesOfWarp) {
    const Kin kin = plan.kin[s];
    if (kin.size <= 1) continue;
    plan.members[plan.family_starts[kin.first] + kin.rank] = s;
    atomicMax(&plan.family_splits[kin.first], kin.splits);
  }
  __syncwarp();
  return end;
}

__device__ int32_t shared_splits_of(const Work& work, int32_t s) {
  const Kin kin = work.plan.kin[s];
  if (kin.size <= 1) return 0;
  return kin.first == s ? work.plan.family_splits[s] : kin.splits;
}

// By the warp: the items of tiles of several decodes. A tile begins with a member of a family whose
// rank is a multiple of a tile's members, and has the splits of its member that shares most.
__device__ void plan_shared(const Work& work, int32_t num_members) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  const int32_t num_sequences = static_cast<int32_t>(work.p.num_sequences);
  const int32_t of_tile = members_of_tile(work);
  int32_t end = 0;
  for (int32_t first = 0; first < num_sequences; first += kLanesOfWarp) {
    const int32_t i = first + lane;
    int32_t splits = 0;
    if (i < num_members) {
      const Kin kin = work.plan.kin[work.plan.members[i]];
      const int32_t count = kin.rank % of_tile == 0 ? min_of(of_tile, kin.size - kin.rank) : 0;
      for (int32_t j = 0; j < count; ++j) {
        splits = max_of(splits, work.plan.sequences[work.plan.members[i + j]].shared_splits);
      }
    }
    const int32_t end_of_lane = end + sum_up_to_lane(splits * work.cutting.num_kv_heads);
    if (i < num_sequences) work.plan.shared_ends[i] = end_of_lane;
    end = __shfl_sync(kWholeWarp, end_of_lane, kLanesOfWarp - 1);
  }
}

__device__ int32_t num_items(const Work& work, const Sequence& sequence, int32_t tile_rows,
                             int32_t parts) {
  const int32_t tiles = div_ceil(sequence.query_len * work.cutting.group, tile_rows);
  const int32_t own_splits = sequence.cut.splits - sequence.shared_splits;
  return tiles * work.cutting.num_kv_heads * own_splits * parts;
}

// By the warp: the order of `num_long` sequences that `long_ends` lists, those with the longest
// items first, so that no block begins a long item when the others are about to end. Sequences with
// items as long stay in the batch's order. Then `long_ends` gets their items.
__device__ void order_long(const Work& work, int32_t num_long) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  const int32_t num_sequences = static_cast<int32_t>(work.p.num_sequences);
  const Plan& plan = work.plan;
  // 0, less than any weight, where there is none.
  const auto weight = [&](int32_t i) {
    return i < num_long ? plan.sequences[plan.long_ends[i]].weight : 0;
  };
  for (int32_t first = 0; first < num_long; first += kLanesOfWarp) {
    const int32_t i = first + lane, own = weight(i);
    int32_t num_before = 0;
    for (int32_t others = 0; others < num_long; others += kLanesOfWarp) {
      const int32_t of_lane = weight(others + lane);
      for (int j = 0; j < kLanesOfWarp; ++j) {
        const int32_t other = __shfl_sync(kWholeWarp, of_lane, j);
        num_before += other > own || (other == own && others + j < i) ? 1 : 0;
      }
    }
    if (i < num_long) plan.long_order[num_before] = plan.long_ends[i];
  }
  __syncwarp();  // Until the order is there, and the list has been read.
  int32_t end = 0;
  for (int32_t first = 0; first < num_sequences; first += kLanesOfWarp) {
    const int32_t i = first + lane;
    int32_t items = 0;
    if (i < num_long) {
      const Sequence sequence = plan.sequences[plan.long_order[i]];
      items = num_items(work, sequence, work.long_tile_rows, work.long_parts);
    }
    const int32_t end_of_lane = end + sum_up_to_lane(items);
    if (i < num_sequences) plan.long_ends[i] = end_of_lane;
    end = __shfl_sync(kWholeWarp, end_of_lane, kLanesOfWarp - 1);
  }
}

// One warp; each lane handles a sequence, 32 at a time.
__global__ void plan_items(Work work) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  const int32_t num_sequences = static_cast<int32_t>(work.p.num_sequences);
  wait_for_kernel_before();
  let_next_kernel_begin();
  const int32_t num_members = work.shared_rows > 0 ? list_members(work) : 0;
  int32_t short_end = 0, num_long = 0, split_end = 0;
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
    const bool in_short_list =
        work.long_tile_rows == 0 || is_short(sequence.query_len, work.cutting.group);
    if (work.shared_rows > 0 && fits && partials > 0) {
      sequence.shared_splits = shared_splits_of(work, s);
    }
    const int32_t items =
        fits && in_short_list ? num_items(work, sequence, work.short_tile_rows, 1) : 0;
    const int32_t short_end_of_lane = short_end + sum_up_to_lane(items);
    const int64_t weight_end_of_lane =
        weight_end + sum_up_to_lane(int64_t{items} * sequence.weight);
    const bool is_long = fits && !in_short_list;
    const int32_t num_long_of_lane = num_long + sum_up_to_lane(is_long ? 1 : 0);
    const bool is_split = fits && partials > 0;
    const int32_t split_end_of_lane = split_end + sum_up_to_lane(is_split ? sequence.query_len : 0);
    if (s < num_sequences) {
      sequence.first_partial = (partial_end_of_lane - partials) * work.p.num_heads;
      work.plan.sequences[s] = sequence;
      work.plan.short_ends[s] = short_end_of_lane;
      work.plan.weights[s] = weight_end_of_lane;
      if (is_long) work.plan.long_ends[num_long_of_lane - 1] = s;
      work.plan.split_ends[s] = split_end_of_lane;
    }
    short_end = __shfl_sync(kWholeWarp, short_end_of_lane, kLanesOfWarp - 1);
    num_long = __shfl_sync(kWholeWarp, num_long_of_lane, kLanesOfWarp - 1);
    split_end = __shfl_sync(kWholeWarp, split_end_of_lane, kLanesOfWarp - 1);
    partial_end = __shfl_sync(kWholeWarp, partial_end_of_lane, kLanesOfWarp - 1);
    weight_end = __shfl_sync(kWholeWarp, weight_end_of_lane, kLanesOfWarp - 1);
  }
  __syncwarp();  // Until all lanes have stored their sequences.
  if (work.long_tile_rows > 0) order_long(work, num_long);
  if (work.shared_rows > 0) plan_shared(work, num_members);
}

}  // namespace

void launch_plan(const Work& work, uintptr_t stream) {
  Begins begins = Begins::kInOrder;
  if (work.shared_rows > 0) {
    launch_families(work, stream);
    begins = Begins::kEarly;
  }
  launch_when<&plan_items>(begins, {1}, kLanesOfWarp, 0, stream, work);
}

}  // namespace kvplane::cuda
