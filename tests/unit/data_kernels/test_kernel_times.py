"""Time in kernels, and the bytes that they have to move."""

from __future__ import annotations

import time

import torch

from data_plane.execution.counters import ExecutorCounters
from data_plane.execution.shards.shard_kernels import kernel_times


def test_on_the_cpu_every_call_is_timed_with_its_bytes() -> None:
    counters = ExecutorCounters()
    times = kernel_times(torch.device("cpu"), counters)
    for _ in range(2):
        with times.timing("attention", 100):
            time.sleep(0.002)
    with times.timing("write", 7):
        pass
    times.collect()
    assert counters.kernel_bytes == {"attention": 200, "write": 7}
    assert 0.004 <= counters.kernel_s["attention"] < 1
    assert counters.kernel_s["write"] < counters.kernel_s["attention"]
