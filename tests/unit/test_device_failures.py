"""What a device that fails costs: an error, and neither tables, nor bytes, nor a wrong receipt."""

from __future__ import annotations

import torch
from data_rig import Rig
from kernel_sets import LateRuntime, late_kernels
from plan_author import row, set_blocks

from data_plane.kernel_set import cpu_kernels
from kvplane.errors import InternalError


class LateRig(Rig):
    """Runs on a device that does its work late, and fails when told to."""

    runtime: LateRuntime

    def __init__(self, seed: int = 0) -> None:
        kernels, self.runtime = late_kernels(cpu_kernels(1), seed)
        super().__init__(kernels=kernels)


def test_a_plan_whose_rows_find_no_memory_changes_nothing_and_can_be_shown_again() -> None:
    rig = LateRig()
    changes = [set_blocks(1, [(0, 1), (1, 1)])]
    plan = rig.author.plan(1, changes=changes, rows=[row(1, 0, 12)])
    rig.runtime.failures.append(torch.OutOfMemoryError("no memory left"))
    with rig.refuses(InternalError):
        rig.executor.start(1, plan)
    assert rig.executor.counters.num_plans_started == 0
    assert rig.executor.start(1, plan).num_tokens == 12
    rig.layer(0, 12)
    rig.layer(1, 12)
    assert rig.author.read_receipt(rig.executor.receipt(1)).plan_number == 1
