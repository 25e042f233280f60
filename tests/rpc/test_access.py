"""Tests who may do what over TLS: roles of an access list, a data plane's pools, grants of others.

Callers name themselves by bearer tokens, one for each, so one server certificate serves them all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvplane import ControlClient, ops
from kvplane.errors import (
    KvplaneError,
    NotPermittedError,
    UnauthenticatedError,
)
from kvplane.execution.execution import shards_of
from kvplane.prefixes import ForgetScope
from kvplane.release import release
from kvplane.serving import requests
from kvplane.serving.callers import access
from kvplane.transport.connection import typed_errors
from kvplane.transport.tls import credentials_of
from kvplane.v1 import execution_pb2
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import prefix_pb2 as ppb
from kvplane.wire.v1 import prefix_pb2_grpc, session_pb2_grpc
from tests.helpers.data.plan_author import LAYOUT, POOL_ID
from tests.helpers.listed_peers import ROLES, Peers, listed, listed_peers
from tests.helpers.planning.control_wire import PATIENCE_S, RawShard, Stub, stub_of
from tests.helpers.refusals import refused
from tests.helpers.waiting import until


@pytest.fixture
async def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Peers]:
    monkeypatch.setattr(access, "_RELOAD_INTERVAL_S", 0.0)
    async with listed_peers(tmp_path) as peers:
        yield peers


async def test_an_engine_computes_on_both_planes(peers: Peers) -> None:
    async with peers.engine("engine-a") as engine:
        await engine.step(ops.admit(1, range(20)), spans=[(0, 20)])


@pytest.mark.parametrize("name", ["", "nobody"])
async def test_a_caller_that_is_not_listed_is_told_so(peers: Peers, name: str) -> None:
    async with peers.client(name) as control, peers.data_client(name) as data:
        for call in (control.list_pools, control.get_server_info, data.get_server_info):
            with pytest.raises(UnauthenticatedError):
                await call()
    async with raw(peers, name) as channel:  # health is for everybody, reflection is not
        assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"
        reflect = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        code = await channel.stream_stream(reflect)(iter([b""]), timeout=5).code()
        assert code == grpc.StatusCode.UNAUTHENTICATED


OPEN = "open a session"
LOOK = "look a prefix up"
WATCH = "follow the index"
RETAIN = "retain a prefix"
FORGET = "forget prefixes"
LIST = "list sessions"
COUNT = "see what all tenants do"
MAY = {
    "engine-a": {OPEN, LOOK, WATCH, RETAIN, FORGET},
    "router": {LOOK, WATCH},
    "operator": {LOOK, WATCH, RETAIN, FORGET, LIST, COUNT},
    "plane": set(),
}


async def first_event(control: ControlClient) -> None:
    async with contextlib.aclosing(control.watch_prefixes(POOL_ID)) as events:
        await anext(events)


@pytest.mark.parametrize("name", MAY)
async def test_a_role_may_what_the_contract_says(peers: Peers, name: str) -> None:
    async with peers.client(name) as control:
        assert await control.list_pools() == [POOL_ID]
        calls = {
            OPEN: lambda: control.open_session(POOL_ID, LAYOUT),
            LOOK: lambda: control.find_prefix(list(range(8))),
            WATCH: lambda: first_event(control),
            RETAIN: lambda: control.retain_prefix(POOL_ID, [1], time_to_live_s=1),
            FORGET: lambda: control.forget_prefixes(POOL_ID, ForgetScope.TENANT),
            LIST: lambda: control.list_sessions(POOL_ID),
            COUNT: lambda: control.get_counters(POOL_ID),
        }
        for what, call in calls.items():
            if what in MAY[name]:
                answer = await call()
                if what == OPEN:
                    await answer.close()
            else:
                with pytest.raises(NotPermittedError, match="needs the role"):
                    await call()


def raw(peers: Peers, name: str, address: str = "") -> grpc.aio.Channel:
    options = [("grpc.ssl_target_name_override", "kvplane.test")]
    return grpc.aio.secure_channel(
        address or peers.control.address, credentials_of(peers.tls(name)), options=options
    )


@pytest.mark.parametrize("name", ["engine-a", "router", "operator", "plane"])
async def test_only_engines_compute_and_everybody_known_may_ask_who_answers(
    peers: Peers, name: str
) -> None:
    services = execution_pb2.DESCRIPTOR.services_by_name.values()
    async with raw(peers, name, peers.data.address) as channel:
        for method in (method for service in services for method in service.methods):
            path = f"/{method.containing_service.full_name}/{method.name}"
            answers: Any
            if method.client_streaming:
                answers = channel.stream_stream(path)(iter([b""]), timeout=PATIENCE_S)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert [_ async for _ in answers]  # of Execute, which answers with an Error
            else:  # sent whole: a call that is refused while it is sent may be reset
                answers = channel.unary_unary(path)(b"", timeout=PATIENCE_S)
            code, told = await answers.code(), await answers.details()
            refused = code == grpc.StatusCode.PERMISSION_DENIED
            assert refused is (name != "engine-a"), (method.name, code, told)
    async with peers.client(name) as control, peers.data_client(name) as data:
        for plane in (control, data):
            assert (await plane.get_server_info()).version == release()


@pytest.mark.parametrize(
    ("name", "pool_id"), [("engine-a", POOL_ID), ("operator", POOL_ID), ("plane", "another")]
)
async def test_a_pools_key_goes_only_to_the_planes_that_are_listed_for_it(
    peers: Peers, name: str, pool_id: str
) -> None:
    async with raw(peers, name) as channel:
        stub = stub_of(channel)
        code = grpc.StatusCode.INTERNAL
        for _ in range(5):  # a call that is refused while its message is sent may be reset
            rogue = RawShard(stub, pool_id=pool_id, epoch=2**62, layout=LAYOUT.to_proto())
            with contextlib.suppress(Exception):  # it may have ended before the message is sent
                await rogue.send(hello=rogue.hello)
            code = await asyncio.wait_for(rogue.call.code(), PATIENCE_S)
            if code != grpc.StatusCode.INTERNAL:
                break
        assert code == grpc.StatusCode.PERMISSION_DENIED
    assert peers.control.core.pool_ids() == [POOL_ID]
    assert peers.data.registered.is_set()


async def test_another_tenants_grant_opens_nothing(peers: Peers) -> None:
    async with (
        peers.client("engine-a") as control,
        peers.data_client("engine-b") as thief,
        await control.open_session(POOL_ID, LAYOUT) as session,
    ):
        grant, plan = session.grant, (await session.step([ops.admit(1, range(20))])).plan
        with refused(NotPermittedError, "grant.tenant"):
            await thief.open(grant)
        stub = stub_of(thief._connection.channel)
        for call in (
            stub.ReadBlocks(pb.ReadBlocksRequest(grant=grant, sequence_id=1, entries=bytes(4))),
            stub.CopyBlocks(pb.StartPlanRequest(grant=grant, plan=plan)),
            stub.SwapBlocks(pb.StartPlanRequest(grant=grant, plan=plan)),
        ):
            with pytest.raises(NotPermittedError), typed_errors():
                await call


async def test_a_role_that_is_taken_away_ends_at_once(peers: Peers) -> None:
    async with peers.client("engine-a") as control:
        session = await control.open_session(POOL_ID, LAYOUT)
        await session.step([ops.admit(1, range(8))])
        peers.access_file.write_text(listed("plane", "engine-b"))
        with pytest.raises(KvplaneError):  # the client may try again, and find out on another call
            await session.step([ops.free([1])], timeout_s=2)
        with pytest.raises(UnauthenticatedError):
            await control.list_pools()
    async with peers.client("engine-b") as other:
        assert await other.list_pools() == [POOL_ID]


async def test_a_caller_that_is_taken_off_the_list_loses_its_shared_memory(peers: Peers) -> None:
    async with peers.engine("engine-a") as engine:
        await engine.step(ops.admit(1, range(20)), spans=[(0, 20)])
        assert shards_of(engine.execution)[0].local is not None
        assert peers.data.local.num_regions == 1
        append = ops.append(1, [20], num_slots=1, first_positions=20)
        result = await engine.session.run(append)
        peers.access_file.write_text(listed("plane", "engine-b"))
        with pytest.raises(UnauthenticatedError):
            await engine.execution.start(result.plan)
        await until(lambda: not peers.data.local.num_regions)
        peers.access_file.write_text(listed(*ROLES))  # so that the session can be closed


async def test_a_follower_and_a_silent_stream_of_a_role_that_is_taken_away_are_cut(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_RECHECK_S", 0.05)
    async with raw(peers, "router") as routers, raw(peers, "engine-a") as engines:
        stub: Stub = prefix_pb2_grpc.PrefixServiceStub(routers)
        watch = stub.WatchPrefixes(ppb.WatchPrefixesRequest(pool_id=POOL_ID))
        while not (await watch.read()).revision:
            pass
        step = session_pb2_grpc.SessionServiceStub(engines).StreamSteps()
        await step.wait_for_connection()
        peers.access_file.write_text(listed("plane"))
        for call in (watch, step):
            code = await asyncio.wait_for(call.code(), PATIENCE_S)
            assert code == grpc.StatusCode.UNAUTHENTICATED
    assert peers.data.registered.is_set()


async def test_what_a_caller_holds_is_given_back_when_its_tenant_changes(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_RECHECK_S", 0.05)
    metrics = peers.control.metrics.rpc
    async with raw(peers, "router") as routers:
        stub: Stub = prefix_pb2_grpc.PrefixServiceStub(routers)
        watch = stub.WatchPrefixes(ppb.WatchPrefixesRequest(pool_id=POOL_ID))
        while not (await watch.read()).revision:
            pass
        held = metrics.received.num_bytes
        text = peers.access_file.read_text()
        peers.access_file.write_text(text.replace('tenant = "a"', 'tenant = "moved"'))
        await asyncio.sleep(0.5)  # so that it is looked up again
        watch.cancel()
        await until(lambda: metrics.received.num_bytes < held)
        assert "tenant a" not in metrics.received._callers


async def test_a_token_file_that_changes_counts_from_the_next_call(peers: Peers) -> None:
    async with peers.client("nobody") as control:
        (peers.folder / "nobody.token").write_text("router")
        assert await control.list_pools() == [POOL_ID]
