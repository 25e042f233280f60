"""Faults in steps at fixed addresses."""

from __future__ import annotations

from tests.mutants.fault import Fault, first

ROWS = "data_plane/plans/batches/fixed_rows.py"
MEMORY = "data_plane/kernels/backends/cuda.py"
STEP = "data_plane/execution/fixed_step.py"
TESTS = "tests/kernels/test_fixed_steps.py"
BITS = f"{TESTS}::test_a_replayed_step_has_the_bits_of_one_by_layers[plain]"
ADDRESSES = f"{TESTS}::test_successive_steps_use_the_same_addresses"
NEW_MEMORY = first(
    "    def load(self, batch: AttentionBatch) -> None:",
    "self._packed, self._padded = self._packed.clone(), {}",
)

FAULTS = (
    Fault("rows_in_new_memory", ROWS, *NEW_MEMORY, ADDRESSES),
    Fault("a_graph_reads_the_rows_that_were_there", ROWS, *NEW_MEMORY, BITS),
    Fault(
        "a_workspace_for_each_step",
        MEMORY,
        *first(
            "    def begin(self) -> None:",
            "self._held = [*getattr(self, '_held', ()), self._buffers]  # is not used again",
            "self._buffers = {}",
        ),
        ADDRESSES,
    ),
    Fault(
        "a_graph_without_the_plan", MEMORY, *first("    def begin(self) -> None:", "return"), BITS
    ),
    Fault(
        "rows_stay_after_a_step",
        ROWS,
        *first("    def clear(self) -> None:", "return"),
        f"{TESTS}::test_without_rows_a_step_writes_and_attends_to_nothing",
    ),
    Fault(
        "rows_behind_the_tokens_are_written",
        ROWS,
        "slots[batch.num_tokens :] = -1",
        "slots[batch.num_tokens :] = 500",
        BITS,
    ),
    Fault("padding_is_not_said", ROWS, "is_padded=True,", "is_padded=False,", BITS),
    Fault(
        "sinks_are_copied_by_each_call",
        STEP,
        "if key not in self._of_heads:",
        "if True:",
        f"{TESTS}::test_the_layers_of_a_step_allocate_copy_and_read_nothing",
    ),
    Fault(
        "a_step_counts_as_run_whatever_it_ran",
        STEP,
        *first("    def _check_all_called(self, num_tokens: int) -> None:", "return"),
        f"{TESTS}::test_a_plan_runs_once_and_only_if_all_of_its_layers_do",
    ),
)
