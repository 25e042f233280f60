"""Faults planted in how the CPU kernels share reads are found by counting tiles, or by the bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from shared_reads import run

FINDING, ATTENTION = "shared_splits.h", "paged_attention.cpp"

# Name: the file of csrc/cpu, the text in it, and what takes its place.
MUTANTS = {
    "nothing_shared": (ATTENTION, "if (p.share_reads) shared = ", "if (false) shared = "),
    "only_first_blocks_compared": (FINDING, "b < blocks.end", "b < blocks.begin + 1"),
    "ends_of_contexts_shared": (
        FINDING,
        "(split + 1) * kSplitTokens <= seen.end",
        "split * kSplitTokens < seen.end",
    ),
    "items_too_large_shared": (
        FINDING,
        "2 * rows_of_kv_head(items[i])",
        "rows_of_kv_head(items[i])",
    ),
    "queries_overwritten": (
        ATTENTION,
        "num_rows += of_member * (heads.end - heads.begin);",
        "num_rows += of_member;",
    ),
    "sequences_of_a_group_left_out": (
        FINDING,
        "items->erase(items->begin(), others);",
        "items->clear();",
    ),
    "states_without_bound": (ATTENTION, "num_bytes > p.max_state_bytes && first > begin", "false"),
    "slices_left_out": (ATTENTION, "begin < items.size(); begin = end", "begin == 0; begin = end"),
    "last_items_left_out": (
        ATTENTION,
        "run_item(worker, num_before + static_cast<size_t>(i));",
        "run_item(worker, static_cast<size_t>(i));",
    ),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    file, old, new = MUTANTS[name]
    status, printed = run(tmp_path, {file: (old, new)})
    assert status != 0, printed
