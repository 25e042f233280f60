// Paged attention on a device: the plan kernel, then the kernels for short and long sequences, then
// the one that combines splits. Which kernels run depends only on the device, types, addresses and
// sizes; which of them handles a sequence, on the sequence's own number of rows.

#include <limits>
#include <string>

#include "attention_kernels.h"
#include "batch.cuh"
#include "kvplane/checks.h"
#include "launch.h"
#include "operations.h"

namespace kvplane::cuda {
namespace {

constexpr int64_t kSplitUnit = 64;  // tokens; a multiple of every kernel's tile
constexpr int64_t kWorkspaceUnit = 256;
constexpr int64_t kMaxPosition = int64_t{1} << 30;

int64_t max_context(const PagedAttentionParams& p) { return p.max_blocks * p.pages.block_size; }

// The most splits that a short sequence of these sizes can have.
int64_t max_splits(const PagedAttentionParams& p, int64_t split_tokens) {
  const int64_t splits = div_ceil(max_context(p), split_tokens);
  if (p.sliding_window_tokens == 0) return max_of<int64_t>(1, splits);
  const int64_t seen = p.sliding_window_tokens + max_short_tokens(group_of(p));
  return max_of<int64_t>(1, min_of(splits, seen / split_tokens + 2));
}

// The parts of the workspace, in bytes from its start.
struct Parts {
  int64_t long_ends, partial_starts, partial_states, partial_outs, size;
};

int64_t rounded_up(int64_t bytes) { return div_ceil(bytes, kWorkspaceUnit) * kWorkspaceUnit; }

Parts parts_of(const PagedAttentionParams& p, int64_t split_tokens) {
  const int64_t splits = max_splits(p, split_tokens);
  const int64_t tokens = min_of(p.num_tokens, p.num_sequences * max_short_tokens(group_of(p)));
  const int64_t rows = splits > 1 ? splits * tokens * p.num_heads : 0;
  const int64_t float_bytes = sizeof(float);
  Parts parts;
  parts.long_ends = rounded_up(p.num_sequences * 4);
  parts.partial_starts = parts.long_ends + rounded_up(p.num_sequences * 4);
  parts.partial_states = parts.partial_starts + rounded_up(p.num_sequences * 8);
  parts.partial_outs = parts.partial_states + rounded_up(rows * 2 * float_bytes);
  parts.size = parts.partial_outs + rounded_up(rows * p.pages.head_size * float_bytes);
  return parts;
}

bool is_aligned(const void* address, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
}

// The kernels for tensor cores copy 16 bytes at a time, and take pages of 8 bits or of the query's
// own 16-bit type.
bool fits_tensor_cores(const PagedAttentionParams& p) {
  constexpr int64_t kBytes = 16;
  const PagesParams& pages = p.pages;
  if (p.query_dtype == Dtype::kFloat32) return false;
  if (p.query_dtype != pages.dtype && !is_8_bit(pages.dtype)) return false;
  const int64_t of_pages[] = {pages.block_stride, pages.kv_stride, pages.head_stride,
                              pages.token_stride, pages.head_size};
  for (const int64_t stride : of_pages) {
    if (stride * dtype_bytes(pages.dtype) % kBytes != 0) return false;
  }
  for (const int64_t stride : {p.query_token_stride, p.query_head_stride}) {
    if (stride * dtype_bytes(p.query_dtype) % kBytes != 0) return false;
  }
  return is_aligned(p.query, kBytes) && is_aligned(pages.data, kBytes) && is_aligned(p.out, 4);
}

// Even with the smallest ring the short kernel may need more shared memory than a block can have on
// the current device. Then no sequence of the call runs on tensor cores, so that a sequence's
// arithmetic does not depend on the batch, nor on its number of rows.
bool fits_shared_memory(const PagesParams& pages) {
  const auto needed = [&]() -> size_t {
    switch (pages.dtype) {
      case Dtype::kFloat16:
        return least_shared_bytes_of_short<Half>(pages.head_size);
      case Dtype::kBFloat16:
        return least_shared_bytes_of_short<Bfloat>(pages.head_size);
      case Dtype::kFloat8E4M3:
        return least_shared_bytes_of_short<E4m3>(pages.head_size);
      case Dtype::kFloat8E5M2:
        return least_shared_bytes_of_short<E5m2>(pages.head_size);
      case Dtype::kFloat32:
        break;  // not for tensor cores
    }
    return 0;
  };
  return needed() <= max_shared_bytes();
}

template <typename Kv>
void launch_on_tensor_cores(const Work& work, int64_t max_items, bool are_all_short,
                            uintptr_t stream) {
  launch_short<Kv>(work, max_items, stream);
  if (!are_all_short) launch_long<Kv>(work, max_items, stream);
}

void launch_on_tensor_cores(const Work& work, int64_t max_items, bool are_all_short,
                            uintptr_t stream) {
  const auto run = [&](auto launch) { launch(work, max_items, are_all_short, stream); };
  switch (work.p.pages.dtype) {
    case Dtype::kFloat16:
      return run(&launch_on_tensor_cores<Half>);
    case Dtype::kBFloat16:
      return run(&launch_on_tensor_cores<Bfloat>);
    case Dtype::kFloat8E4M3:
      return run(&launch_on_tensor_cores<E4m3>);
    case Dtype::kFloat8E5M2:
      return run(&launch_on_tensor_cores<E5m2>);
    case Dtype::kFloat32:
      return;  // not for tensor cores
  }
}

auto named(const char* name) {
  return [name] { return std::string(name); };
}

void check_split(int64_t split_tokens) {
  require_in_range(split_tokens, kSplitUnit, kMaxPosition, named("split_tokens"));
  require_in_range(split_tokens % kSplitUnit, 0, 1, named("split_tokens modulo 64"));
}

void check_sizes(const PagedAttentionParams& p, const AttentionOptions& options, int64_t needed) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMaxGroup = 1 << 16;
  require_in_range(max_context(p), 0, kMaxPosition, named("block_tables' tokens"));
  require_in_range(group_of(p), 1, kMaxGroup, named("query's heads for each KV head"));
  require_in_range(p.num_tokens, 0, kMaxPosition / group_of(p), named("query's tokens"));
  require_in_range(options.max_query_len, 0, kMaxPosition, named("max_query_len"));
  require_in_range(options.workspace_bytes, needed, kMax, named("workspace_bytes"));
}

Plan plan_in(void* workspace, const Parts& parts) {
  char* base = static_cast<char*>(workspace);
  return {reinterpret_cast<int32_t*>(base), reinterpret_cast<int32_t*>(base + parts.long_ends),
          reinterpret_cast<int64_t*>(base + parts.partial_starts),
          reinterpret_cast<float*>(base + parts.partial_states),
          reinterpret_cast<float*>(base + parts.partial_outs)};
}

}  // namespace

int64_t attention_workspace_bytes(const PagedAttentionParams& p, int64_t split_tokens) {
  check_split(split_tokens);
  return parts_of(p, split_tokens).size;
}

void paged_attention(const PagedAttentionParams& p, const AttentionOptions& options,
                     const Context& context) {
  check_split(options.split_tokens);
  const Parts parts = parts_of(p, options.split_tokens);
  check_sizes(p, options, parts.size);
  if (p.num_sequences == 0 || p.num_tokens == 0) return;
  const bool on_tensor_cores = fits_tensor_cores(p) && fits_shared_memory(p.pages);
  const int64_t group = group_of(p);
  const int64_t splits = max_splits(p, options.split_tokens);
  Work work;
  work.p = p;
  work.plan = plan_in(options.workspace, parts);
  work.faults = context.faults;
  work.max_query_len = static_cast<int32_t>(options.max_query_len);
  work.split_tokens = static_cast<int32_t>(options.split_tokens);
  work.short_tile_rows =
      on_tensor_cores ? short_tile_rows(group, p.pages.head_size) : kRowsOfFmaTile;
  work.long_tile_rows = on_tensor_cores ? kRowsOfLongTile : 0;

  // An upper bound: as if every token of every sequence were in a tile of its own.
  const int64_t tiles_of_token = div_ceil<int64_t>(group, work.short_tile_rows) + 1;
  const int64_t max_items = p.num_tokens * tiles_of_token * p.pages.num_kv_heads * splits;
  launch_plan(work, context.stream);
  if (on_tensor_cores) {
    const bool are_all_short = options.max_query_len > 0 && is_short(options.max_query_len, group);
    launch_on_tensor_cores(work, max_items, are_all_short, context.stream);
  } else {
    launch_fma(work, max_items, context.stream);
  }
  if (splits > 1) launch_combine(work, context.stream);
}

}  // namespace kvplane::cuda
