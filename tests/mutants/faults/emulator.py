"""Faults to plant in the sources of the CUDA kernels: what is replaced, by what, and what finds it.

plain: the program of attention_check.cpp, with four seeds. asan, ubsan, tsan: the same program
under AddressSanitizer, UndefinedBehaviorSanitizer or ThreadSanitizer; faults that only they can see
say which.
"""

from __future__ import annotations

from tests.mutants.fault import Fault, planted
from tests.mutants.machines import ASAN, PLAIN, TSAN, UBSAN

SHORT = "csrc/cuda/attention/short/attention_short.cuh"
ROWS = "csrc/cuda/attention/short/short_rows.cuh"
LONG = "csrc/cuda/attention/long/attention_long.cuh"
FMA, COMBINE, PLAN = (
    f"csrc/cuda/attention/{name}.cu" for name in ("attention_fma", "combine", "plan")
)
BATCH, TILES, CUTTING = (
    f"csrc/cuda/attention/{name}" for name in ("batch.cuh", "tiles.cuh", "cutting.h")
)
FAMILIES = "csrc/cuda/attention/families.cu"
CACHE, EIGHT_BITS = "csrc/cuda/cache/reshape_and_cache.cu", "csrc/cuda/device/eight_bits.cuh"

# How a kernel begins that may be launched while the plan is made.
_WAITS = "  wait_for_kernel_before();\n  let_next_kernel_begin();\n"
_BEGINS = "  begin_call(work);\n"
_READS = "  const int32_t num_items = work.plan.short_ends[work.p.num_sequences - 1];\n"

FAULTS = (
    *planted(
        SHORT,
        PLAIN,
        {
            "missing_barrier": ("__syncthreads();\n    const float* left[", "const float* left["),
            "early_read_of_a_copy": (
                "wait_for_copies<Ring::kStages - 2>();",
                "wait_for_copies<Ring::kStages - 1>();",
            ),
            "mask_off_by_one": ("position < own.end;", "position <= own.end;"),
            "warp_goes_on_alone": (
                "__syncwarp();  // Until all lanes' copies have arrived",
                "// Until all lanes' copies have arrived",
            ),
            "output_dims_in_the_order_of_16_bit_pages": (
                "kDimsApart = kIs8Bits<Kv> ? 2 : 1",
                "kDimsApart = 1",
            ),
            "lift_not_divided_out": ("1.0f / kLift<FactorOf<Kv>>", "1.0f"),
            "results_left_where_copies_arrive": (
                "free_stage = (stage + Ring::kStages - 1) % Ring::kStages",
                "free_stage = stage",
            ),
            "a_split_begins_with_the_state_of_the_last": (
                "    begin_rows(rows);\n#pragma unroll\n    for (auto& of_dims",
                "    for (auto& of_dims",
            ),
            "a_kernel_begins_before_the_plan_is_there": (_WAITS + _BEGINS, _BEGINS),
            "shared_splits_are_attended_to_twice": (
                "split = sequence.shared_splits + local % own_splits",
                "split = local % own_splits",
            ),
            "more_is_written_of_a_sequence_than_it_shares": (
                "if (kIsShared && split >= at.sequence->shared_splits) continue;",
                "",
            ),
            "a_share_ends_an_item_early": (
                "* (blockIdx.x + 1) / gridDim.x;",
                "* (blockIdx.x + 1) / gridDim.x - 9;",
            ),
        },
    ),
    Fault(
        "write_after_read",
        FMA,
        "__syncthreads();  // Until the previous tile has been read.",
        "",
        PLAIN,
    ),
    *planted(
        LONG,
        PLAIN,
        {
            "write_after_read_of_the_stages": (
                "__syncthreads();  // Until the tile has arrived and the other stage "
                "has been read.",
                "",
            ),
            "maximum_of_half_the_lanes": (
                "maximum = fmaxf(maximum, __shfl_xor_sync(kWholeWarp, maximum, 2));",
                "",
            ),
            "tiles_not_rescaled": ("out[d][i] *= rescale[i / 2];", "out[d][i] *= 1.0f;"),
            "long_query_columns_in_another_order_than_keys": (
                "2 * (pair / 2) + 8 * (pair % 2)",
                "2 * pair",
            ),
            "key_scale_of_the_first_head": (
                "key_scale(work.p.pages, item.kv_head)",
                "key_scale(work.p.pages, 0)",
            ),
            "value_scale_of_a_neighbour": (
                "value_scale(work.p.pages, item.kv_head)",
                "value_scale(work.p.pages, item.kv_head == 0 ? 1 : 0)",
            ),
            "long_lift_not_divided_out": ("sum * kLift<FactorOf<Kv>>", "sum"),
            "long_row_scale_of_another_row": (
                "(i == lane / 4 + 8 ? back : 1.0f)",
                "(i == lane / 4 ? back : 1.0f)",
            ),
            "long_partial_results_not_lowered": ("1.0f / kLift<FactorOf<Kv>>", "1.0f"),
            "sink_forgotten_in_prefills": ("total.sum * kLift", "sum * kLift"),
        },
    ),
    Fault("window_off_by_one", CUTTING, "position + 1 - window", "position - window", PLAIN),
    Fault(
        "a_split_too_few",
        CUTTING,
        "div_ceil(all.end, tokens) - first",
        "all.end / tokens - first",
        PLAIN,
    ),
    *planted(
        ROWS,
        PLAIN,
        {
            "wrong_lane": (
                "const int32_t row = 8 * c + lane / 4;",
                "const int32_t row = 8 * c + lane % 8;",
            ),
            "key_scale_forgotten": ("kLog2E * key_scale(work.p.pages, item.kv_head)", "kLog2E"),
            "row_scale_of_another_row": ("back, (2 * t + j) * 4)", "back, 2 * t * 4)"),
            "queries_read_before_the_warps_have_loaded_them": (
                "__syncthreads();\n    parts",
                "parts",
            ),
        },
    ),
    *planted(
        TILES,
        PLAIN,
        {
            "divergent_shuffle": (
                "const int64_t offset = __shfl_sync(",
                "if (chunk * kElements >= num_columns) continue;\n"
                "    const int64_t offset = __shfl_sync(",
            ),
            "query_columns_in_another_order_than_keys": (
                "kIs8Bits<Kv> ? 4 * t + 2 * j : 2 * t + 8 * j",
                "2 * t + 8 * j",
            ),
            "bytes_of_two_columns_swapped": (
                "widen_every_second<Kv>(read[f], a[f][0], a[f][1]);",
                "widen_every_second<Kv>(read[f], a[f][1], a[f][0]);",
            ),
            "probabilities_not_lifted": ("std::is_same_v<Factor, Half> ? 32768.0f : 1.0f", "1.0f"),
            "values_looked_up_as_keys": ("lane >= kTileRows);", "false);"),
        },
    ),
    Fault(
        "shuffle_as_barrier", FMA, "  __syncwarp();\n}", "  __shfl_sync(kWholeWarp, 0, 0);\n}", TSAN
    ),
    Fault(
        "the_plan_is_read_before_it_is_there",
        FMA,
        _WAITS + _BEGINS + _READS,
        _READS + _WAITS + _BEGINS,
        TSAN,
    ),
    Fault(
        "table_read_out_of_bounds",
        BATCH,
        "if (!is_in(wanted, position)) return raw;",
        "if (position < wanted.begin) return raw;",
        ASAN,
    ),
    Fault(
        "a_long_item_is_of_the_sequence_at_its_place",
        BATCH,
        "order == nullptr ? place : order[place]",
        "place",
        ASAN,
    ),
    *planted(
        BATCH,
        PLAIN,
        {
            "unused_slots_taken_along": (
                "return position >= range.begin && position < range.end;",
                "return position >= range.begin && position < (range.end + 15) / 16 * 16;",
            ),
            "splits_share_a_place": (
                "(int64_t{split} * sequence.query_len + token)",
                "(int64_t{0} * split + token)",
            ),
            "splits_of_a_long_sequence_overlap": (
                "sequence.cut.first + item.split",
                "sequence.cut.first + item.split / 2",
            ),
            "sink_of_another_head": ("work.p.sinks[head]", "work.p.sinks[0]"),
            "cap_in_another_base_than_scores": (
                "finite(work.p.logit_soft_cap * kLog2E)",
                "work.p.logit_soft_cap",
            ),
            "items_that_the_last_layer_took_count": (
                "if (threadIdx.x == 0) *work.scratch.num_taken = 0;",
                "",
            ),
            "rows_of_a_family_are_of_one_sequence": (
                "item.first_member + min_of(index, item.num_members - 1)",
                "item.first_member",
            ),
        },
    ),
    Fault(
        "bytes_of_two_tokens_taken_for_two_columns",
        EIGHT_BITS,
        "permute_bytes(four, 0x3120)",
        "four",
        PLAIN,
    ),
    *planted(
        COMBINE,
        PLAIN,
        {
            "value_scale_lost_between_splits": (
                "value_scale(work.p.pages, head / work.cutting.group)",
                "1.0f",
            ),
            "splits_combined_before_they_are_added": (
                "  __syncthreads();\n  sum = 0.0f;",
                "  sum = 0.0f;",
            ),
            "a_warp_adds_its_neighbours_splits": ("i += kCombineWarps", "i += 1"),
            "sink_forgotten_between_splits": ("value / total.sum", "value / sum"),
        },
    ),
    Fault(
        "value_stored_by_the_scale_of_keys",
        CACHE,
        "value_scale(p.pages, head)",
        "key_scale(p.pages, head)",
        PLAIN,
    ),
    Fault(
        "a_chunk_too_many", CACHE, "i < num_chunks + chunks_of", "i <= num_chunks + chunks_of", ASAN
    ),
    Fault(
        "four_numbers_at_once_wherever_a_row_starts",
        CACHE,
        "? Pace::kFours : Pace::kOnes",
        "? Pace::kFours : Pace::kFours",
        UBSAN,
    ),
    Fault(
        "partial_results_without_room",
        PLAN,
        "partial_end_of_lane <= work.max_partials",
        "true",
        ASAN,
    ),
    Fault(
        "the_order_is_read_before_it_is_there",
        PLAN,
        "__syncwarp();  // Until the order is there, and the list has been read.",
        "",
        ASAN,
    ),
    Fault(
        "sums_overwritten_while_they_are_read",
        COMBINE,
        "__syncthreads();  // Until the sums have been read.",
        "",
        TSAN,
    ),
    Fault("next_item_overwritten_while_it_is_read", LONG, "turn = 1 - turn", "turn = 0", TSAN),
    Fault(
        "results_overwritten_while_they_are_read",
        SHORT,
        "__syncthreads();  // Until the results have been read.",
        "",
        TSAN,
    ),
    Fault(
        "blocks_of_families_are_not_compared",
        FAMILIES,
        "own.mismatch = min_of(own.mismatch, i);",
        ";",
        PLAIN,
    ),
    Fault(
        "a_family_shares_a_split_that_it_has_in_part",
        FAMILIES,
        "min_of<int64_t>(same, tokens) / split_tokens",
        "div_ceil<int64_t>(min_of<int64_t>(same, tokens), split_tokens)",
        PLAIN,
    ),
    Fault(
        "the_first_of_a_family_shares_what_the_last_one_does",
        PLAN,
        "atomicMax(&plan.family_splits[kin.first], kin.splits);",
        "plan.family_splits[kin.first] = kin.splits;",
        TSAN,
    ),
    Fault(
        "a_tile_has_the_splits_of_its_first_member",
        PLAN,
        "j < count; ++j",
        "j < count; j = 32",
        PLAIN,
    ),
)
