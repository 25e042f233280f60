"""Shared memory and the Unix socket beside an execution stream: what it serves, what it refuses,
and when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_plane.server.local import endpoint
from data_plane.server.tensor_codec import tensor_to_message
from kvplane import Execution
from kvplane.errors import (
    InvalidRequestError,
    QuotaExceededError,
    SessionExpiredError,
    UnauthenticatedError,
)
from kvplane.execution import shard_execution
from kvplane.execution.execution import shards_of
from kvplane.tensor import Tensor
from kvplane.transport.local import packets
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import local_pb2
from tests.helpers.data.plan_author import dense_attention, set_blocks, span, tokens
from tests.helpers.local_peer import (
    LocalPeer,
    error_of,
    forget_regions_of_others,
    num_mapped,
    plan_of_two_tokens,
    regions,
)
from tests.helpers.served import Served, served
from tests.helpers.waiting import until

REGION_BYTES = 1 << 20


async def started(rig: Served, session_id: int = 1) -> LocalPeer:
    """Return an execution with a plan of two tokens."""
    peer = await rig.joined(session_id)
    plan = plan_of_two_tokens(rig.author, session_id=session_id)
    assert (await peer.ask(plan=plan)).started.num_tokens == 2
    return peer


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Served]:
    forget_regions_of_others()
    async with served(tmp_path, local_region_bytes=REGION_BYTES, num_local_regions=6) as rig:
        yield rig
    assert num_mapped() == 0


@pytest.fixture
async def peer(rig: Served) -> AsyncIterator[LocalPeer]:
    peer = await started(rig)
    yield peer
    peer.close()


async def test_a_layer_is_computed_in_the_region_and_the_last_brings_the_receipt(
    rig: Served, peer: LocalPeer
) -> None:
    want = dense_attention(tokens(2, 4, seed=0), tokens(2, seed=1), tokens(2, seed=2))
    for layer in (0, 1):
        answer = (await peer.ask(layer=peer.layer(layer, 2))).output
        assert (answer.layer, list(answer.output.shape)) == (layer, [2, 4, 16])
        assert answer.output.memory.offset_bytes == 4096 * 3
        torch.testing.assert_close(peer.output(2), want, atol=1e-5, rtol=1e-5)
    assert rig.author.read_receipt(answer.receipt).plan_number == 1


async def test_the_region_can_neither_shrink_nor_grow(peer: LocalPeer) -> None:
    for size_bytes in (0, REGION_BYTES - 1, REGION_BYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(peer.fd, size_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(peer.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(peer.fd).st_size == peer.region.size_bytes == REGION_BYTES


async def test_the_socket_is_in_a_folder_for_this_user_alone(rig: Served, peer: LocalPeer) -> None:
    folder = Path(peer.offer.socket_path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    await rig.server.stop()
    assert not folder.exists()


async def test_a_process_of_another_user_is_not_spoken_to(
    rig: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = await LocalPeer.offered(rig.stub, rig.author.grant())
    monkeypatch.setattr(packets.os, "geteuid", lambda: os.getuid() + 1)
    peer.peer.connect(peer.offer.socket_path)
    with contextlib.suppress(OSError):  # it may have been closed already
        join = local_pb2.JoinExecution(secret=peer.offer.secret)
        peer.send(pb.ExecuteRequest(join=join).SerializeToString())
    assert await peer.ended()
    peer.close()


async def test_an_offer_is_taken_once_by_who_knows_its_secret(rig: Served) -> None:
    first = await rig.joined()
    for secret in (first.offer.secret, bytes(32), b"", b"x" * 1000):
        second = await LocalPeer.offered(rig.stub, rig.author.grant())
        error = error_of(await second.join(secret))
        assert (type(error), error.field) == (UnauthenticatedError, "join.secret")
        assert await second.ended()
        second.close()
    assert rig.server.local.num_regions == 1
    first.close()


async def test_an_offer_that_is_old_is_void(rig: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_OFFER_S", 0.01)
    peer = await LocalPeer.offered(rig.stub, rig.author.grant())
    await asyncio.sleep(0.02)
    assert isinstance(error_of(await peer.join()), UnauthenticatedError)
    peer.close()


async def test_a_peer_that_does_not_join_is_hung_up_on(
    rig: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_JOIN_S", 0.05)
    peer = await LocalPeer.offered(rig.stub, rig.author.grant())
    peer.peer.connect(peer.offer.socket_path)
    assert await peer.ended()
    peer.close()


async def test_a_caller_on_another_machine_is_offered_nothing(rig: Served) -> None:
    for host_id in ("", "another boot"):
        call = rig.stub.Execute()
        opening = pb.OpenExecution(grant=rig.author.grant(), host_id=host_id)
        await call.write(pb.ExecuteRequest(open=opening))
        assert not (await call.read()).opened.HasField("local")
        call.cancel()


REFUSED: dict[str, tuple[str, Callable[[pb.RunLayerRequest], object]]] = {
    "elements in the message": (
        "layer.key.memory.region_id",
        lambda m: m.key.CopyFrom(tensor_to_message(tokens(2))),
    ),
    "no output": ("layer.output.region_id", lambda m: m.ClearField("output")),
    "no such region": ("layer.query.memory.region_id", lambda m: set_range(m.query, 0, 9)),
    "before the region": ("layer.key.memory.offset_bytes", lambda m: set_range(m.key, -64)),
    "not aligned": ("layer.value.memory.offset_bytes", lambda m: set_range(m.value, 4)),
    "past the end": (
        "layer.key.memory.offset_bytes",
        lambda m: set_range(m.key, REGION_BYTES - 64),
    ),
    "far past the end": ("layer.key.memory.offset_bytes", lambda m: set_range(m.key, 2**63 - 64)),
    "an output past the end": (
        "layer.output.offset_bytes",
        lambda m: setattr(m.output, "offset_bytes", REGION_BYTES - 64),
    ),
    "a shape below zero": ("layer.key.shape", lambda m: set_shape(m.key, 2, -2, 16)),
    "a product that overflows": (
        "layer.key.memory.offset_bytes",
        lambda m: set_shape(m.key, 2**31 - 1, 2**31 - 1, 2**31 - 1),
    ),
    "an extent of 2**31": ("layer.key.shape", lambda m: set_shape(m.key, 0, 2**31, 16)),
    "nine dimensions": ("layer.key.shape", lambda m: set_shape(m.key, *[1] * 9)),
    "a query of two dimensions": ("layer.query", lambda m: set_shape(m.query, 2, 64)),
    "no such type": ("layer.query.dtype", lambda m: setattr(m.query, "dtype", 9)),
}


def set_range(tensor: Any, offset_bytes: int, region_id: int | None = None) -> None:
    tensor.memory.offset_bytes = offset_bytes
    if region_id is not None:
        tensor.memory.region_id = region_id


def set_shape(tensor: Any, *shape: int) -> None:
    tensor.shape[:] = shape


@pytest.mark.parametrize("what", REFUSED)
async def test_what_does_not_fit_is_refused_and_changes_nothing(
    rig: Served, peer: LocalPeer, what: str
) -> None:
    field, spoil = REFUSED[what]
    before = rig.server.executor.pools.device_tier.clone()
    request = peer.layer(0, 2)
    spoil(request)
    assert peer.memory is not None
    in_region = bytes(peer.memory)
    for _ in range(2):
        error = error_of(await peer.ask(layer=request))
        assert (type(error), error.field) == (InvalidRequestError, field)
    assert torch.equal(rig.server.executor.pools.device_tier, before)
    assert bytes(peer.memory) == in_region
    assert (await peer.ask(layer=peer.layer(0, 2))).output.layer == 0


async def test_packets_that_are_no_requests_are_answered(peer: LocalPeer) -> None:
    error = error_of(await peer.ask(b"\xff\xff\xff"))
    assert isinstance(error, InvalidRequestError)
    for message in ({}, {"join": local_pb2.JoinExecution(secret=peer.offer.secret)}):
        error = error_of(await peer.ask(pb.ExecuteRequest(**message).SerializeToString() or b"\0"))
        assert isinstance(error, InvalidRequestError)
    assert (await peer.ask(layer=peer.layer(0, 2))).output.layer == 0


@pytest.mark.parametrize("packet", [b"", bytes(packets.MAX_PACKET_BYTES + 1)], ids=["", "long"])
async def test_a_packet_without_a_length_that_can_be_ends_the_connection(
    rig: Served, peer: LocalPeer, packet: bytes
) -> None:
    peer.send(packet)
    assert await peer.ended()
    peer.memory = None
    await regions(rig.server, 0)


async def test_both_ways_of_a_stream_are_one_execution(rig: Served, peer: LocalPeer) -> None:
    """A layer over gRPC may follow one by the socket, and refer to the region too."""
    assert (await peer.ask(layer=peer.layer(0, 2))).output.layer == 0
    request = pb.ExecuteRequest.FromString(peer.packet(peer.layer(1, 2)))
    await peer.call.write(request)
    answer = (await peer.call.read()).output
    assert answer.output.memory.region_id == peer.region.region_id
    assert rig.author.read_receipt(answer.receipt).plan_number == 1


@pytest.mark.parametrize("end", ["socket", "stream", "session", "reopened"])
async def test_the_region_ends_with_what_it_belongs_to(rig: Served, end: str) -> None:
    peer = await started(rig)
    assert rig.server.local.num_regions == 1
    if end == "socket":
        peer.close()
    elif end == "stream":
        peer.call.cancel()
    elif end == "session":
        rig.server.executor.fence(rig.author.session(1), 1)
        error = error_of(await peer.ask(layer=peer.layer(0, 2)))
        assert isinstance(error, SessionExpiredError)
    else:
        opening = pb.OpenExecution(grant=rig.author.grant(2))
        await peer.call.write(pb.ExecuteRequest(open=opening))
        assert (await peer.call.read()).HasField("opened")
    peer.memory = None
    await regions(rig.server, 0)
    if end != "socket":
        assert await peer.ended()
        peer.close()


async def test_regions_are_bounded_for_a_session_and_for_all(rig: Served) -> None:
    async def is_refused(session_id: int) -> bool:
        refused = await LocalPeer.offered(rig.stub, rig.author.grant(session_id))
        error = error_of(await refused.join())
        refused.close()
        return isinstance(error, QuotaExceededError)

    peers = [await rig.joined(1) for _ in range(endpoint.MAX_REGIONS_PER_SESSION)]
    assert await is_refused(1)
    peers += [await rig.joined(2) for _ in range(2)]
    assert await is_refused(3)
    assert rig.server.local.num_bytes == 6 * REGION_BYTES
    peers.pop().close()
    await until(lambda: rig.server.local.num_regions == 5)
    peers.append(await rig.joined(3))
    for peer in peers:
        peer.close()


async def test_a_client_that_takes_no_answers_is_cut_off_and_others_go_on(rig: Served) -> None:
    hostile, honest = await started(rig, 1), await started(rig, 2)
    packet = hostile.packet(hostile.layer(0, 2))
    honest_layer = honest.packet(honest.layer(0, 2))
    with pytest.raises(OSError) as ended:
        for i in range(100_000):
            try:
                hostile.send(packet)
            except BlockingIOError:  # so many wait to be read
                assert (await honest.ask(honest_layer)).output.layer == 0
            if i % 64 == 0:
                assert (await honest.ask(honest_layer)).output.layer == 0
    assert ended.value.errno in (errno.EPIPE, errno.ECONNRESET)
    assert (await honest.ask(layer=honest.layer(1, 2))).output.HasField("receipt")
    for peer in (hostile, honest):
        peer.close()


async def test_a_client_that_stalls_keeps_nobody_waiting(rig: Served, peer: LocalPeer) -> None:
    """Neither one that has joined and says nothing, nor one in the middle of a plan."""
    silent = await rig.joined(2)
    async with rig.client() as client:
        grant = rig.author.grant(3)
        async with await client.open(grant) as execution:
            assert shards_of(execution)[0].local is not None
            await run(execution, plan_of_two_tokens(rig.author, session_id=3))
    silent.close()


async def run(execution: Execution, plan: Any, num_tokens: int = 2, seed: int = 0) -> list[bytes]:
    """The output of each layer."""
    query, key, value = (
        Tensor.from_array(tokens(num_tokens, heads, seed=seed + i))
        for i, heads in enumerate((4, 2, 2))
    )
    await execution.start(plan)
    assert execution.num_tokens == num_tokens
    outputs = [await execution.layer(i, query, key, value) for i in execution.layers]
    assert execution.has_run
    return [bytes(output.data) for output in outputs]


async def test_tensors_that_do_not_fit_the_region_go_over_grpc(tmp_path: Path) -> None:
    async with (
        served(tmp_path, local_region_bytes=4096) as rig,
        rig.client() as client,
        await client.open(rig.author.grant()) as execution,
    ):
        num_packets = []
        for number, first, num_tokens in ((1, 0, 2), (2, 2, 14)):
            changes = [set_blocks(1, [(0, 1), (1, 1)])] if number == 1 else []
            plan = rig.author.plan(number, changes=changes, spans=[span(1, first, num_tokens)])
            await run(execution, plan, num_tokens)
            num_packets.append(rig.server.local.num_packets)
        assert num_packets == [3, 4]  # the second plan, and none of its layers


@pytest.mark.parametrize("why", ["off", "out of reach", "full"])
async def test_a_client_without_a_region_goes_on_over_grpc_and_says_so_once(
    tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard_execution, "_NOT_JOINED", set())
    monkeypatch.setattr(endpoint, "MAX_REGIONS_PER_SESSION", 0 if why == "full" else 4)
    caplog.set_level(logging.INFO, "kvplane")
    async with served(tmp_path, num_local_regions=int(why != "off")) as rig, rig.client() as client:
        if why == "out of reach":
            offer = rig.server.local.offer(None, packets.host_id(), lambda: None, "")
            Path(offer.socket_path).unlink()
        for session_id in (1, 2):
            async with await client.open(rig.author.grant(session_id)) as execution:
                assert shards_of(execution)[0].local is None
                await run(execution, plan_of_two_tokens(rig.author, 1, session_id))
    said = [r for r in caplog.records if "no shared memory" in r.message]
    assert len(said) == int(why != "off")


async def test_a_connection_that_breaks_between_layers_is_made_again(rig: Served) -> None:
    async with (
        rig.client() as client,
        await client.open(rig.author.grant()) as execution,
    ):
        plan = plan_of_two_tokens(rig.author)
        await execution.start(plan)
        first = shards_of(execution)[0].local
        assert first is not None
        part = [Tensor.from_array(tokens(2, heads, seed=i)) for i, heads in enumerate((4, 2, 2))]
        output = await execution.layer(0, *part)
        rig.server.local._end_all()
        assert (await execution.layer(1, *part)) == output
        assert shards_of(execution)[0].local not in (None, first)
        assert rig.author.read_receipt(*execution.receipts).plan_number == 1
