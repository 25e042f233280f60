// The operations on a CUDA device. Each is put on a stream and not waited for.
//
// Pointers in the params structs are the device's, except the ids of blocks (pairs, block_ids): the
// host reads those, before the call returns. Sizes and those ids are checked at the call. What only
// the device can read is checked there: a kernel follows no id that is out of range, and reports it
// in `faults`. The output of a call that reported one means nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvplane/params.h"

namespace kvplane::cuda {

// Bits of the word that `faults` points to.
constexpr int32_t kBadBlockTables = 1;
constexpr int32_t kBadQueryStarts = 2;
constexpr int32_t kBadContextLens = 4;
constexpr int32_t kBadSlots = 8;
constexpr int32_t kBadKeyScales = 16;
constexpr int32_t kBadValueScales = 32;

struct Context {
  uintptr_t stream;  // a cudaStream_t
  int32_t* faults;   // on the device; bits are set, never cleared; may be null
};

struct AttentionOptions {
  int64_t max_query_len;  // no sequence has more query tokens; 0: not known
  int64_t split_tokens;   // a sequence with few rows is cut at multiples of it; of 64
  void* workspace;        // on the device; 256-byte aligned
  int64_t workspace_bytes;
};

int device_count();
void reshape_and_cache(const ReshapeAndCacheParams& params, const Context& context);
// Enough for every batch of these sizes, whatever its lengths: what a captured graph needs.
int64_t attention_workspace_bytes(const PagedAttentionParams& params, int64_t split_tokens);
void paged_attention(const PagedAttentionParams& params, const AttentionOptions& options,
                     const Context& context);
// Inside one device: a kernel. In order: a later pair sees what an earlier one wrote.
void copy_blocks(const CopyBlocksParams& params, const Context& context);
// Between device and host: what is large by the copy engines, the rest by a kernel. In order.
void swap_blocks(const CopyBlocksParams& params, const Context& context);
void gather_blocks(const PackBlocksParams& params, const Context& context);
void scatter_blocks(const PackBlocksParams& params, const Context& context);

}  // namespace kvplane::cuda
