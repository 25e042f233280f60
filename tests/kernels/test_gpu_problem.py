"""What is timed of an attention call is what a layer of a step does: the plan is apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from launched import launched_kernels
from test_gpu_benchmark import emulated

from benchmarks.gpu.cases.attention import measure_attention
from benchmarks.gpu.cases.problem import Problem
from benchmarks.gpu.cases.shapes import Shape
from benchmarks.gpu.measurement import Measurement

DECODE = Shape(2, 560, 4, 2, 32)
PREFILL = Shape(1, 90, 4, 2, 32, new=40)
SHARED = Shape(3, 520, 2, 1, 32, shared=512)


def kernels_of(native: Any, work: Callable[[], object]) -> list[str]:
    launched_kernels(native)
    work()
    return [launch.kernel for launch in launched_kernels(native)]


@pytest.mark.parametrize(
    ("shape", "planning", "attending"),
    (
        (DECODE, ["plan_items"], ["attend_short", "combine_splits"]),
        (PREFILL, ["plan_items"], ["attend_short", "attend_long"]),
        # Only where tables begin alike are they compared.
        (
            SHARED,
            ["find_families", "plan_items"],
            ["attend_short", "attend_shared", "combine_splits"],
        ),
    ),
    ids=("decode", "prefill", "shared"),
)
def test_a_timed_call_finds_its_plan_made(
    shape: Shape, planning: list[str], attending: list[str]
) -> None:
    machine = emulated()
    call = Problem(shape, torch.device("cpu")).attention(machine.kernels())
    assert kernels_of(machine.native, call.run) == attending
    assert kernels_of(machine.native, call.plan) == planning
    assert kernels_of(machine.native, call.run) == attending


class Counter:
    """A watch by which each launch takes a second."""

    native: Any

    def seconds(self, work: Callable[[], object], *, in_graph: bool = True) -> float:
        del in_graph
        return float(len(kernels_of(self.native, work)))

    def kernel_seconds(self, work: Callable[[], object]) -> float | None:
        return self.seconds(work)

    def host_seconds(self, work: Callable[[], object]) -> float:
        return self.seconds(work)


def test_the_plan_of_a_case_has_a_figure_of_its_own() -> None:
    watch = Counter()
    machine = emulated(watch)
    watch.native = machine.native
    m = Measurement(machine, seconds=60)
    measure_attention(m, (PREFILL, SHARED), with_peers=False)
    assert not m.wrong
    rows = {row["name"]: row for row in m.rows}
    times = {
        name: [row[key] / 1e6 for key in ("us", "host_us", "kernels_us", "plan_us")]
        for name, row in rows.items()
    }
    assert times == {
        "append": [2, 2, 2, 1],
        "shared": [3, 3, 3, 2],
        "shared/alone": [2, 2, 2, 1],
    }
    m.add("copy_bandwidth", "GB/s", 2900.0)
    measure_attention(m, (PREFILL,), with_peers=False)
    least, most = m.rows[-1]["estimated_plan_us"]
    assert 1 < least < most < 5
