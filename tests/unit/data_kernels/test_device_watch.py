"""A device that fails once is used again; one that is lost is told of, once."""

from __future__ import annotations

from data_plane.kernels.device.cuda_streams import DeviceStreams, HostStreams
from data_plane.kernels.device.device_watch import DeviceWatch
from tests.helpers.data.kernel_sets import LateRuntime


def test_a_device_that_is_lost_is_told_of_once() -> None:
    runtime, told = LateRuntime(seed=0), []
    watch = DeviceWatch(DeviceStreams(runtime))
    watch.when_lost(lambda: told.append("lost"))
    watch.check()
    assert told == []
    runtime.is_lost = True
    watch.check()
    watch.check()
    assert told == ["lost"]


def test_nobody_has_to_be_told() -> None:
    runtime = LateRuntime(seed=0)
    watch = DeviceWatch(DeviceStreams(runtime))
    runtime.is_lost = True
    watch.check()


def test_the_check_waits_for_all_that_any_stream_was_given() -> None:
    runtime, done = LateRuntime(seed=0), []
    runtime.early_share = 0.0
    streams = DeviceStreams(runtime)
    with streams.swapping():
        runtime.give(lambda: done.append("swap"))
    assert done == []
    DeviceWatch(streams).check()
    assert done == ["swap"]


def test_a_host_is_never_lost() -> None:
    watch = DeviceWatch(HostStreams())
    watch.when_lost(lambda: 1 / 0)
    watch.check()
