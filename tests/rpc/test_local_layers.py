"""Layers that a client on this machine has bound: native code answers their packets as Python
would, and leaves to it what it would refuse.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from data_plane import limits
from data_plane.server.local import endpoint, layer_server
from data_plane.server.local.connection import LocalConnection
from kvplane import DataClient
from kvplane.attention_options import AttentionOptions
from kvplane.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    UnauthenticatedError,
)
from kvplane.execution.execution import shards_of
from kvplane.runtime.region_layers import RegionLayers
from kvplane.transport.local import connection as client_connection
from kvplane.transport.local import packets
from kvplane.wire.v1 import execution_pb2 as pb
from tests.helpers.data.plan_author import tokens
from tests.helpers.local_peer import LocalPeer, error_of, output_after, plan_of_two_tokens
from tests.helpers.served import Served, served
from tests.helpers.waiting import until

NUM_PLANS = 4  # of two tokens, in one block
NUM_LAYERS = 2


class Rig:
    """A data plane, and a client that has run ``number`` plans of two tokens."""

    def __init__(self, served: Served, peer: LocalPeer) -> None:
        self.server = served.server
        self.author = served.author
        self.num_native = served.num_native
        self.stub = served.stub
        self.peer = peer
        self.number = 0
        self.bound: set[int] = set()
        """Layers that are bound, for two tokens."""

    @property
    def connection(self) -> LocalConnection:
        """The data plane's end."""
        return next(iter(self.server.local._connections.values()))

    @property
    def tier(self) -> torch.Tensor:
        """A copy of the pool's memory."""
        return self.server.executor.pools.device_tier.clone()

    async def start(self) -> None:
        self.number += 1
        plan = plan_of_two_tokens(self.author, self.number)
        assert (await self.peer.ask(plan=plan)).started.num_tokens == 2

    async def layer(self, layer: int) -> pb.ExecuteResponse:
        """Tensors of another seed in each plan."""
        request = self.peer.layer(layer, 2, seed=100 * self.number)
        if layer not in self.bound:
            answer = await self.peer.bind(request)
            if answer.HasField("error"):
                return answer
            self.bound.add(layer)
        return await self.peer.ask_bound(layer)

    async def run(self) -> pb.ExecuteResponse:
        """A plan and its layers. Returns the last answer, of output that is right."""
        await self.start()
        for layer in range(NUM_LAYERS):
            answer = await self.layer(layer)
            assert answer.output.layer == layer
            self.check_output()
        assert self.author.read_receipt(answer.output.receipt).plan_number == self.number
        return answer

    def check_output(self) -> None:
        """The layer's, after all plans so far."""
        want = output_after(self.number)
        torch.testing.assert_close(self.peer.output(2), want, atol=1e-5, rtol=1e-5)


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(limits, "LOCAL_SPIN_S", 1.0)
    async with served(tmp_path, local_region_bytes=1 << 20) as plane:
        peer = await plane.joined()
        yield Rig(plane, peer)
        peer.close()


async def test_bound_layers_are_computed_and_counted_like_others(rig: Rig) -> None:
    counters, local = rig.server.executor.counters, rig.server.local
    for _ in range(NUM_PLANS):
        await rig.run()
    # Not the last layers, whose answers have the receipts.
    assert await rig.num_native() == NUM_PLANS * (NUM_LAYERS - 1)
    assert counters.num_written_tokens == 2 * NUM_PLANS * NUM_LAYERS
    assert counters.num_attention_tokens == 2 * NUM_PLANS * NUM_LAYERS
    num_packets = NUM_PLANS * (1 + NUM_LAYERS) + NUM_LAYERS
    assert local.num_packets == num_packets
    rig.peer.close()
    await until(lambda: not local.num_regions)
    assert local.num_packets == num_packets


async def test_a_plan_presented_again_runs_again(rig: Rig) -> None:
    """Its layers come once more then, by native code too."""
    for _ in range(2):
        await rig.run()
    num_native = await rig.num_native()
    for num_presented in (1, 2):
        await rig.start()
        assert (await rig.layer(0)).output.layer == 0
        rig.check_output()
        assert await rig.num_native() == num_native + num_presented
        rig.number -= num_presented == 1
    assert (await rig.layer(1)).output.HasField("receipt")


@pytest.mark.parametrize("when", ["bound", "not bound", "looked for"])
async def test_a_caller_that_was_removed_since_the_plan_began_is_refused(
    rig: Rig, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native code answers layers that are bound, and leaves other packets to Python."""
    # Connections whose time is over are not ended before they are answered so.
    monkeypatch.setattr(LocalConnection, "end_if_due", lambda _: None)

    def admit() -> None:
        raise UnauthenticatedError("is not on the list")

    def remove() -> None:
        rig.connection._admit = admit

    for _ in range(0 if when == "not bound" else 2):
        await rig.run()
    await rig.start()
    before = rig.tier
    if when == "looked for":
        await asyncio.sleep(0.1)  # the thread looks for the layer, and is not called away
        remove()
    else:
        await rig.server._worker.run(remove)
    assert type(error_of(await rig.layer(0))) is UnauthenticatedError
    assert torch.equal(rig.tier, before)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that follow each other closely may be run under the lock for an hour, and nothing
    calls the thread away meanwhile.
    """
    monkeypatch.setattr(layer_server, "_MOST_S", 3600.0)
    monkeypatch.setattr(endpoint, "_SWEEP_INTERVAL_S", 3600.0)


@pytest.mark.usefixtures("unhurried")
async def test_while_packets_are_looked_for_the_executor_is_free(rig: Rig) -> None:
    """For callers in the same process, which do not ring for the thread."""
    for _ in range(3):
        await rig.run()
    lock: Any = rig.server.executor._command.lock

    def is_free() -> bool:
        if not lock.acquire(timeout=10.0):
            return False
        lock.release()
        return True

    num_native = await rig.num_native()
    for ask in (rig.start, partial(rig.layer, 0)):  # the first layer is run by native code
        await ask()
        assert await asyncio.to_thread(is_free)
    assert await rig.num_native() == num_native + 1


async def test_what_is_bound_is_checked(rig: Rig) -> None:
    """A layer that cannot be run cannot be bound, and its number is not bound any more."""
    await rig.run()
    await rig.start()
    request = rig.peer.layer(0, 2)
    request.key.shape[2] = 8
    assert getattr(error_of(await rig.peer.bind(request)), "field", "") == "layer.key"
    for number, field in ((0, "binding"), (7, "binding"), (packets.MAX_BINDINGS, "binding")):
        error = error_of(await rig.peer.ask_bound(number))
        assert (type(error), getattr(error, "field", "")) == (InvalidRequestError, field)
    many, right = packets.MAX_BINDINGS, rig.peer.layer(0, 2).SerializeToString()
    answer = await rig.peer._ask_bound(packets.BIND_LAYER, many, right)
    assert getattr(error_of(answer), "field", "") == "binding"
    named = rig.peer.layer(0, 2)
    named.plan_number = 2
    assert getattr(error_of(await rig.peer.bind(named)), "field", "") == "layer.plan_number"
    for packet in (b"\0", b"\0\7" + bytes(6), packets.head_of(packets.LAYER, 1) + b"short"):
        assert isinstance(error_of(await rig.peer.ask(packet)), InvalidRequestError)
    rig.bound.discard(0)
    assert (await rig.layer(0)).output.layer == 0
    rig.check_output()


async def test_a_number_is_bound_again_for_another_layer(rig: Rig) -> None:
    await rig.run()
    await rig.start()
    request = rig.peer.layer(1, 2, seed=100 * rig.number)
    request.layer = 0
    head = packets.head_of(packets.BIND_LAYER, 1)
    rig.peer.send(head + request.SerializeToString())
    assert await rig.peer._receive() == head
    assert (await rig.peer.ask_bound(1)).output.layer == 1  # the number
    rig.check_output()
    assert await rig.num_native() == NUM_LAYERS
    latest = rig.server.executor._sessions.get(1).latest
    assert latest is not None
    assert latest.progress.is_written(0)
    assert not latest.progress.is_written(1)


@pytest.mark.parametrize("where", ["serve", "admit"])
async def test_a_bug_ends_the_connection_and_nothing_else(
    rig: Rig, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        await rig.run()

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    await rig.start()
    if where == "serve":
        monkeypatch.setattr(rig.server.executor.layer_runner, "serve", fail)
    else:
        monkeypatch.setattr(rig.connection, "_admit", fail)
    rig.peer.send(packets.head_of(packets.LAYER, 0) + packets.named(**rig.peer.plan))
    assert await rig.peer.ended()
    assert await rig.server._worker.run(lambda: 5) == 5
    assert rig.server.local.num_regions == 0


async def test_an_output_over_the_tensors_is_left_to_python(rig: Rig) -> None:
    """There it is computed beside them, and copied."""
    for number in (1, 2, 3):
        await rig.start()
        for layer in range(NUM_LAYERS):
            request = rig.peer.layer(layer, 2, seed=100 * number)
            request.output.offset_bytes = request.query.memory.offset_bytes
            assert not (await rig.peer.bind(request)).HasField("error")
            assert (await rig.peer.ask_bound(layer)).output.layer == layer
    assert await rig.num_native() == 0


@pytest.mark.parametrize("native", ["new", "old", None])
async def test_both_clients_get_the_same_bits(
    rig: Rig, native: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With native code, and in Python where there is none, or one from before local executions."""
    if native != "new":
        monkeypatch.setattr(client_connection, "native", native and ModuleType(native))
    rig.peer.call.cancel()
    async with DataClient(rig.server.address) as client:
        execution = await client.open(rig.author.grant())
        layers = RegionLayers(shards_of(execution)[0])
        for number in range(1, NUM_PLANS + 1):
            plan = plan_of_two_tokens(rig.author, number)
            assert await asyncio.to_thread(layers.begin, plan, 2)
            tensors = [tokens(2, 4 if i == 0 else 2, seed=100 * number + i) for i in range(3)]
            for layer in range(NUM_LAYERS):
                out = await asyncio.to_thread(layers.layer, layer, *tensors, AttentionOptions())
                rig.number = number
                rig.peer.output = lambda _, out=out: out  # type: ignore[method-assign,misc]
                rig.check_output()
            assert rig.author.read_receipt(*execution.receipts).plan_number == number
        assert shards_of(execution)[0].local.is_native == (native == "new")
        await execution.close()


async def test_a_native_call_that_gets_no_answer_ends_in_time(rig: Rig) -> None:
    rig.peer.call.cancel()
    async with DataClient(rig.server.address, timeout_s=0.3) as client:
        execution = await client.open(rig.author.grant())
        layers = RegionLayers(shards_of(execution)[0])
        await execution.start(plan_of_two_tokens(rig.author))
        tensors: list[Any] = [tokens(2, 4), tokens(2), tokens(2)]
        rig.server._worker.post(lambda: time.sleep(1.0))
        with pytest.raises(DeadlineExceededError):
            await asyncio.to_thread(layers.layer, 0, *tensors, AttentionOptions())
        assert shards_of(execution)[0].local is None
        assert await asyncio.to_thread(layers.layer, 0, *tensors, AttentionOptions()) is None
        await execution.close()
