"""A tenant's quota of bytes a second on a data plane, whichever way its tensors travel."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import grpc.aio
import pytest
from data_server import author_of, serving
from listed_peers import listed_peers
from local_peer import LocalPeer, plan_of_two_tokens
from plan_author import LAYOUT, POOL_ID, set_blocks, span, tokens
from two_pools import PROMPT, SEQUENCE, two_pools

from data_plane.server import server as data_server
from data_plane.server.tensor_codec import tensor_to_message
from kvplane import DataClient, Tensor, ops
from kvplane.attention_options import AttentionOptions
from kvplane.errors import QuotaExceededError
from kvplane.serving.limits.byte_quota import ByteQuota
from kvplane.transport.local.layer import LocalLayer
from kvplane.v1 import data_pb2_grpc
from kvplane.wire.error_messages import from_wire

RATE = 4096
A_DAY_S = 86_400.0


class Clock:
    """While it runs, a day passes between any two messages."""

    now_s = 0.0
    runs = True

    def __call__(self) -> float:
        self.now_s += A_DAY_S * self.runs
        return self.now_s

    def stop(self) -> None:
        """Stand still from now on, with all quotas unused."""
        self.now_s += A_DAY_S
        self.runs = False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of the quotas of all data planes."""
    clock = Clock()
    monkeypatch.setattr(data_server, "ByteQuota", partial(ByteQuota, clock=clock))
    return clock


def wire(num_tokens: int, num_heads: int) -> Tensor:
    return Tensor.from_proto(tensor_to_message(tokens(num_tokens, num_heads)))


async def test_a_tenant_is_refused_on_all_its_connections_and_others_are_not(
    tmp_path: Path, clock: Clock
) -> None:
    query, key = wire(20, 4), wire(20, 2)
    num_bytes = len(query.data) + 2 * len(key.data)
    async with (
        listed_peers(tmp_path, max_tenant_bytes_per_s=RATE, num_local_regions=0) as peers,
        peers.client("engine-a") as control,
        peers.client("engine-b") as other_control,
        await control.open_session(POOL_ID, LAYOUT) as session,
        await other_control.open_session(POOL_ID, LAYOUT) as other_session,
        peers.data_client("engine-a") as data,
        peers.data_client("engine-a") as again,
        peers.data_client("engine-b") as other,
        await data.open(session.grant) as execution,
    ):
        rejected = peers.data.metrics.rpc.rejected
        await execution.start((await session.admit(1, range(20))).plan)
        clock.stop()
        await execution.layer(0, query, key, key)
        with pytest.raises(QuotaExceededError) as refused:
            await execution.layer(1, query, key, key, timeout_s=0.5)
        assert rejected.values["QUOTA_EXCEEDED",] == 1
        assert execution.receipt is None
        with pytest.raises(QuotaExceededError):
            await again.describe()
        await other.open(other_session.grant)
        delay_s = refused.value.retry_delay_s
        assert delay_s is not None
        assert num_bytes / RATE - 1 < delay_s < num_bytes / RATE
        clock.now_s += delay_s + 0.001  # an error tells whole nanoseconds
        await execution.layer(1, query, key, key)
        assert execution.receipt is not None


@pytest.mark.parametrize("way", ["grpc", "region", "in this thread", "begun"])
async def test_an_execution_waits_for_its_quota(tmp_path: Path, way: str) -> None:
    query, key = wire(20, 4), wire(20, 2)
    rate = 0.8 * (len(query.data) + 2 * len(key.data))
    async with (
        serving(tmp_path, max_tenant_bytes_per_s=rate, local_region_bytes=1 << 20) as planes,
        DataClient(planes[0].address, shared_memory=way != "grpc") as data,
    ):
        author = author_of(*planes)
        changes = [set_blocks(1, [(i, 1) for i in range(3)])]
        plan = author.plan(1, changes=changes, spans=[span(1, 0, 20)])
        async with await data.open(author.grant()) as execution:
            assert (execution.local is None) == (way == "grpc")
            if way == "begun":
                await execution.begin(plan, 20)
            else:
                await execution.start(plan)
            for layer in execution.layers:
                if way == "in this thread" and execution.local is not None:
                    region = [execution.local, layer, key.dtype]
                    shapes = [query.shape, key.shape, key.shape]
                    made = LocalLayer.make(*region, *shapes, AttentionOptions())
                    assert made is not None
                    if await asyncio.to_thread(execution.layer_now, made):
                        continue
                await execution.layer(layer, query, key, key)
            assert execution.receipt is not None
        assert planes[0].metrics.rpc.rejected.values["QUOTA_EXCEEDED",] >= 1


async def test_tensors_in_shared_memory_count(tmp_path: Path, clock: Clock) -> None:
    async with (
        serving(tmp_path, max_tenant_bytes_per_s=1024, local_region_bytes=1 << 20) as planes,
        grpc.aio.insecure_channel(planes[0].address) as channel,
    ):
        author = author_of(*planes)
        peer = await LocalPeer.joined(data_pb2_grpc.DataPlaneServiceStub(channel), author.grant())
        await peer.ask(plan=plan_of_two_tokens(author))
        clock.stop()
        answers = [await peer.ask(layer=peer.layer(0, 2)) for _ in range(3)]
        # Each has the 1,024 bytes of a second: the second one overdraws.
        assert [a.WhichOneof("message") for a in answers] == ["output", "output", "error"]
        error = from_wire(answers[2].error)
        assert (type(error), error.retry_delay_s) == (QuotaExceededError, 1.0)
        assert planes[0].metrics.rpc.rejected.values["QUOTA_EXCEEDED",] == 1
        clock.now_s += 1.0
        assert (await peer.ask(layer=peer.layer(1, 2))).output.HasField("receipt")
        peer.close()
        peer.memory = None


async def test_blocks_that_are_read_count_for_the_next_request(
    tmp_path: Path, clock: Clock
) -> None:
    async with (
        serving(tmp_path, max_tenant_bytes_per_s=RATE) as (server, side),
        DataClient(server.address, shared_memory=False) as data,
    ):
        author = author_of(server, side)
        async with await data.open(author.grant()) as execution:
            changes = [set_blocks(1, [(0, 1), (1, 1)])]
            await execution.start(author.plan(1, changes=changes, spans=[span(1, 0, 16)]))
            for layer in execution.layers:
                await execution.layer(layer, wire(16, 4), wire(16, 2), wire(16, 2))
            clock.stop()
            await data.read_blocks(author.grant(), 1, num_blocks=2)
            with pytest.raises(QuotaExceededError):
                await data.read_blocks(author.grant(), 1, num_blocks=1)


async def test_blocks_that_are_pushed_count_on_both_sides(tmp_path: Path, clock: Clock) -> None:
    async with two_pools(
        tmp_path, here_settings={"max_tenant_bytes_per_s": RATE}, max_tenant_bytes_per_s=RATE
    ) as pools:
        here, there = pools.here, pools.there
        plan = (await there.session.step([ops.admit(SEQUENCE, PROMPT)])).raise_for_status().plan
        clock.stop()
        ticket = await there.receive(plan)
        with pytest.raises(QuotaExceededError):
            await there.receive(plan)
        sent = await here.data.send_blocks(here.session.grant, SEQUENCE, ticket)
        assert sent.num_bytes > RATE
        with pytest.raises(QuotaExceededError):
            await here.data.describe()
        clock.runs = True
        await here.data.describe()
