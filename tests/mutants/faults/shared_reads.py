"""Faults in how the CPU kernels share reads, which counts of tiles, or bits, show."""

from __future__ import annotations

from tests.mutants.fault import planted

TESTS = "tests/kernels/test_shared_prefixes.py::test_tiles_that_sequences_share_are_read_once"
FINDING, ATTENTION = "csrc/cpu/shared_splits.h", "csrc/cpu/paged_attention.cpp"

FAULTS = (
    *planted(
        ATTENTION,
        TESTS,
        {
            "nothing_shared": ("if (p.share_reads) shared = ", "if (false) shared = "),
            "queries_overwritten": (
                "num_rows += of_member * (heads.end - heads.begin);",
                "num_rows += of_member;",
            ),
            "states_without_bound": ("num_bytes > p.max_state_bytes && first > begin", "false"),
            "slices_left_out": ("begin < items.size(); begin = end", "begin == 0; begin = end"),
            "last_items_left_out": (
                "run_item(worker, num_before + static_cast<size_t>(i));",
                "run_item(worker, static_cast<size_t>(i));",
            ),
        },
    ),
    *planted(
        FINDING,
        TESTS,
        {
            "only_first_blocks_compared": ("b < blocks.end", "b < blocks.begin + 1"),
            "ends_of_contexts_shared": (
                "(split + 1) * kSplitTokens <= seen.end",
                "split * kSplitTokens < seen.end",
            ),
            "items_too_large_shared": (
                "2 * rows_of_kv_head(items[i])",
                "rows_of_kv_head(items[i])",
            ),
            "sequences_of_a_group_left_out": (
                "items->erase(items->begin(), others);",
                "items->clear();",
            ),
        },
    ),
)
