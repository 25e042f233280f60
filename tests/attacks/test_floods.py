"""Many requests, calls and connections at once: honest callers go on, and the memory stays in
bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kvplane.errors import (
    DeadlineExceededError,
    KvplaneError,
    QuotaExceededError,
)
from kvplane.serving import requests, server
from kvplane.wire import protocol
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.v1 import execution_pb2 as dpb
from kvplane.wire.v1 import execution_pb2_grpc, prefix_pb2, prefix_pb2_grpc
from kvplane.wire.v1 import types_pb2 as tpb
from tests.e2e.engine_planes import free_port
from tests.helpers.attacked_planes import (
    HonestCaller,
    PlaneProcess,
    assert_calm,
    refusal,
)
from tests.helpers.data.data_server import serving
from tests.helpers.planes_in_process import control_plane as control_plane_here
from tests.helpers.waiting import until, wait_until

MIB = 1 << 20
LARGE = 4 * MIB - 128
NUM_CALLS = 16
SEARCH = prefix_pb2.FindPrefixRequest(token_ids=bytes(LARGE))


def search(stub: prefix_pb2_grpc.PrefixServiceStub, compression: grpc.Compression) -> str:
    """Send one large request; return the name of the status of its answer."""
    try:
        stub.FindPrefix(SEARCH, timeout=30, compression=compression)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


@pytest.mark.parametrize(
    ("compression", "answer", "max_growth_bytes"),
    [
        (grpc.Compression.Gzip, "UNIMPLEMENTED", 16 * MIB),
        # Takes eight seconds; on push one such request is sent by test_large_requests.
        pytest.param(
            *(grpc.Compression.NoCompression, "OK", NUM_CALLS * 4 * LARGE),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_large_requests_at_once_keep_nobody_waiting(
    control_plane: PlaneProcess,
    honest: HonestCaller,
    channel: grpc.Channel,
    compression: grpc.Compression,
    answer: str,
    max_growth_bytes: int,
) -> None:
    stub = prefix_pb2_grpc.PrefixServiceStub(channel)
    begin_bytes = control_plane.begin_peak()

    def attack() -> list[float]:
        with ThreadPoolExecutor(NUM_CALLS) as pool, honest.meanwhile(1.0) as during:
            answers = [*pool.map(lambda _: search(stub, compression), range(NUM_CALLS))]
        assert {*answers} == {answer}
        return during

    assert_calm(honest, attack)
    assert control_plane.peak_bytes() - begin_bytes < max_growth_bytes


def test_streams_on_one_connection_are_bounded(
    control_plane: PlaneProcess, honest: HonestCaller
) -> None:
    def never() -> Iterator[bytes]:
        idle.wait()
        yield from ()

    def attack() -> list[float]:
        with honest.meanwhile(0.3) as during:
            error = refusal(channel, "v1.PoolService/ListPools", b"", timeout_s=0.5)
        assert isinstance(error, DeadlineExceededError), "it has as many calls as it may"
        return during

    idle = threading.Event()
    with grpc.insecure_channel(control_plane.address) as channel:
        step = channel.stream_stream("/kvplane.v1.SessionService/StreamSteps")
        calls = [step(never()) for _ in range(300)]
        assert_calm(honest, attack)
        for call in calls:
            call.cancel()
        idle.set()
        # The server refuses streams until it has heard that others were cancelled.
        wait_until(lambda: refusal(channel, "v1.PoolService/ListPools", b"") is None, 10.0)


def test_metadata_is_bounded(
    control_plane: PlaneProcess, honest: HonestCaller, channel: grpc.Channel
) -> None:
    many, long = [("x", "y" * 4000)] * 16, [("authorization", "Bearer " + "y" * 100_000)]
    list_pools = channel.unary_unary("/kvplane.v1.PoolService/ListPools")

    def attack() -> list[float]:
        with honest.meanwhile(0.5) as during:
            for metadata in (many, long) * 8:
                with pytest.raises(grpc.RpcError) as refused:
                    list_pools(b"", metadata=metadata, timeout=10)
                assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        return during

    begin_bytes = control_plane.begin_peak()
    assert_calm(honest, attack)
    assert control_plane.peak_bytes() - begin_bytes < 16 * MIB
    assert refusal(channel, "v1.PoolService/ListPools", b"") is None


@contextlib.contextmanager
def few_files(num_files: int) -> Iterator[None]:
    """Limit the open files of processes that are started meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_idle_connections_leave_room_for_the_planes(tmp_path: Path) -> None:
    plane_port = free_port()
    flags = ("--plane-bind", f"127.0.0.1:{plane_port}")
    with few_files(128):  # of which a plane takes three eighths, 48, for connections
        planes = PlaneProcess("control_plane", tmp_path, *flags)
    with planes as plane, contextlib.ExitStack() as stack:
        host, _, port = plane.address.rpartition(":")
        before = plane.num_descriptors()
        for _ in range(80):
            stack.enter_context(socket.create_connection((host, int(port)), 5))
        with grpc.insecure_channel(plane.address) as late:
            error = refusal(late, "v1.PoolService/ListPools", b"", timeout_s=2)
            assert isinstance(error, KvplaneError)
        assert plane.num_descriptors() - before <= 52
        with grpc.insecure_channel(f"127.0.0.1:{plane_port}") as channel:
            assert refusal(channel, "v1.PoolService/ListPools", b"") is None


async def test_a_caller_whose_requests_wait_is_refused_more_and_others_are_not(
    tmp_path: Path,
) -> None:
    """On a data plane, whose thread is busy: a caller is a connection here."""
    write = dpb.RunLayerRequest(key=tpb.Tensor(data=bytes(3 * MIB)))
    busy = asyncio.Event()
    async with serving(tmp_path, max_received_bytes=16 * MIB) as (server, _):
        loop = asyncio.get_running_loop()
        blocked = asyncio.create_task(
            server._worker.run(asyncio.run_coroutine_threadsafe(busy.wait(), loop).result)
        )
        async with (
            grpc.aio.insecure_channel(server.address, options=protocol.CHANNEL_OPTIONS) as greedy,
            grpc.aio.insecure_channel(server.address, options=protocol.CHANNEL_OPTIONS) as other,
        ):
            first = execution_pb2_grpc.ExecutionServiceStub(greedy).ReshapeAndCache(write)
            neighbour = execution_pb2_grpc.ExecutionServiceStub(other).ReshapeAndCache(write)
            await until(lambda: server.metrics.rpc.received.num_bytes >= 6 * MIB, 10)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await execution_pb2_grpc.ExecutionServiceStub(greedy).ReshapeAndCache(
                    write, timeout=5
                )
            busy.set()
            assert isinstance(from_rpc_error(refused.value), QuotaExceededError)
            assert server.metrics.rpc.rejected.values["QUOTA_EXCEEDED",] == 1
            await blocked
            for call in (first, neighbour):  # they were let in, and are wrong
                assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert server.metrics.rpc.received.num_bytes == 0


async def test_open_calls_of_a_caller_are_bounded_over_its_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_CALLER_CALLS", 4)
    access, entry = tmp_path / "access.toml", '[[callers]]\ntoken_sha256 = "{}"\ntenant = "{}"\n'
    access.write_text(
        "".join(
            entry.format(hashlib.sha256(name.encode()).hexdigest(), name) + 'roles = ["engine"]\n'
            for name in ("a", "b")
        )
    )
    a, b = ([("authorization", f"Bearer {name}")] for name in ("a", "b"))

    async def code(channel: grpc.aio.Channel, metadata: list[tuple[str, str]]) -> grpc.StatusCode:
        call = channel.unary_unary("/kvplane.v1.PoolService/ListPools")
        return await call(b"", metadata=metadata, timeout=10).code()

    async with (
        control_plane_here(access_file=access) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        options = [("grpc.use_local_subchannel_pool", 1)]
        one, other = [
            await stack.enter_async_context(grpc.aio.insecure_channel(server.address, options))
            for _ in range(2)
        ]
        await stack.enter_async_context(asyncio.timeout(30))
        step = "/kvplane.v1.SessionService/StreamSteps"
        calls = [channel.stream_stream(step)(metadata=a) for channel in (one, other) * 2]
        for channel in (one, other):  # or a call that is counted here would take a stream's place
            assert await code(channel, b) == grpc.StatusCode.OK
        for channel in (one, other):
            while await code(channel, a) == grpc.StatusCode.OK:
                await asyncio.sleep(0.05)
            assert await code(channel, a) == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await code(channel, b) == grpc.StatusCode.OK
        for call in calls:
            call.cancel()
        while await code(one, a) != grpc.StatusCode.OK:
            await asyncio.sleep(0.05)


async def test_open_health_checks_of_a_connection_are_bounded() -> None:
    watch, check = "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        control_plane_here() as plane,
        grpc.aio.insecure_channel(plane.address, options) as one,
        grpc.aio.insecure_channel(plane.address, options) as other,
    ):
        watches = [one.unary_stream(watch)(b"") for _ in range(requests.MAX_HEALTH_CALLS)]
        for each in watches:
            await each.read()
        refused = one.unary_unary(check)(b"", timeout=10)
        assert await refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await one.unary_unary("/kvplane.v1.PoolService/ListPools")(b"", timeout=10)
        await other.unary_unary(check)(b"", timeout=10)


async def test_a_request_that_does_not_come_ends_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_ARRIVAL_S", 0.1)
    access = tmp_path / "access.toml"
    digest = hashlib.sha256(b"token").hexdigest()
    access.write_text(f'[[callers]]\ntoken_sha256 = "{digest}"\ntenant = "a"\nroles = ["router"]\n')
    metadata = [("authorization", "Bearer token")]
    async with (
        control_plane_here(access_file=access) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        method = channel.stream_unary("/kvplane.v1.PoolService/ListPools")
        call = method(metadata=metadata)
        assert await asyncio.wait_for(call.code(), 10) == grpc.StatusCode.DEADLINE_EXCEEDED
        silent = method(metadata=metadata)
        await silent.done_writing()
        assert await asyncio.wait_for(silent.code(), 10) == grpc.StatusCode.INVALID_ARGUMENT


def test_nothing_is_read_of_a_caller_that_is_not_known(tmp_path: Path) -> None:
    access = tmp_path / "access.toml"
    access.write_text('[[callers]]\ncertificate = "somebody"\nroles = ["engine"]\n')

    def grown_bytes() -> int:
        with (
            PlaneProcess("control_plane", tmp_path, "--access-file", str(access)) as plane,
            grpc.insecure_channel(plane.address, options=protocol.CHANNEL_OPTIONS) as channel,
            ThreadPoolExecutor(NUM_CALLS) as pool,
        ):
            stub = prefix_pb2_grpc.PrefixServiceStub(channel)
            search(stub, grpc.Compression.NoCompression)
            begin_bytes = plane.begin_peak()
            answers = pool.map(
                lambda _: search(stub, grpc.Compression.NoCompression), range(NUM_CALLS)
            )
            assert {*answers} == {"UNAUTHENTICATED"}
            return plane.peak_bytes() - begin_bytes

    # On a busy machine gRPC may have taken in a part of the messages before a call is refused.
    assert any(grown_bytes() < NUM_CALLS * LARGE / 2 for _ in range(3))


async def test_a_connection_that_never_speaks_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_MS", 500)
    async with control_plane_here() as plane, asyncio.timeout(30):
        host, _, port = plane.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):  # what the server says first
                pass
        writer.close()


async def test_a_connection_without_calls_is_closed_and_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "IDLE_MS", 300)
    async with (
        control_plane_here() as plane,
        grpc.aio.insecure_channel(plane.address) as channel,
    ):
        for _ in range(2):
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
            await until(lambda: channel.get_state() == grpc.ChannelConnectivity.IDLE, 10)


async def test_health_checks_of_a_connection_are_read_in_turn() -> None:
    check = "/grpc.health.v1.Health/Check"
    async with (
        control_plane_here() as plane,
        grpc.aio.insecure_channel(plane.address, options=protocol.CHANNEL_OPTIONS) as one,
        grpc.aio.insecure_channel(plane.address, options=protocol.CHANNEL_OPTIONS) as other,
    ):
        await one.unary_unary(check)(b"")
        silent = one.stream_unary(check)()
        await asyncio.sleep(0.2)
        waiting = one.unary_unary(check)(b"", timeout=0.5)
        assert await waiting.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await other.unary_unary(check)(b"", timeout=10)
        silent.cancel()
        await one.unary_unary(check)(b"", timeout=10)
