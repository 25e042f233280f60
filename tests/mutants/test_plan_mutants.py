"""Faults planted in how calls are planned on the host and on the device are found. None of them
changes a bit of a result: what they change is the order of the work, how often keys and values are
read, and how much memory is taken.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.source_faults import Fault, assert_noticed

ORDER, WIDTH, RINGS, MEMORY = (
    f"tests/kernels/test_{name}.py"
    for name in ("cuda_long_order", "cuda_splits", "cuda_small_devices", "workspace_bounds")
)
PLAN, ATTENTION, SHORT = (
    f"csrc/cuda/attention/{name}"
    for name in ("plan.cu", "attention.cu", "short/attention_short.cuh")
)
KERNELS, STEPS = (f"data_plane/kernels/{name}.py" for name in ("backends/cuda", "step_memory"))

MUTANTS = {
    "shortest_items_first": Fault(PLAN, "other > own ||", "(0 < other && other < own) ||", ORDER),
    "equal_items_in_reverse": Fault(PLAN, "others + j < i", "others + j > i", ORDER),
    "tiles_beside_a_prefill_are_those_of_decodes": Fault(
        ATTENTION, "{options.max_short_query_len, options", "{options", WIDTH
    ),
    "the_host_does_not_say_how_wide_short_sequences_are": Fault(
        KERNELS, "return int(query_lens[is_short]", "return 0 * int(query_lens[is_short]", WIDTH
    ),
    "long_sequences_are_taken_for_wide_short_ones": Fault(
        KERNELS, "query_lens[is_short].max", "query_lens.max", WIDTH
    ),
    "one_block_has_the_memory_of_two": Fault(
        SHORT, "with_few > with_most) {", "with_most == 0) {", RINGS
    ),
    "each_step_has_a_workspace": Fault(STEPS, "if large:", "if large and False:", MEMORY),
    "steps_count_for_nothing": Fault(
        KERNELS, "self.max_workspace_bytes - kept)", "self.max_workspace_bytes)", MEMORY
    ),
    "unknown_lengths_get_what_they_may_need": Fault(
        KERNELS, "most <= self.room(arguments),", "True,", MEMORY
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_in_planning_is_found(name: str, tmp_path: Path) -> None:
    assert_noticed(MUTANTS[name], tmp_path, csrc=True)
