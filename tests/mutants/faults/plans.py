"""Faults planted in how calls are planned on the host and on the device are found. None of them
changes a bit of a result: what they change is the order of the work, how often keys and values are
read, and how much memory is taken.
"""

from __future__ import annotations

from tests.mutants.fault import Fault

ORDER, WIDTH, RINGS, MEMORY = (
    f"tests/kernels/test_{name}.py"
    for name in ("cuda_long_order", "cuda_splits", "cuda_small_devices", "workspace_bounds")
)
PLAN, ATTENTION, SHORT = (
    f"csrc/cuda/attention/{name}"
    for name in ("plan.cu", "attention.cu", "short/attention_short.cuh")
)
KERNELS = "data_plane/kernels/backends/cuda.py"

FAULTS = (
    Fault("shortest_items_first", PLAN, "other > own ||", "(0 < other && other < own) ||", ORDER),
    Fault("equal_items_in_reverse", PLAN, "others + j < i", "others + j > i", ORDER),
    Fault(
        "tiles_beside_a_prefill_are_those_of_decodes",
        ATTENTION,
        "{options.max_short_query_len, options",
        "{options",
        WIDTH,
    ),
    Fault(
        "the_host_does_not_say_how_wide_short_sequences_are",
        KERNELS,
        "return int(query_lens[is_short]",
        "return 0 * int(query_lens[is_short]",
        WIDTH,
    ),
    Fault(
        "long_sequences_are_taken_for_wide_short_ones",
        KERNELS,
        "query_lens[is_short].max",
        "query_lens.max",
        WIDTH,
    ),
    Fault(
        "one_block_has_the_memory_of_two",
        SHORT,
        "with_few > with_most) {",
        "with_most == 0) {",
        RINGS,
    ),
    Fault("each_step_has_a_workspace", KERNELS, "if large:", "if large and False:", MEMORY),
    Fault(
        "steps_count_for_nothing",
        KERNELS,
        "self.max_workspace_bytes - kept)",
        "self.max_workspace_bytes)",
        MEMORY,
    ),
    Fault(
        "unknown_lengths_get_what_they_may_need",
        KERNELS,
        "most <= self.room(arguments),",
        "True,",
        MEMORY,
    ),
)
