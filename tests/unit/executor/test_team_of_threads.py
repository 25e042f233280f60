"""No step wakes torch's team of threads to prepare its rows.

Where other programs run, to wake the team and to wait for it takes longer than the rest of a small
step. OpenMP starts its threads with the first work that it gets, so they can be counted.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEPS = """
import os
import torch

torch.set_num_threads(1)

from tests.helpers.data.data_rig import Rig
from tests.helpers.data.plan_author import set_blocks, span

def num_threads():
    return len(os.listdir("/proc/self/task"))

rig = Rig(num_device_blocks=64)
lens = (12, 9, 30, 7, 1)
torch.set_num_threads(4)
before = num_threads()
blocks = [[(4 * i + j, 1) for j in range(-(-n // 8))] for i, n in enumerate(lens)]
changes = [set_blocks(1 + i, of_sequence) for i, of_sequence in enumerate(blocks)]
rig.run(1, changes=changes, spans=[span(1 + i, 0, n) for i, n in enumerate(lens)])
rig.run(2, spans=[span(1 + i, n, 1) for i, n in enumerate(lens)])
steps = num_threads() - before
torch.ones(1 << 22).add_(1)
print(steps, num_threads() - before)
"""


@pytest.mark.timeout(180)
def test_steps_start_no_thread_of_torchs() -> None:
    """Two steps start none; a large sum of torch's then starts its team."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", STEPS]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["0", "3"]
