// Finds families: decodes whose contexts begin with the same blocks. The keys and values of these
// blocks are read for all of them at once (short/attention_shared.cuh).
//
// Two decodes are of one family if their tables have the same entry where the first split ends: ids
// of blocks of the same prefix. How many splits they really share is then found by comparing every
// entry with those of the family's first decode.

#include <climits>

#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/batch.cuh"
#include "cuda/attention/check_lengths.cuh"
#include "cuda/device/launch.h"

namespace kvplane::cuda {
namespace {

constexpr int kFamilyWarps = 4;
constexpr int kFamilyThreads = kFamilyWarps * kLanesOfWarp;
constexpr int kMaxGridOfFamilies = 1024;

__device__ int64_t entry_of(const Work& work, int32_t sequence, int32_t index) {
  const int64_t at = sequence * work.p.max_blocks + index;
  return work.p.wide_block_tables ? static_cast<const int64_t*>(work.p.block_tables)[at]
                                  : static_cast<const int32_t*>(work.p.block_tables)[at];
}

// Returns whether a sequence has one query token and several splits: it shares partial results.
__device__ bool can_share(const Work& work, int32_t s) {
  return check_lengths(work, s) == 0 && work.p.query_starts[s + 1] - work.p.query_starts[s] == 1 &&
         work.p.context_lens[s] > work.cutting.split_tokens;
}

// Four numbers, reduced over all threads of the block: the first two summed, of the others the
// minimum.
struct Found {
  int32_t num_before, num_all;
  int32_t first, mismatch;
};

__device__ Found of_block(Found own, Found* shared) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kLanesOfWarp;
  for (int bits = 1; bits < kLanesOfWarp; bits *= 2) {
    own.num_before += __shfl_xor_sync(kWholeWarp, own.num_before, bits);
    own.num_all += __shfl_xor_sync(kWholeWarp, own.num_all, bits);
    own.first = min_of(own.first, __shfl_xor_sync(kWholeWarp, own.first, bits));
    own.mismatch = min_of(own.mismatch, __shfl_xor_sync(kWholeWarp, own.mismatch, bits));
  }
  if (threadIdx.x % kLanesOfWarp == 0) shared[warp] = own;
  __syncthreads();
  own = shared[0];
  for (int w = 1; w < kFamilyWarps; ++w) {
    own.num_before += shared[w].num_before;
    own.num_all += shared[w].num_all;
    own.first = min_of(own.first, shared[w].first);
    own.mismatch = min_of(own.mismatch, shared[w].mismatch);
  }
  __syncthreads();  // Until all have read it.
  return own;
}

// By a block: finds the place of a sequence in its family.
__device__ Found find_family(const Work& work, int32_t s, Found* shared) {
  const int32_t index =
      static_cast<int32_t>((work.cutting.split_tokens - 1) / work.p.pages.block_size);
  const int64_t mark = entry_of(work, s, index);
  Found own = {0, 0, INT_MAX, INT_MAX};
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < work.p.num_sequences;
       i += kFamilyThreads) {
    if (!can_share(work, i) || entry_of(work, i, index) != mark) continue;
    own.num_before += i < s ? 1 : 0;
    own.num_all += 1;
    own.first = min_of(own.first, i);
  }
  return of_block(own, shared);
}

// By a block: counts the leading splits whose tokens are all in the same blocks of both sequences.
__device__ int32_t shared_splits(const Work& work, int32_t s, int32_t other, Found* shared) {
  const int32_t split_tokens = work.cutting.split_tokens;
  const int32_t block_size = static_cast<int32_t>(work.p.pages.block_size);
  const int32_t context_len =
      static_cast<int32_t>(min_of(work.p.context_lens[s], work.p.context_lens[other]));
  const int32_t tokens = context_len / split_tokens * split_tokens;
  const int32_t num_entries = div_ceil(tokens, block_size);
  Found own = {0, 0, INT_MAX, num_entries};
#pragma unroll 4
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < num_entries; i += kFamilyThreads) {
    if (entry_of(work, s, i) != entry_of(work, other, i)) own.mismatch = min_of(own.mismatch, i);
  }
  const int64_t same = int64_t{of_block(own, shared).mismatch} * block_size;
  return static_cast<int32_t>(min_of<int64_t>(same, tokens) / split_tokens);
}

__global__ void __launch_bounds__(kFamilyThreads) find_families(Work work) {
  KVPLANE_DYNAMIC_SHARED(Found, shared);
  let_next_kernel_begin();
  for (int32_t s = static_cast<int32_t>(blockIdx.x); s < work.p.num_sequences;
       s += static_cast<int32_t>(gridDim.x)) {
    Kin kin = {-1, 0, 0, 0};
    if (can_share(work, s)) {
      const Found found = find_family(work, s, shared);
      kin = {found.first, found.num_before, found.num_all, 0};
      if (kin.first != s) kin.splits = shared_splits(work, s, kin.first, shared);
    }
    if (threadIdx.x == 0) work.plan.kin[s] = kin;
  }
}

}  // namespace

void launch_families(const Work& work, uintptr_t stream) {
  const int64_t blocks = min_of<int64_t>(work.p.num_sequences, kMaxGridOfFamilies);
  launch<&find_families>({blocks}, kFamilyThreads, kFamilyWarps * sizeof(Found), stream, work);
}

}  // namespace kvplane::cuda
