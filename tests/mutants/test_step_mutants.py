"""Each fault planted in steps at fixed addresses is caught by the test that says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from data_plane.execution.fixed_step import FixedStep
from data_plane.kernels.arguments import numbers_of_heads
from data_plane.kernels.step_memory import StepMemory
from data_plane.plans.batches.fixed_rows import FixedRows
from tests.helpers.patched_faults import load

TESTS = load("kernels/test_fixed_steps.py")

Patch = pytest.MonkeyPatch
Check = Callable[[], None]


def bits() -> None:
    TESTS.test_a_replayed_step_has_the_bits_of_one_by_layers(TESTS.OPTIONS[0])


def rows_in_new_memory(patch: Patch) -> Check:
    load = FixedRows.load

    def to_another_place(rows: FixedRows, batch: Any) -> None:
        rows._packed, rows._padded = rows._packed.clone(), {}
        load(rows, batch)

    patch.setattr(FixedRows, "load", to_another_place)
    return TESTS.test_successive_steps_use_the_same_addresses


def a_graph_reads_the_rows_that_were_there(patch: Patch) -> Check:
    rows_in_new_memory(patch)
    return bits


def a_workspace_for_each_step(patch: Patch) -> Check:
    begin, held = StepMemory.begin, []

    def forget(memory: StepMemory) -> None:
        held.append(memory._places)  # So that their memory is not used again.
        memory._places = {}
        begin(memory)

    patch.setattr(StepMemory, "begin", forget)
    return TESTS.test_successive_steps_use_the_same_addresses


def a_graph_without_the_plan(patch: Patch) -> Check:
    patch.setattr(StepMemory, "begin", lambda memory: None)
    return bits


def rows_stay_after_a_step(patch: Patch) -> Check:
    patch.setattr(FixedRows, "clear", lambda rows: None)
    return TESTS.test_without_rows_a_step_writes_and_attends_to_nothing


def rows_behind_the_tokens_are_written(patch: Patch) -> Check:
    load = FixedRows.load

    def with_old_slots(rows: FixedRows, batch: Any) -> None:
        load(rows, batch)
        slots = rows._packed[: rows._sizes[0]]
        slots[slots < 0] = 500

    patch.setattr(FixedRows, "load", with_old_slots)
    return bits


def padding_is_not_said(patch: Patch) -> Check:
    padded = FixedRows.padded

    def unsaid(rows: FixedRows, num_tokens: int) -> Any:
        return replace(padded(rows, num_tokens), is_padded=False)

    patch.setattr(FixedRows, "padded", unsaid)
    return bits


def sinks_are_copied_by_each_call(patch: Patch) -> Check:
    def copied(step: FixedStep, options: Any, num_heads: int) -> Any:
        return numbers_of_heads(options, num_heads, torch.device("cpu"))

    patch.setattr(FixedStep, "_numbers_of_heads", copied)
    return TESTS.test_the_layers_of_a_step_allocate_copy_and_read_nothing


def a_step_counts_as_run_whatever_it_ran(patch: Patch) -> Check:
    patch.setattr(FixedStep, "_finish", lambda step, run, num_tokens: None)
    return TESTS.test_a_plan_runs_once_and_only_if_all_of_its_layers_do


FAULTS = (
    rows_in_new_memory,
    a_graph_reads_the_rows_that_were_there,
    a_workspace_for_each_step,
    a_graph_without_the_plan,
    rows_stay_after_a_step,
    rows_behind_the_tokens_are_written,
    padding_is_not_said,
    sinks_are_copied_by_each_call,
    a_step_counts_as_run_whatever_it_ran,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_in_a_fixed_step_is_caught(
    fault: Callable[[Patch], Check], monkeypatch: Patch
) -> None:
    check = fault(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        check()
