// Whether a sequence's lengths can be used.
#pragma once

#include "cuda/attention/batch.cuh"

namespace kvplane::cuda {

// The fault of a sequence's lengths, or 0.
__device__ inline int32_t check_lengths(const Work& work, int32_t s) {
  const PagedAttentionParams& p = work.p;
  const int64_t begin = p.query_starts[s], end = p.query_starts[s + 1];
  if (begin < 0 || end < begin || end > p.num_tokens) return kBadQueryStarts;
  if (s == 0 && begin != 0) return kBadQueryStarts;
  if (s + 1 == p.num_sequences && end != p.num_tokens && !p.is_padded) return kBadQueryStarts;
  const int64_t query_len = end - begin;
  if (work.max_query_len > 0 && query_len > work.max_query_len) return kBadQueryStarts;
  const int64_t context_len = p.context_lens[s];
  if (context_len < query_len) return kBadContextLens;
  if (query_len > 0 && context_len > p.max_blocks * p.pages.block_size) return kBadContextLens;
  return 0;
}

}  // namespace kvplane::cuda
