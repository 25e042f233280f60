// Decodes of a family: the splits that they share, as attention_short.cuh attends to a split, with
// rows of several sequences in a tile. So their keys and values are read once for all of a tile's
// sequences. Each row's partial result goes where it would go if it were computed alone, and has
// the same bits: nothing in a row's arithmetic depends on the other rows of its tile.
#pragma once

#include "cuda/attention/short/attention_short.cuh"

namespace kvplane::cuda {

// Columns of eight rows, a product's narrow side; 0 where families have no tiles.
template <int kHeadSize>
constexpr int kFamilyColumns = rows_of_families(kHeadSize) / 8;

// All items take as long, so each block takes an equal number of them, one after another.
template <typename Kv, int kHeadSize>
__global__ void __launch_bounds__(kShortWarps<Kv, kHeadSize>* kLanesOfWarp, 1)
    attend_shared(Work work) {
  constexpr int kColumns = kFamilyColumns<kHeadSize>;
  KVPLANE_DYNAMIC_SHARED(unsigned char, shared);
  wait_for_kernel_before();
  let_next_kernel_begin();
  const int32_t* ends = work.plan.shared_ends;
  const int32_t num_sequences = static_cast<int32_t>(work.p.num_sequences);
  const int64_t num_items = ends[num_sequences - 1];
  const int32_t share_end = static_cast<int32_t>(num_items * (blockIdx.x + 1) / gridDim.x);
  int32_t at = static_cast<int32_t>(num_items * blockIdx.x / gridDim.x);
  while (at < share_end) {
    const int32_t member = find_sequence(ends, num_sequences, at);
    const int32_t before = member == 0 ? 0 : ends[member - 1];
    const int32_t splits = (ends[member] - before) / work.cutting.num_kv_heads;
    const int32_t split = (at - before) % splits;
    const int32_t num_splits = min_of(splits - split, share_end - at);
    const Kin kin = work.plan.kin[work.plan.members[member]];
    const int32_t num_members = min_of(members_of_tile(work), kin.size - kin.rank);
    const Item item = {
        work.plan.sequences[kin.first], (at - before) / splits, 0, split, 0, member, num_members};
    attend_run<Kv, kHeadSize, kColumns, kFewStages<Kv, kHeadSize>, true>(work, item, num_splits,
                                                                         shared);
    at += num_splits;
  }
}

template <typename Kv, int kHeadSize>
constexpr size_t kSharedBytesOfFamilies =
    ShortRing<Kv, kHeadSize, max_of(1, kFamilyColumns<kHeadSize>),
              kFewStages<Kv, kHeadSize>>::kSharedBytes;

template <typename Kv>
void launch_shared(const Work& work, const Launch& how) {
  with_head_size(work.p.pages.head_size, [&](auto head_size) {
    if constexpr (rows_of_families(head_size) > 0) {
      constexpr int kThreads = kShortWarps<Kv, head_size> * kLanesOfWarp;
      constexpr size_t kBytes = kSharedBytesOfFamilies<Kv, head_size>;
      constexpr auto kKernel = &attend_shared<Kv, head_size>;
      const int64_t at_once = resident_blocks<kKernel>(kThreads, kBytes);
      launch_when<kKernel>(how.begins, {min_of(at_once, how.max_items)}, kThreads, kBytes,
                           how.stream, work);
    }
  });
}

template <typename Kv>
size_t shared_memory_of_families(int64_t head_size) {
  return with_head_size(head_size, [](auto size) -> size_t {
    return rows_of_families(size) > 0 ? kSharedBytesOfFamilies<Kv, size> : 0;
  });
}

}  // namespace kvplane::cuda
