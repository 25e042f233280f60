// Paged attention on a device: the plan kernel, unless the caller has a plan, then the kernels for
// short and long sequences, then the one that combines splits. Which kernels run depends only on
// the device, types, addresses and sizes; which of them handles a sequence, on the sequence's own
// number of rows.

#include <limits>
#include <stdexcept>
#include <string>

#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/batch.cuh"
#include "cuda/device/launch.h"
#include "cuda/operations.h"
#include "kvplane/checks.h"

namespace kvplane::cuda {
namespace {

constexpr int64_t kSplitUnit = 64;  // tokens; a multiple of every kernel's tile
constexpr int64_t kWorkspaceUnit = 256;
constexpr int64_t kMaxPosition = int64_t{1} << 30;

int64_t float_bytes(int64_t count) { return count * static_cast<int64_t>(sizeof(float)); }

int64_t max_context(const PagedAttentionParams& p) { return p.max_blocks * p.pages.block_size; }

// The most splits of `tokens` that up to `query_len` tokens can attend to.
int64_t max_splits(const PagedAttentionParams& p, int64_t query_len, int64_t tokens) {
  const int64_t splits = max_of<int64_t>(1, div_ceil(max_context(p), tokens));
  if (p.sliding_window_tokens == 0) return splits;
  return min_of(splits, (p.sliding_window_tokens + query_len) / tokens + 2);
}

int64_t rounded_up(int64_t bytes) { return div_ceil(bytes, kWorkspaceUnit) * kWorkspaceUnit; }

// The parts of a plan's memory, in bytes from its start.
struct PlanParts {
  int64_t short_ends, long_order, long_ends, split_ends, weights;
  int64_t kin, family_starts, family_splits, members, shared_ends, end;
};

PlanParts plan_parts(int64_t num_sequences) {
  const int64_t ends_bytes = rounded_up(num_sequences * static_cast<int64_t>(sizeof(int32_t)));
  PlanParts parts;
  parts.short_ends = rounded_up(num_sequences * static_cast<int64_t>(sizeof(Sequence)));
  parts.long_order = parts.short_ends + ends_bytes;
  parts.long_ends = parts.long_order + ends_bytes;
  parts.split_ends = parts.long_ends + ends_bytes;
  parts.weights = parts.split_ends + ends_bytes;
  parts.kin = parts.weights + 2 * ends_bytes;
  parts.family_starts = parts.kin + rounded_up(num_sequences * static_cast<int64_t>(sizeof(Kin)));
  parts.family_splits = parts.family_starts + ends_bytes;
  parts.members = parts.family_splits + ends_bytes;
  parts.shared_ends = parts.members + ends_bytes;
  parts.end = parts.shared_ends + ends_bytes;
  return parts;
}

Plan plan_in(void* memory, int64_t num_sequences) {
  char* base = static_cast<char*>(memory);
  const PlanParts parts = plan_parts(num_sequences);
  const auto int32s = [&](int64_t at) { return reinterpret_cast<int32_t*>(base + at); };
  return {reinterpret_cast<Sequence*>(base),
          int32s(parts.short_ends),
          int32s(parts.long_order),
          int32s(parts.long_ends),
          reinterpret_cast<int64_t*>(base + parts.weights),
          int32s(parts.split_ends),
          reinterpret_cast<Kin*>(base + parts.kin),
          int32s(parts.family_starts),
          int32s(parts.family_splits),
          int32s(parts.members),
          int32s(parts.shared_ends)};
}

// The bytes of the partial results of one query token and split: states, then outputs.
int64_t partial_bytes(const PagedAttentionParams& p) {
  return float_bytes(p.num_heads * (2 + p.pages.value_head_size));
}

// How many partial results have room in a workspace.
int64_t room_for_partials(const PagedAttentionParams& p, int64_t workspace_bytes) {
  const int64_t bytes = workspace_bytes - attention_workspace_bytes(p, 0);
  return bytes <= 0 ? 0 : bytes / partial_bytes(p);
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
  const int64_t of_pages[] = {
      pages.block_stride, pages.kv_stride,         pages.head_stride,        pages.token_stride,
      pages.head_size,    pages.value_head_stride, pages.value_token_stride, pages.value_head_size};
  for (const int64_t stride : of_pages) {
    if (stride * dtype_bytes(pages.dtype) % kBytes != 0) return false;
  }
  for (const int64_t stride : {p.query_token_stride, p.query_head_stride}) {
    if (stride * dtype_bytes(p.query_dtype) % kBytes != 0) return false;
  }
  return is_aligned(p.query, kBytes) && is_aligned(pages.data, kBytes) && is_aligned(p.out, 4);
}

// Calls `run` with a number of the type that pages for the tensor cores hold.
template <typename Run>
size_t with_stored_type(Dtype dtype, const Run& run) {
  switch (dtype) {
    case Dtype::kFloat16:
      return run(Half{});
    case Dtype::kBFloat16:
      return run(Bfloat{});
    case Dtype::kFloat8E4M3:
      return run(E4m3{});
    case Dtype::kFloat8E5M2:
      return run(E5m2{});
    case Dtype::kFloat32:
      break;  // not for tensor cores
  }
  return 0;
}

// Even with the smallest ring the kernels may need more shared memory than a block can have on the
// current device. Then no sequence of the call runs on tensor cores, so that a sequence's
// arithmetic does not depend on the batch, nor on its number of rows.
bool fits_shared_memory(const PagesParams& pages) {
  const auto needed = with_stored_type(
      pages.dtype, [&](auto kv) { return least_shared_bytes<decltype(kv)>(pages.head_size); });
  return needed <= max_shared_bytes();
}

template <typename Kv>
void launch_on_tensor_cores(const Work& work, const Launch& how, bool are_all_short) {
  const Launch next = {how.max_items, how.stream, Begins::kEarly};
  launch_short<Kv>(work, how);
  if (work.shared_rows > 0) launch_shared<Kv>(work, next);
  if (!are_all_short) launch_long<Kv>(work, next);
}

void launch_on_tensor_cores(const Work& work, const Launch& how, bool are_all_short) {
  with_stored_type(work.p.pages.dtype, [&](auto kv) -> size_t {
    launch_on_tensor_cores<decltype(kv)>(work, how, are_all_short);
    return 0;
  });
}

auto named(const char* name) {
  return [name] { return std::string(name); };
}

void check_split(int64_t split_tokens) {
  require_in_range(split_tokens, kSplitUnit, kMaxPosition, named("split_tokens"));
  require_in_range(split_tokens % kSplitUnit, 0, 1, named("split_tokens modulo 64"));
}

void check_sizes(const PagedAttentionParams& p, const AttentionOptions& options) {
  constexpr int64_t kMaxGroup = 1 << 16;
  require_in_range(max_context(p), 0, kMaxPosition, named("block_tables' tokens"));
  require_in_range(group_of(p), 1, kMaxGroup, named("query's heads for each KV head"));
  require_in_range(p.num_tokens, 0, kMaxPosition / group_of(p), named("query's tokens"));
  require_in_range(options.max_query_len, 0, kMaxPosition, named("max_query_len"));
  require_in_range(options.max_short_query_len, 0, kMaxPosition, named("max_short_query_len"));
}

// The workspace: room for a plan, which a call without one makes there, then the buffers by which
// the kernels of a call communicate.
Scratch scratch_in(void* workspace, const PagedAttentionParams& p, int64_t max_partials) {
  char* at = static_cast<char*>(workspace) + attention_plan_bytes(p.num_sequences);
  char* const partials = at + kWorkspaceUnit;
  const int64_t states_bytes = rounded_up(float_bytes(2 * max_partials * p.num_heads));
  return {reinterpret_cast<int32_t*>(at), reinterpret_cast<float*>(partials),
          reinterpret_cast<float*>(partials + states_bytes)};
}

// Returns the rows of a short sequence that share a tile: those of the widest short sequence. If
// that is not known, because some sequence may be long, assumes decodes, which most short ones are.
int64_t rows_of_short_sequence(const PagedAttentionParams& p, const AttentionOptions& options) {
  const int64_t group = group_of(p);
  const int64_t widest = p.blocks.seen == nullptr ? kShortRows : kRowsOfMaskedTile;
  for (const int64_t most : {options.max_short_query_len, options.max_query_len}) {
    if (most > 0 && is_short(most, group)) return min_of(widest, most * group);
  }
  return min_of(widest, group);
}

// Returns the rows of a tile of several decodes; 0 where no two of them can or need to share one.
int32_t shared_rows_of(const PagedAttentionParams& p, const AttentionOptions& options) {
  const int64_t rows = rows_of_families(p.pages.head_size);
  const bool fit = 2 * group_of(p) <= rows && p.num_sequences > 1 && p.share_reads;
  const bool hides = p.sliding_window_tokens > 0 || p.blocks.seen != nullptr;
  if (!fit || hides || max_context(p) <= options.split_tokens) return 0;
  const size_t bytes = with_stored_type(p.pages.dtype, [&](auto kv) {
    return shared_memory_of_families<decltype(kv)>(p.pages.head_size);
  });
  return bytes <= max_shared_bytes() ? static_cast<int32_t>(rows) : 0;
}

// Returns the base-2 logarithm of a power of two, -1 for any other number.
int32_t log_of_power(int64_t number) {
  int32_t shift = 0;
  while ((int64_t{1} << shift) < number) ++shift;
  return int64_t{1} << shift == number ? shift : -1;
}

// Returns the parameter of a call's kernels, without the scratch.
Work work_of(const PagedAttentionParams& p, const AttentionOptions& options, int64_t max_partials,
             void* plan_memory, const Context& context) {
  const bool on_tensor_cores = fits_tensor_cores(p) && fits_shared_memory(p.pages);
  Work work = {};
  work.p = p;
  work.max_partials = max_partials;
  work.plan = plan_in(plan_memory, p.num_sequences);
  work.cutting = cutting_of(p, options.split_tokens);
  work.faults = context.faults;
  work.max_query_len = static_cast<int32_t>(options.max_query_len);
  work.short_tile_rows =
      on_tensor_cores ? short_tile_rows(rows_of_short_sequence(p, options), p.pages.head_size)
                      : kRowsOfFmaTile;
  work.long_tile_rows = on_tensor_cores ? kRowsOfLongTile : 0;
  work.long_parts = long_parts(p.pages.value_head_size);
  work.shared_rows = on_tensor_cores ? shared_rows_of(p, options) : 0;
  work.block_shift = log_of_power(p.pages.block_size);
  return work;
}

constexpr size_t kRoomOfSettings = 0, kShortTilesOfSettings = 10;

// Everything that the plan kernel depends on beside the lengths and the tables.
std::array<int64_t, 13> settings_of(const Work& work) {
  return {work.max_partials,
          work.p.num_sequences,
          work.p.num_tokens,
          work.p.max_blocks,
          work.p.num_heads,
          work.p.pages.block_size,
          work.cutting.num_kv_heads,
          work.cutting.split_tokens,
          work.cutting.window,
          work.max_query_len,
          int64_t{work.shared_rows} << 32 | work.short_tile_rows,
          int64_t{work.long_tile_rows} << 32 | work.long_parts,
          work.p.blocks.seen != nullptr};
}

}  // namespace

void count_partials(const PagedAttentionParams& p, int64_t split_tokens,
                    const int64_t* query_starts, const int64_t* context_lens, int64_t* counts) {
  check_split(split_tokens);
  const Cutting cutting = cutting_of(p, split_tokens);
  for (int64_t s = 0; s < p.num_sequences; ++s) {
    const int64_t query_len = query_starts[s + 1] - query_starts[s];
    require_in_range(query_len, 0, kMaxPosition, named("query_starts"));
    if (query_len > 0)
      require_in_range(context_lens[s], query_len, kMaxPosition, named("context_lens"));
    const int32_t tokens = static_cast<int32_t>(query_len);
    const int32_t context_len = query_len == 0 ? 0 : static_cast<int32_t>(context_lens[s]);
    counts[s] = num_partials(cut_of(cutting, tokens, context_len), tokens);
  }
}

int64_t max_partials(const PagedAttentionParams& p, int64_t split_tokens, int64_t max_query_len) {
  check_split(split_tokens);
  const int64_t group = group_of(p);
  const auto most = [&](int64_t query_len, int64_t tokens) {
    const int64_t splits = max_splits(p, query_len, tokens);
    return splits > 1 ? splits * min_of(p.num_tokens, p.num_sequences * query_len) : 0;
  };
  const int64_t of_short = most(max_short_tokens(group), split_tokens);
  if (max_query_len > 0 && is_short(max_query_len, group)) return of_short;
  // Longer queries are never split.
  const int64_t tiles = kItemsOfLongSequence / (2 * p.pages.num_kv_heads);
  return of_short + most(tiles * kRowsOfLongTile / group, kLeastLongSplits * split_tokens);
}

int64_t attention_workspace_bytes(const PagedAttentionParams& p, int64_t max_partials) {
  return rounded_up(attention_plan_bytes(p.num_sequences) + 2 * kWorkspaceUnit +
                    max_partials * partial_bytes(p));
}

int64_t attention_plan_bytes(int64_t num_sequences) { return plan_parts(num_sequences).end; }

AttentionPlan plan_attention(const PagedAttentionParams& p, const AttentionOptions& options,
                             int64_t max_partials, void* memory, const Context& context) {
  check_split(options.split_tokens);
  check_sizes(p, options);
  const Work work = work_of(p, options, max_partials, memory, context);
  if (p.num_sequences > 0 && p.num_tokens > 0) launch_plan(work, context.stream);
  return {memory, settings_of(work)};
}

void paged_attention(const PagedAttentionParams& p, const AttentionOptions& options,
                     const Context& context) {
  check_split(options.split_tokens);
  check_sizes(p, options);
  require_in_range(options.workspace_bytes, attention_workspace_bytes(p, 0),
                   std::numeric_limits<int64_t>::max(), named("workspace_bytes"));
  if (p.num_sequences == 0 || p.num_tokens == 0) return;
  const bool has_plan = options.plan != nullptr;
  const int64_t room = room_for_partials(p, options.workspace_bytes);
  const int64_t max_partials = has_plan ? options.plan->settings[kRoomOfSettings] : room;
  void* const memory = has_plan ? options.plan->memory : options.workspace;
  Work work = work_of(p, options, max_partials, memory, context);
  if (has_plan) {
    // The width is the plan's: a call with a plan need not count its query tokens again.
    const int64_t rows = options.plan->settings[kShortTilesOfSettings] & 0xFFFFFFFF;
    work.short_tile_rows = static_cast<int32_t>(rows);
  }
  work.scratch = scratch_in(options.workspace, p, max_partials);
  if (has_plan && (max_partials > room || settings_of(work) != options.plan->settings)) {
    throw std::invalid_argument("must be of this batch, and of no more workspace than there is");
  }

  // An upper bound: as if every token of every sequence had its own tile.
  const int64_t tiles_of_token = div_ceil<int64_t>(work.cutting.group, work.short_tile_rows) + 1;
  const int64_t max_items =
      p.pages.num_kv_heads * tiles_of_token * work.long_parts * (p.num_tokens + work.max_partials);
  if (!has_plan) launch_plan(work, context.stream);
  const Launch how = {max_items, context.stream, has_plan ? Begins::kInOrder : Begins::kEarly};
  if (work.long_tile_rows > 0) {
    const bool are_all_short =
        work.max_query_len > 0 && is_short(work.max_query_len, work.cutting.group);
    launch_on_tensor_cores(work, how, are_all_short);
  } else {
    launch_fma(work, how);
  }
  if (work.max_partials > 0) launch_combine(work, context.stream);
}

}  // namespace kvplane::cuda
