// The operations on a CUDA device. Each is queued on a stream and not waited for.
//
// Pointers in the params structs are to device memory, except for ids of blocks (pairs, block_ids),
// which the host reads before the call returns. The call checks sizes and those ids. Ids and
// lengths in device memory are checked by the kernels, which report one that is out of range in
// `faults` and never use it as an address. The output of a call that reported a fault is
// meaningless.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kvplane/params.h"

namespace kvplane::cuda {

// Bits of the integer that `faults` points to.
constexpr int32_t kBadBlockTables = 1;
constexpr int32_t kBadQueryStarts = 2;
constexpr int32_t kBadContextLens = 4;
constexpr int32_t kBadSlots = 8;
constexpr int32_t kBadKeyScales = 16;
constexpr int32_t kBadValueScales = 32;
constexpr int32_t kBadWorkspace = 64;

struct Context {
  uintptr_t stream;  // a cudaStream_t
  int32_t* faults;   // on the device; bits are set, never cleared; may be null
};

// How a batch is cut into items of work: made once for its lengths and tables, and used by the
// calls of all layers that have the same shapes, types and window.
struct AttentionPlan {
  void* memory;                      // on the device, of attention_plan_bytes
  std::array<int64_t, 13> settings;  // the sizes and options that it was made for
};

struct AttentionOptions {
  int64_t max_query_len;  // no sequence has more query tokens; 0: not known
  // As max_query_len, for short sequences: less if others are long. Only the width of tiles depends
  // on it, and no bit of the result.
  int64_t max_short_query_len;
  int64_t split_tokens;  // short sequences are cut at multiples of it; a multiple of 64
  void* workspace;       // on the device; 256-byte aligned
  int64_t workspace_bytes;
  const AttentionPlan* plan = nullptr;  // null: the call plans in its workspace
};

int device_count();
void reshape_and_cache(const ReshapeAndCacheParams& params, const Context& context);
// Partial results are counted in query tokens: a sequence of n of them that is cut into s > 1
// splits has n * s. Writes the count of each sequence of a batch whose lengths the host has.
void count_partials(const PagedAttentionParams& params, int64_t split_tokens,
                    const int64_t* query_starts, const int64_t* context_lens, int64_t* counts);
// Returns enough for every batch of these sizes with any lengths, which a captured graph may need.
int64_t max_partials(const PagedAttentionParams& params, int64_t split_tokens,
                     int64_t max_query_len);
// Returns the bytes of a workspace for `max_partials`. A kernel reports a batch that needs more.
int64_t attention_workspace_bytes(const PagedAttentionParams& params, int64_t max_partials);
int64_t attention_plan_bytes(int64_t num_sequences);
// Uses only the first three of `options`, and all of `params` except the output. max_partials: room
// in the workspace of each call that uses the plan.
AttentionPlan plan_attention(const PagedAttentionParams& params, const AttentionOptions& options,
                             int64_t max_partials, void* memory, const Context& context);
// Throws std::invalid_argument if the plan was made for other sizes.
void paged_attention(const PagedAttentionParams& params, const AttentionOptions& options,
                     const Context& context);
// Copies inside one device, by a kernel. In order: a pair sees the writes of an earlier one.
void copy_blocks(const CopyBlocksParams& params, const Context& context);
// Copies between device and host: large ones by the copy engines, others by a kernel. In order.
void swap_blocks(const CopyBlocksParams& params, const Context& context);
void gather_blocks(const PackBlocksParams& params, const Context& context);
void scatter_blocks(const PackBlocksParams& params, const Context& context);

}  // namespace kvplane::cuda
