"""The data plane on a GPU: streams, pinned memory and receipts, beside the same on the CPU.

benchmarks/gpu/first.py names this file to pytest, which does not collect it by itself.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from data_plane import Executor
from data_plane.kernels.backend import kernels_of
from data_plane.kernels.device.devices import choose_device, this_machine
from data_plane.memory.upload import upload
from data_plane.server.tensor_codec import tensor_from_message, tensor_to_message
from kvplane.errors import InternalError, InvalidRequestError, NeverFitsError
from tests.helpers.data.executor_twins import (
    HEAD_SIZE,
    LAYERS,
    NUM_HEADS,
    NUM_KV_HEADS,
    Side,
    run_twins,
)
from tests.helpers.data.kernel_faults import FAULTS, with_fault
from tests.helpers.data.plan_author import (
    HOST,
    LAYOUT,
    POOL_ID,
    moved,
    ref,
    set_blocks,
    span,
    transfer,
)

GPU = torch.device("cuda", 0)
LONG_CYCLES = 2_000_000_000  # about a second


@pytest.fixture(autouse=True)
def on_the_default_stream() -> Iterator[None]:
    before = torch.cuda.current_stream()
    yield
    torch.cuda.set_stream(before)


@pytest.fixture
def side() -> Side:
    return Side(LAYOUT, device="cuda")


def qkv(num_tokens: int) -> list[torch.Tensor]:
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    return [torch.randn(num_tokens, n, HEAD_SIZE, device=GPU) for n in heads]


def long_work() -> torch.cuda.Event:
    """Keeps the current stream busy; the event passes at its end."""
    torch.cuda._sleep(LONG_CYCLES)
    event = torch.cuda.Event()
    event.record()
    return event


def test_auto_is_the_first_gpu_and_one_too_many_is_refused() -> None:
    machine = this_machine()
    assert choose_device("auto", lambda: machine) == GPU
    with pytest.raises(InvalidRequestError, match="there is no GPU"):
        choose_device(f"cuda:{len(machine.gpus)}", lambda: machine)


def test_the_executor_says_what_it_runs_on(side: Side) -> None:
    assert str(side.executor.device) == "cuda:0"
    assert side.executor.kernels.backend == "cuda"
    assert torch.cuda.get_device_name(GPU) in side.executor.kernels.detail


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance"),
    [
        ("float32", "float32", 1e-5),
        ("bfloat16", "bfloat16", 4e-2),
        ("float16", "float16", 5e-3),
        ("bfloat16", "float8_e4m3fn", 4e-2),
        ("float16", "float8_e5m2", 5e-3),
    ],
)
def test_random_plans_do_on_any_streams_what_they_do_on_the_cpu(
    dtype: str, kv_dtype: str, tolerance: float, seed: int
) -> None:
    streams = [torch.cuda.default_stream(GPU), *(torch.cuda.Stream(GPU) for _ in range(2))]

    def other_thread(chance: random.Random) -> None:
        torch.cuda.set_stream(chance.choice(streams))

    run_twins(
        seed,
        150,
        dtype=dtype,
        kv_dtype=kv_dtype,
        tolerance=tolerance,
        before_turn=other_thread,
        device="cuda",
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault: str) -> None:
    kernels = with_fault(kernels_of(GPU, 0), fault)
    with pytest.raises(AssertionError):
        run_twins(3, 60, device="cuda", kernels=kernels)


def run_a_prompt(side: Side) -> None:
    """Also loads the kernels that a later plan of 12 tokens takes, because loading may block."""
    side.start(1, set_blocks(1, [(0, 1), (1, 1)]), span(1, 0, 12))
    for layer in LAYERS:
        side.feed(1, layer, *qkv(12))
    side.finish(1)


def test_layers_run_ahead_of_the_device_and_the_receipt_waits_for_it(side: Side) -> None:
    run_a_prompt(side)
    side.start(2, set_blocks(2, [(2, 1), (3, 1)]), span(2, 0, 12))
    tensors = qkv(12)
    torch.cuda.synchronize()
    end = long_work()
    for layer in LAYERS:
        side.feed(1, layer, *tensors)
    assert not end.query(), "a layer has waited"
    side.finish(1)
    assert end.query()


def test_swaps_go_on_beside_the_callers_own_work(side: Side) -> None:
    run_a_prompt(side)
    before, _ = side.executor.read_blocks(1, 1, range(2))
    move = moved(1, [ref(0), ref(1)], [ref(3, 1, HOST), ref(0, 1, HOST)])
    side.start(2, *move, set_blocks(2, [(4, 1)]), span(2, 0, 2))
    end = long_work()
    blocks, _ = side.executor.read_blocks(1, 1, range(2))
    assert not end.query(), "the swaps have waited for the caller's work"
    assert torch.equal(blocks, before.to(blocks.device))


def test_threads_with_streams_of_their_own_keep_the_order_of_commands(side: Side) -> None:
    side.start(1, set_blocks(1, [(0, 1), (1, 1)]), span(1, 0, 12))
    tensors = qkv(12)
    torch.cuda.synchronize()
    end = long_work()
    side.feed(1, 0, *tensors)
    with ThreadPoolExecutor(1, initializer=side.executor.use_own_stream) as other:
        its_own = other.submit(torch.cuda.current_stream, GPU).result()
        assert its_own != torch.cuda.current_stream(GPU)
        other.submit(side.feed, 1, 1, *tensors).result()
        other.submit(side.finish, 1).result()
    assert end.query(), "the other thread's receipt came before this thread's layer was done"


def test_a_fence_waits_for_the_device(side: Side) -> None:
    side.start(1, set_blocks(1, [(0, 1)]), span(1, 0, 8))
    end = long_work()
    side.feed(1, 0, *qkv(8))
    fence = threading.Thread(target=side.fence, args=(1,))
    fence.start()
    fence.join()
    assert end.query()


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_another_tenants_blocks_are_cleared_on_both_tiers(kv_dtype: str) -> None:
    side = Side(replace(LAYOUT, kv_dtype=kv_dtype), device="cuda")
    run_a_prompt(side)
    side.start(2, *moved(1, [ref(0), ref(1)], [ref(3, 1, HOST), ref(0, 1, HOST)]))
    side.fence(1)
    side.open(3, tenant="another")
    side.start(
        1,
        set_blocks(1, [(1, 2), (0, 2), (5, 1)]),
        set_blocks(2, [(0, 2), (3, 2)], tier=HOST),
        transfer(ref(0, 2), ref(5, 1)),
        session_id=3,
    )
    assert not side.blocks(3, 1, 3).any()
    assert not side.blocks(3, 2, 2).any()
    assert side.executor.counters.num_cleared_blocks == 4


def test_what_a_kernel_could_not_follow_takes_the_receipt(side: Side) -> None:
    side.start(1, set_blocks(1, [(0, 1)]), span(1, 0, 8))
    side.feed(1, 0, *qkv(8))
    run = side.executor._sessions.get(1).latest
    assert run is not None
    run.attention[0].slots.fill_(10**6)
    side.feed(1, 1, *qkv(8))
    with pytest.raises(InternalError, match="slots"):
        side.executor.receipt(1)
    side.outputs[1].clear()
    whole = set_blocks(1, [(0, 1)], allocated=False)
    side.start(3, whole, span(1, 0, 8), previous=0, resync=True)
    for layer in LAYERS:
        side.feed(1, layer, *qkv(8))
    side.finish(1)


def test_the_host_tier_is_pinned_as_long_as_its_executor_lives() -> None:
    executor = Executor(
        LAYOUT, pool_id=POOL_ID, num_device_blocks=4, num_host_blocks=1024, device="cuda"
    )
    host = executor.pools.host_tier
    assert host.is_pinned()
    del executor
    gc.collect()
    assert not host.is_pinned()


@pytest.mark.parametrize("field", ["num_device_blocks", "num_host_blocks"])
def test_a_tier_that_does_not_fit_is_refused(field: str) -> None:
    counts = {"num_device_blocks": 4, "num_host_blocks": 4, field: 10**10}
    with pytest.raises(NeverFitsError) as caught:
        Executor(LAYOUT, pool_id=POOL_ID, device="cuda", **counts)
    assert caught.value.field == field
    Side(LAYOUT, device="cuda")  # The failure has left nothing behind.


def test_tensors_come_and_go_bit_for_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.randn(5, 3, 16).to(dtype)
        there = tensor_from_message(tensor_to_message(tensor), GPU, field="t")
        assert there.device == GPU
        assert torch.equal(there.cpu(), tensor)
        assert tensor_to_message(there) == tensor_to_message(tensor)
    here = [torch.arange(7), torch.zeros((2, 0), dtype=torch.int32), torch.ones(3)]
    for expected, actual in zip(here, upload(here, GPU), strict=True):
        assert torch.equal(actual.cpu(), expected)
