"""Faults in how the CPU kernels share reads, which counts of tiles, or bits, show."""

from __future__ import annotations

from tests.mutants.fault import Fault

TESTS = "tests/kernels/test_oracle_bits.py::test_tiles_that_sequences_share_are_read_once"
FINDING, ATTENTION = "csrc/cpu/shared_splits.h", "csrc/cpu/paged_attention.cpp"

FAULTS = (
    Fault(
        "nothing_shared", ATTENTION, "if (p.share_reads) shared = ", "if (false) shared = ", TESTS
    ),
    Fault("only_first_blocks_compared", FINDING, "b < blocks.end", "b < blocks.begin + 1", TESTS),
    Fault(
        "ends_of_contexts_shared",
        FINDING,
        "(split + 1) * kSplitTokens <= seen.end",
        "split * kSplitTokens < seen.end",
        TESTS,
    ),
    Fault(
        "items_too_large_shared",
        FINDING,
        "2 * rows_of_kv_head(items[i])",
        "rows_of_kv_head(items[i])",
        TESTS,
    ),
    Fault(
        "queries_overwritten",
        ATTENTION,
        "num_rows += of_member * (heads.end - heads.begin);",
        "num_rows += of_member;",
        TESTS,
    ),
    Fault(
        "sequences_of_a_group_left_out",
        FINDING,
        "items->erase(items->begin(), others);",
        "items->clear();",
        TESTS,
    ),
    Fault(
        "states_without_bound",
        ATTENTION,
        "num_bytes > p.max_state_bytes && first > begin",
        "false",
        TESTS,
    ),
    Fault(
        "slices_left_out",
        ATTENTION,
        "begin < items.size(); begin = end",
        "begin == 0; begin = end",
        TESTS,
    ),
    Fault(
        "last_items_left_out",
        ATTENTION,
        "run_item(worker, num_before + static_cast<size_t>(i));",
        "run_item(worker, static_cast<size_t>(i));",
        TESTS,
    ),
)
