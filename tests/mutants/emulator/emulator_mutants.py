"""Faults to plant in the sources of the CUDA kernels: what is replaced, by what, and what finds it.

plain: the program of attention_check.cpp, with four seeds. asan, ubsan, tsan: the same program
under AddressSanitizer, UndefinedBehaviorSanitizer or ThreadSanitizer; faults that only they can see
say which.
"""

from __future__ import annotations

from dataclasses import dataclass

PLAIN, ASAN, UBSAN, TSAN = "plain", "asan", "ubsan", "tsan"


@dataclass(frozen=True)
class Mutant:
    """``old`` is exactly once in ``file`` (of csrc/cuda)."""

    file: str
    old: str
    new: str
    found_by: str = PLAIN


SHORT = "attention/short/attention_short.cuh"
ROWS = "attention/short/short_rows.cuh"
LONG = "attention/long/attention_long.cuh"
FMA, COMBINE, PLAN = (f"attention/{name}.cu" for name in ("attention_fma", "combine", "plan"))
BATCH, TILES, CUTTING = (f"attention/{name}" for name in ("batch.cuh", "tiles.cuh", "cutting.h"))
FAMILIES = "attention/families.cu"
CACHE, EIGHT_BITS = "cache/reshape_and_cache.cu", "device/eight_bits.cuh"

# How a kernel begins that may be launched while the plan is made.
_WAITS = "  wait_for_kernel_before();\n  let_next_kernel_begin();\n"
_BEGINS = "  begin_call(work);\n"
_READS = "  const int32_t num_items = work.plan.short_ends[work.p.num_sequences - 1];\n"

MUTANTS = {
    "missing_barrier": Mutant(
        SHORT,
        "__syncthreads();\n    const float* left[",
        "const float* left[",
    ),
    "write_after_read": Mutant(
        FMA, "__syncthreads();  // Until the previous tile has been read.", ""
    ),
    "write_after_read_of_the_stages": Mutant(
        LONG,
        "__syncthreads();  // Until the tile has arrived and the other stage has been read.",
        "",
    ),
    "early_read_of_a_copy": Mutant(
        SHORT, "wait_for_copies<Ring::kStages - 2>();", "wait_for_copies<Ring::kStages - 1>();"
    ),
    "mask_off_by_one": Mutant(SHORT, "position < own.end;", "position <= own.end;"),
    "window_off_by_one": Mutant(CUTTING, "position + 1 - window", "position - window"),
    "wrong_lane": Mutant(
        ROWS, "const int32_t row = 8 * c + lane / 4;", "const int32_t row = 8 * c + lane % 8;"
    ),
    "divergent_shuffle": Mutant(
        TILES,
        "const int64_t offset = __shfl_sync(",
        "if (chunk * kElements >= num_columns) continue;\n    const int64_t offset = __shfl_sync(",
    ),
    "shuffle_as_barrier": Mutant(
        FMA,
        "  __syncwarp();\n}",
        "  __shfl_sync(kWholeWarp, 0, 0);\n}",
        found_by=TSAN,
    ),
    "table_read_out_of_bounds": Mutant(
        BATCH,
        "if (!is_in(wanted, position)) return raw;",
        "if (position < wanted.begin) return raw;",
        found_by=ASAN,
    ),
    "unused_slots_taken_along": Mutant(
        BATCH,
        "return position >= span.begin && position < span.end;",
        "return position >= span.begin && position < (span.end + 15) / 16 * 16;",
    ),
    "warp_goes_on_alone": Mutant(
        SHORT,
        "__syncwarp();  // Until all lanes' copies have arrived",
        "// Until all lanes' copies have arrived",
    ),
    "maximum_of_half_the_lanes": Mutant(
        LONG, "maximum = fmaxf(maximum, __shfl_xor_sync(kWholeWarp, maximum, 2));", ""
    ),
    "splits_share_a_place": Mutant(
        BATCH, "(int64_t{split} * sequence.query_len + token)", "(int64_t{0} * split + token)"
    ),
    "tiles_not_rescaled": Mutant(LONG, "out[d][i] *= rescale[i / 2];", "out[d][i] *= 1.0f;"),
    "query_columns_in_another_order_than_keys": Mutant(
        TILES, "kIs8Bits<Kv> ? 4 * t + 2 * j : 2 * t + 8 * j", "2 * t + 8 * j"
    ),
    "long_query_columns_in_another_order_than_keys": Mutant(
        LONG, "2 * (pair / 2) + 8 * (pair % 2)", "2 * pair"
    ),
    "bytes_of_two_columns_swapped": Mutant(
        TILES,
        "widen_every_second<Kv>(read[f], a[f][0], a[f][1]);",
        "widen_every_second<Kv>(read[f], a[f][1], a[f][0]);",
    ),
    "bytes_of_two_tokens_taken_for_two_columns": Mutant(
        EIGHT_BITS, "permute_bytes(four, 0x3120)", "four"
    ),
    "output_dims_in_the_order_of_16_bit_pages": Mutant(
        SHORT, "kDimsApart = kIs8Bits<Kv> ? 2 : 1", "kDimsApart = 1"
    ),
    "key_scale_forgotten": Mutant(ROWS, "kLog2E * key_scale(work.p.pages, item.kv_head)", "kLog2E"),
    "key_scale_of_the_first_head": Mutant(
        LONG, "key_scale(work.p.pages, item.kv_head)", "key_scale(work.p.pages, 0)"
    ),
    "value_scale_of_a_neighbour": Mutant(
        LONG,
        "value_scale(work.p.pages, item.kv_head)",
        "value_scale(work.p.pages, item.kv_head == 0 ? 1 : 0)",
    ),
    "value_scale_lost_between_splits": Mutant(
        COMBINE, "value_scale(work.p.pages, head / work.cutting.group)", "1.0f"
    ),
    "value_stored_by_the_scale_of_keys": Mutant(
        CACHE, "value_scale(p.pages, head)", "key_scale(p.pages, head)"
    ),
    "a_chunk_too_many": Mutant(
        CACHE, "i < num_chunks + chunks_of", "i <= num_chunks + chunks_of", found_by=ASAN
    ),
    "four_numbers_at_once_wherever_a_row_starts": Mutant(
        CACHE, "? Pace::kFours : Pace::kOnes", "? Pace::kFours : Pace::kFours", found_by=UBSAN
    ),
    "probabilities_not_lifted": Mutant(
        TILES, "std::is_same_v<Factor, Half> ? 32768.0f : 1.0f", "1.0f"
    ),
    "lift_not_divided_out": Mutant(SHORT, "1.0f / kLift<FactorOf<Kv>>", "1.0f"),
    "long_lift_not_divided_out": Mutant(LONG, "sum * kLift<FactorOf<Kv>>", "sum"),
    "row_scale_of_another_row": Mutant(ROWS, "back, (2 * t + j) * 4)", "back, 2 * t * 4)"),
    "long_row_scale_of_another_row": Mutant(
        LONG,
        "(i == lane / 4 + 8 ? back : 1.0f)",
        "(i == lane / 4 ? back : 1.0f)",
    ),
    "splits_of_a_long_sequence_overlap": Mutant(
        BATCH, "sequence.cut.first + item.split", "sequence.cut.first + item.split / 2"
    ),
    "partial_results_without_room": Mutant(
        PLAN, "partial_end_of_lane <= work.max_partials", "true", found_by=ASAN
    ),
    "a_split_too_few": Mutant(
        CUTTING, "div_ceil(all.end, tokens) - first", "all.end / tokens - first"
    ),
    "splits_combined_before_they_are_added": Mutant(
        COMBINE, "  __syncthreads();\n  sum = 0.0f;", "  sum = 0.0f;"
    ),
    "a_warp_adds_its_neighbours_splits": Mutant(COMBINE, "i += kCombineWarps", "i += 1"),
    "sums_overwritten_while_they_are_read": Mutant(
        COMBINE, "__syncthreads();  // Until the sums have been read.", "", found_by=TSAN
    ),
    "next_item_overwritten_while_it_is_read": Mutant(
        LONG, "turn = 1 - turn", "turn = 0", found_by=TSAN
    ),
    "queries_read_before_the_warps_have_loaded_them": Mutant(
        ROWS, "__syncthreads();\n    parts", "parts"
    ),
    "long_partial_results_not_lowered": Mutant(LONG, "1.0f / kLift<FactorOf<Kv>>", "1.0f"),
    "sink_of_another_head": Mutant(BATCH, "work.p.sinks[head]", "work.p.sinks[0]"),
    "sink_forgotten_between_splits": Mutant(COMBINE, "value / total.sum", "value / sum"),
    "sink_forgotten_in_prefills": Mutant(LONG, "total.sum * kLift", "sum * kLift"),
    "cap_in_another_base_than_scores": Mutant(
        BATCH, "finite(work.p.logit_soft_cap * kLog2E)", "work.p.logit_soft_cap"
    ),
    "values_looked_up_as_keys": Mutant(TILES, "lane >= kTileRows);", "false);"),
    "results_left_where_copies_arrive": Mutant(
        SHORT, "free_stage = (stage + Ring::kStages - 1) % Ring::kStages", "free_stage = stage"
    ),
    "results_overwritten_while_they_are_read": Mutant(
        SHORT, "__syncthreads();  // Until the results have been read.", "", found_by=TSAN
    ),
    "a_split_begins_with_the_state_of_the_last": Mutant(
        SHORT,
        "    begin_rows(rows);\n#pragma unroll\n    for (auto& of_dims",
        "    for (auto& of_dims",
    ),
    "items_that_the_last_layer_took_count": Mutant(
        BATCH, "if (threadIdx.x == 0) *work.scratch.num_taken = 0;", ""
    ),
    "a_kernel_begins_before_the_plan_is_there": Mutant(SHORT, _WAITS + _BEGINS, _BEGINS),
    "the_plan_is_read_before_it_is_there": Mutant(
        FMA,
        _WAITS + _BEGINS + _READS,
        _READS + _WAITS + _BEGINS,
        found_by=TSAN,
    ),
    "a_long_item_is_of_the_sequence_at_its_place": Mutant(
        BATCH, "order == nullptr ? place : order[place]", "place", found_by=ASAN
    ),
    "the_order_is_read_before_it_is_there": Mutant(
        PLAN,
        "__syncwarp();  // Until the order is there, and the list has been read.",
        "",
        found_by=ASAN,
    ),
    "blocks_of_families_are_not_compared": Mutant(
        FAMILIES, "own.mismatch = min_of(own.mismatch, i);", ";"
    ),
    "a_family_shares_a_split_that_it_has_in_part": Mutant(
        FAMILIES,
        "min_of<int64_t>(same, tokens) / split_tokens",
        "div_ceil<int64_t>(min_of<int64_t>(same, tokens), split_tokens)",
    ),
    "the_first_of_a_family_shares_what_the_last_one_does": Mutant(
        PLAN,
        "atomicMax(&plan.family_splits[kin.first], kin.splits);",
        "plan.family_splits[kin.first] = kin.splits;",
        found_by=TSAN,
    ),
    "a_tile_has_the_splits_of_its_first_member": Mutant(
        PLAN, "j < count; ++j", "j < count; j = 32"
    ),
    "shared_splits_are_attended_to_twice": Mutant(
        SHORT, "split = sequence.shared_splits + local % own_splits", "split = local % own_splits"
    ),
    "more_is_written_of_a_sequence_than_it_shares": Mutant(
        SHORT, "if (kIsShared && split >= at.sequence->shared_splits) continue;", ""
    ),
    "rows_of_a_family_are_of_one_sequence": Mutant(
        BATCH, "item.first_member + min_of(index, item.num_members - 1)", "item.first_member"
    ),
    "a_share_ends_an_item_early": Mutant(
        SHORT, "* (blockIdx.x + 1) / gridDim.x;", "* (blockIdx.x + 1) / gridDim.x - 9;"
    ),
}
