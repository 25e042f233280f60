"""Work on a device is done as if in the order in which it was given, on however many streams."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_plane.kernels.arguments import AttentionArguments
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.kernels.device.cuda_streams import CudaRuntime, DeviceStreams
from data_plane.memory.upload import upload
from data_plane.server.worker_thread import WorkerThread
from kvplane.errors import InternalError
from tests.helpers.data.data_rig import LateRig, Rig
from tests.helpers.data.executor_twins import run_twins
from tests.helpers.data.kernel_faults import with_operations
from tests.helpers.data.kernel_sets import late_kernels
from tests.helpers.data.plan_author import (
    HOST,
    drop,
    moved,
    ref,
    set_blocks,
    span,
    tokens,
    transfer,
)

NUM_PLACES = 4


class Recorder:
    """Streams that know, of each piece of work, which others are done before it begins."""

    def __init__(self) -> None:
        self.current = 0
        self.num_streams = 1
        self.urgent: set[int] = set()
        self.done_before: list[set[int]] = []
        self.seen_by_host: set[int] = set()
        self._seen: defaultdict[int, set[int]] = defaultdict(set)

    def current_stream(self) -> int:
        return self.current

    def new_stream(self, *, urgent: bool = False) -> int:
        self.num_streams += 1
        if urgent:
            self.urgent.add(self.num_streams - 1)
        return self.num_streams - 1

    def set_stream(self, stream: int) -> None:
        self.current = stream

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def order(self, before: int, after: int) -> None:
        self._seen[after] |= self._seen[before]

    def wait(self, stream: int) -> None:
        self.seen_by_host |= self._seen[stream]

    def wait_for_all(self) -> None:
        self.seen_by_host |= set(range(len(self.done_before)))

    def work(self) -> int:
        """Put a piece of work on the current stream."""
        seen = self._seen[self.current]
        self.done_before.append(self.seen_by_host | seen)
        number = len(self.done_before) - 1
        self._seen[self.current] = {*self.done_before[number], number}
        return number


PLACES = st.frozensets(st.integers(0, NUM_PLACES - 1), min_size=1)
WORK = st.tuples(st.sampled_from(["compute", "swap"]), PLACES, PLACES)
WAITS = st.tuples(st.sampled_from(["finish", "finish_swaps"]), st.just(frozenset()), PLACES)
SWITCH = st.tuples(st.just("switch"), PLACES, PLACES)


@settings(max_examples=100, deadline=None)
@given(st.lists(WORK | WAITS | SWITCH, max_size=25))
def test_whatever_touches_the_same_place_is_done_in_the_order_given(
    events: list[tuple[str, frozenset[int], frozenset[int]]],
) -> None:
    recorder = Recorder()
    streams = DeviceStreams(recorder)
    given: list[tuple[str, frozenset[int], frozenset[int]]] = []
    for kind, written, read in events:
        if kind == "switch":  # another thread, which has a stream of its own
            recorder.current = {0: 0, 1: 7, 2: 8, 3: 9}[min(written)]
            continue
        if kind == "finish":
            streams.finish()
            assert recorder.seen_by_host == set(range(len(given)))
            continue
        if kind == "finish_swaps":
            streams.finish_swaps()
            assert {i for i, (k, *_) in enumerate(given) if k == "swap"} <= recorder.seen_by_host
            continue
        with streams.computing() if kind == "compute" else streams.swapping():
            number = recorder.work()
        for earlier, (_, its_written, its_read) in enumerate(given):
            if its_written & (written | read) or its_read & written:
                assert earlier in recorder.done_before[number]
        given.append((kind, written, read))


def test_the_callers_own_work_goes_on_beside_swaps_until_the_next_command() -> None:
    recorder = Recorder()
    streams = DeviceStreams(recorder)
    with streams.swapping():
        swap = recorder.work()
    own = recorder.work()
    assert swap not in recorder.done_before[own]
    with streams.computing():
        layer = recorder.work()
    assert swap in recorder.done_before[layer]


def test_swaps_go_before_layers_where_both_could_run() -> None:
    recorder = Recorder()
    streams = DeviceStreams(recorder)
    with streams.swapping():
        swaps = recorder.current
    streams.use_own_stream()
    with streams.computing():
        computes = recorder.current
    assert recorder.urgent == {swaps} and computes not in (0, swaps)


def test_a_gpu_gives_an_urgent_stream_a_higher_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.device, int]] = []

    def stream(device: torch.device, priority: int = 0) -> None:
        asked.append((device, priority))

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    device = torch.device("cuda", 1)
    runtime = CudaRuntime(device)
    runtime.new_stream(urgent=True)
    runtime.new_stream()
    (first, urgent), (second, usual) = asked
    assert first == second == device
    assert urgent < usual == 0  # CUDA's lower numbers go first


def test_a_failing_device_is_an_internal_error_and_swaps_are_still_waited_for() -> None:
    recorder = Recorder()
    streams = DeviceStreams(recorder)
    with pytest.raises(InternalError, match="the device failed: no such place"), streams.swapping():
        swap = recorder.work()
        raise RuntimeError("no such place")
    recorder.current = 0
    with streams.computing():
        assert swap in recorder.done_before[recorder.work()]


@pytest.mark.parametrize("seed", range(4))
def test_plans_of_two_sessions_do_on_late_streams_what_they_do_at_once(seed: int) -> None:
    kernels, runtime = late_kernels(CpuKernels(1), seed)
    threads = [runtime.current_stream(), runtime.new_stream(), runtime.new_stream()]

    def other_thread(chance: Any) -> None:
        runtime.set_stream(chance.choice(threads))

    run_twins(seed, 80, kernels=kernels, before_turn=other_thread)
    assert runtime.num_given > 50


SEEDS = range(5)
SWAP_OUT = moved(1, [ref(0), ref(1)], [ref(3, 1, HOST), ref(0, 1, HOST)])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_receipt_is_given_only_for_what_is_done(seed: int) -> None:
    rig = LateRig(seed)
    rig.start(1, set_blocks(1, [(0, 1), (1, 1)]), span(1, 0, 12))
    outputs = [rig.layer(layer, 12) for layer in (0, 1)]
    assert rig.executor.counters.num_plans_run == 0, "nobody has asked yet"
    assert rig.executor.receipt(1) is not None
    assert rig.runtime.num_waiting == 0
    assert not any(bool(output.isnan().any()) for output in outputs)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_of_swaps_alone_is_receipted_when_they_are_done(seed: int) -> None:
    rig = LateRig(seed)
    rig.admit(1)
    started = rig.start(2, *SWAP_OUT)
    assert started.receipt is not None
    assert rig.runtime.num_waiting == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_are_cleared_after_what_was_given_before_and_before_the_transfers(seed: int) -> None:
    rig = LateRig(seed)
    rig.admit(1)
    device, host = rig.executor.pools.device_tier, rig.executor.pools.host_tier
    before = device[:2].clone()
    rig.start(2, *SWAP_OUT)
    rig.run(3, drop(1))
    rig.open(2, tenant="another")
    rig.start(
        1,
        set_blocks(1, [(0, 2), (1, 2), (5, 1)]),
        set_blocks(2, [(0, 2), (1, 1), (3, 2)], tier=HOST),
        transfer(ref(0, 2), ref(1, 1, HOST)),
        transfer(ref(1, 2), ref(5, 1)),
        span(1, 17, 1),
        session_id=2,
    )
    blocks = rig.stored(2, 2, 3)
    rig.executor.finish()
    assert bool(before.any())
    assert not bool(blocks.any()), "what was copied to the host tier had been cleared"
    assert not bool(device[[0, 1, 5]].any())
    assert not bool(host[[0, 1, 3]].any())
    assert rig.executor.counters.num_cleared_blocks == 4


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_read_on_the_host_have_been_swapped_out(seed: int) -> None:
    rig = LateRig(seed)
    rig.admit(1)
    before = rig.executor.pools.device_tier[:2].clone()
    rig.start(2, *SWAP_OUT, set_blocks(2, [(4, 1)]), span(2, 0, 2))
    blocks, _ = rig.executor.read_blocks(1, 1, range(2))
    assert torch.equal(blocks.transpose(0, 1), before)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_next_plan_a_fence_and_a_new_control_plane_wait_for_what_runs(seed: int) -> None:
    rig = LateRig(seed)
    rig.start(1, set_blocks(1, [(0, 1), (1, 1)]), span(1, 0, 12))
    rig.run_layers(12)
    rig.start(2, span(1, 12, 1))
    assert rig.runtime.num_waiting == 0
    assert rig.executor.counters.num_plans_run == 1
    rig.layer(0, 1)
    whole = set_blocks(1, [(0, 1), (1, 1)], allocated=False)
    rig.start(4, whole, span(1, 12, 1), resync=True)
    assert rig.runtime.num_waiting == 0
    rig.layer(0, 1)
    rig.fence(1)
    assert rig.runtime.num_waiting == 0
    rig.open(2)
    rig.start(1, set_blocks(7, [(4, 1)]), span(7, 0, 2), session_id=2)
    rig.layer(0, 2, session_id=2)
    rig.executor.install(2, rig.author.key)
    assert rig.runtime.num_waiting == 0


def test_a_layer_whose_attention_failed_comes_again_even_if_it_was_the_last() -> None:
    kernels = CpuKernels(1)
    failures = [InternalError("no memory"), None, InternalError("no memory"), None]

    def attention(arguments: AttentionArguments) -> torch.Tensor:
        failure = failures.pop(0)
        if failure is not None:
            raise failure
        return kernels.paged_attention(arguments)

    rig = Rig(kernels=with_operations(kernels, paged_attention=attention))
    rig.start(1, set_blocks(1, [(0, 1)]), span(1, 0, 3))
    for layer in (0, 1):
        with pytest.raises(InternalError):
            rig.layer(layer, 3)
        assert rig.executor.receipt(1) is None
        rig.layer(layer, 3)
    assert rig.executor.receipt(1) is not None


async def test_the_servers_thread_computes_on_a_stream_of_its_own() -> None:
    rig = LateRig()
    assert rig.runtime.current_stream() == 0
    worker = WorkerThread(rig.executor.use_own_stream)
    report = await worker.run(rig.executor.report)
    worker.close()
    assert report[-1].last
    assert rig.runtime.current_stream() != 0


def test_tensors_are_uploaded_as_they_are() -> None:
    here = [tokens(3), torch.arange(5), torch.zeros((2, 0), dtype=torch.int32), torch.ones(())]
    there = upload(here, torch.device("cpu"))
    for expected, actual in zip(here, there, strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
        assert actual.numel() == 0 or actual.data_ptr() != expected.data_ptr()
