"""Faults in the swaps of csrc/cuda/cache/blocks.cu, which the tests of both paths notice."""

from __future__ import annotations

from tests.mutants.fault import planted

TESTS = "tests/kernels/test_swap_paths.py"
SOURCE = "csrc/cuda/cache/blocks.cu"

FAULTS = (
    *planted(
        SOURCE,
        TESTS,
        {
            "neighbours_on_one_side_are_a_run": (
                "pairs[end].from == pairs[end - 1].from + 1",
                "true",
            ),
            "every_pair_into_a_block_is_copied": (
                "if (count > 0 && pairs[count - 1].to == pair.to) --count;",
                "",
            ),
            "the_first_pair_into_a_block_stays": (
                "std::stable_sort(pairs.begin(), pairs.end(), before);",
                (
                    "std::reverse(pairs.begin(), pairs.end());\n"
                    "    std::stable_sort(pairs.begin(), pairs.end(), before);"
                ),
            ),
            "order_inside_one_pool_is_lost": ("if (overlap(p)) return", "if (false) return"),
            "room_between_blocks_is_forgotten": ("runs_are_whole_ ? num_blocks : 1", "num_blocks"),
            "memory_that_is_not_mapped_is_used": ("reachable = on_device(p);", "reachable = p;"),
            "a_launch_copies_as_many_pairs_as_it_has_rows": (
                "i += static_cast<int32_t>(gridDim.y)",
                "i += pairs.count",
            ),
            "chunks_of_8_bytes_are_taken_for_16": (
                "if (bits % 16 == 0) return run(Chunk16{});",
                "if (bits % 8 == 0) return run(Chunk16{});",
            ),
            "memory_that_is_not_pinned_is_in_a_batch": ("in_batch_(is_pinned && ", "in_batch_("),
            "a_batch_is_not_queued": ("if (in_batch_) copy_batch(batch_, stream_);", ""),
            "a_batch_copies_the_room_between_blocks": (
                "} else if (runs_are_whole_) {",
                "} else if (true) {",
            ),
            "ids_of_swaps_are_not_checked": (
                "  check_pairs(p);\n  if (p.copy_bytes == 0 || p.num_pairs == 0) return;",
                "  if (p.copy_bytes == 0 || p.num_pairs == 0) return;",
            ),
        },
    ),
)
