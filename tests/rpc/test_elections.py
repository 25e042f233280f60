"""Electors: one leads at a time, the next one's incarnation is higher, and who has lost knows it.

The same tests hold for each: a file on this machine, a real etcd, and Kubernetes' Lease API, of
which only a stand-in can run here (``tests/helpers/lease_api.py``).
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from control_plane.server.config import ControlPlaneSettings
from control_plane.server.election import elector as module
from control_plane.server.election.elector import Elector, has_died, next_incarnation
from control_plane.server.election.file_elector import FileElector
from control_plane.server.election.kubernetes_elector import KubernetesApi, KubernetesElector
from control_plane.server.server import elector_of
from kvplane import ControlClient, Tls
from kvplane.errors import InvalidRequestError, PlaneUnavailableError
from kvplane.integrations.etcd.elector import EtcdElector
from kvplane.transport.health import check
from kvplane.wire.error_codec import from_rpc_error
from tests.helpers.etcd_cluster import EtcdCluster
from tests.helpers.lease_api import LeaseApi
from tests.helpers.planes_in_process import control_plane
from tests.helpers.planning.control_wire import RawShard, stub_of
from tests.helpers.refusals import refused
from tests.helpers.waiting import until

TTL_S = 2
PATIENCE_S = 30
# A lock has no lease: the kernel releases it when its holder ends, and never before.
ETCD = pytest.param("etcd", marks=pytest.mark.nightly)
leased = pytest.mark.parametrize("kind", [ETCD, "kubernetes"])
Make = Callable[..., Elector]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd"), 1) as etcd:
        yield etcd


@pytest.fixture(params=["file", ETCD, "kubernetes"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes candidates of one election. ``address``: what they say of themselves."""
    if kind == "file":
        yield lambda address="": FileElector(tmp_path / "leader")
    elif kind == "etcd":
        endpoints = request.getfixturevalue("etcd").endpoints
        yield lambda address="": EtcdElector(endpoints, tmp_path.name, address, ttl_s=TTL_S)
    else:
        with LeaseApi() as api:
            access = KubernetesApi(api.url)
            yield lambda address="": KubernetesElector(access, "ns", "kv", address, ttl_s=TTL_S)


class Candidate:
    """Leads in a task until it is told to end. ``won``: its incarnation."""

    def __init__(self, elector: Elector) -> None:
        self.won: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.won_s = 0.0
        self.ends = asyncio.Event()
        self.task = asyncio.create_task(self._lead(elector))

    async def _lead(self, elector: Elector) -> None:
        async with elector.lead() as incarnation:
            self.won_s = time.monotonic()
            self.won.set_result(incarnation)
            await self.ends.wait()

    async def end(self) -> None:
        self.ends.set()
        await self.task


async def test_one_leads_at_a_time_and_the_next_takes_over_at_once(make, kind) -> None:
    first = Candidate(make())
    before = await asyncio.wait_for(first.won, 10)
    second = Candidate(make())
    await asyncio.sleep(0.2 if kind == "file" else 1.5 * TTL_S)  # the first goes on renewing
    assert not second.won.done()
    ended_s = time.monotonic()
    await first.end()
    after = await asyncio.wait_for(second.won, 10)
    assert after > before
    assert second.won_s - ended_s < TTL_S
    await second.end()


async def test_incarnations_rise_when_clocks_go_back(make, monkeypatch) -> None:
    last = 0
    for now_ns in (5_000, 4_000, 3):
        monkeypatch.setattr(module.time, "time_ns", lambda now_ns=now_ns: now_ns)
        async with make().lead() as incarnation:
            assert incarnation > last
        last = incarnation
    assert last == 5_002


async def test_of_many_candidates_one_leads(make) -> None:
    candidates = [Candidate(make()) for _ in range(5)]
    incarnations = []
    for _ in range(5):
        done, _ = await asyncio.wait(
            [each.won for each in candidates], timeout=20, return_when=asyncio.FIRST_COMPLETED
        )
        assert len(done) == 1
        (leader,) = (each for each in candidates if each.won.done())
        incarnations.append(leader.won.result())
        candidates.remove(leader)
        await leader.end()
    assert incarnations == sorted(set(incarnations))


async def lose(elector: Elector, kind: str, tmp_path: Path) -> None:
    """Take the leadership away, as somebody else might."""
    if kind == "file":
        (tmp_path / "leader").rename(tmp_path / "other")
        (tmp_path / "leader").touch()
    elif isinstance(elector, EtcdElector):
        await elector._call("lease/revoke", {"ID": elector._lease})
    elif isinstance(elector, KubernetesElector):
        lease = await elector._read()
        lease["spec"]["holderIdentity"] = "somebody"
        await elector._send("PUT", lease)


async def test_who_has_lost_is_interrupted_with_a_typed_error(make, kind, tmp_path) -> None:
    elector = make()
    with pytest.raises(PlaneUnavailableError, match="does not lead any more"):
        async with elector.lead():
            await lose(elector, kind, tmp_path)
            await asyncio.wait_for(asyncio.Event().wait(), 3 * TTL_S)


async def test_a_body_that_is_cancelled_or_fails_is_not_said_to_have_lost(make) -> None:
    candidate = Candidate(make())
    await candidate.won
    candidate.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await candidate.task
    with pytest.raises(KeyError):
        async with make().lead():
            raise KeyError


@leased
async def test_a_leader_that_has_died_is_followed_before_its_lease_ends(make) -> None:
    """Its process is gone, so its port is closed, and nobody resigned."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        dead = make(address)
        await dead.win()
        follower = Candidate(make())
        await asyncio.sleep(0.5)
    died_s = time.monotonic()
    await asyncio.wait_for(follower.won, 10)
    assert follower.won_s - died_s < TTL_S / 2
    await follower.end()
    await dead.resign()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["etcd"])
async def test_a_candidate_leads_whose_transaction_was_not_answered(make, monkeypatch) -> None:
    """It lives, so it can see that whoever leads has not died."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        elector = make(f"127.0.0.1:{listening.getsockname()[1]}")
        call, lost = elector._call, []

        async def lose_first_transaction(method: str, *arguments: Any) -> Any:
            answer = await call(method, *arguments)
            if method == "kv/txn" and not lost:
                lost.append(method)
                raise TimeoutError
            return answer

        monkeypatch.setattr(elector, "_call", lose_first_transaction)
        before = time.time_ns()
        candidate = Candidate(elector)
        assert await asyncio.wait_for(candidate.won, PATIENCE_S) > before
        assert lost
        await candidate.end()


@leased
async def test_a_leader_that_was_followed_by_mistake_ends(make) -> None:
    """Its process lives, and renews its lease, but its port is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        leader = Candidate(make(f"127.0.0.1:{listening.getsockname()[1]}"))
        first = await leader.won
        follower = Candidate(make())
    assert await asyncio.wait_for(follower.won, PATIENCE_S) > first
    with pytest.raises(PlaneUnavailableError, match="does not lead any more"):
        await asyncio.wait_for(leader.task, PATIENCE_S)
    assert not follower.task.done()
    await follower.end()


@leased
async def test_a_leader_that_hangs_is_followed_when_its_lease_ends(make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        hung = make(f"127.0.0.1:{listening.getsockname()[1]}")
        await hung.win()  # and never renews
        follower = Candidate(make())
        won_s = time.monotonic()
        await asyncio.wait_for(follower.won, 10)
        assert TTL_S / 2 < follower.won_s - won_s < 2.5 * TTL_S
        await follower.end()
        await hung.resign()


@pytest.mark.nightly
async def test_members_are_reached_by_tls_and_one_that_hangs_is_passed_over(
    tmp_path, monkeypatch
) -> None:
    tls = Path(__file__).parent / "tls"
    for name, file in {"CA": "ca.pem", "CERTIFICATE": "client.pem", "KEY": "client.key"}.items():
        monkeypatch.setenv(f"KVPLANE_ETCD_{name}", str(tls / file))
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda _host, *options, **more: resolve("127.0.0.1", *options, **more),
    )
    with EtcdCluster(tmp_path, 3, tls) as etcd:
        named = etcd.endpoints.replace("127.0.0.1", "kvplane.test")
        candidate = Candidate(elector_of(f"etcd://{named}/fleet", "", ttl_s=5))
        for hung in etcd.members[:2]:
            hung.send_signal(signal.SIGSTOP)
            await asyncio.wait_for(asyncio.shield(candidate.won), PATIENCE_S)
            await asyncio.sleep(6)
            assert not candidate.task.done()
            hung.send_signal(signal.SIGCONT)
        await candidate.end()
        monkeypatch.setenv("KVPLANE_ETCD_KEY", str(tls / "server.key"))
        with pytest.raises(InvalidRequestError, match="_KEY names cannot be used"):
            elector_of(f"etcd://{named}/fleet", "", ttl_s=TTL_S)


async def test_a_process_has_died_when_its_connection_ends_and_another_is_refused() -> None:
    connections = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        dying = asyncio.create_task(has_died(f"{host}:{port}"))
        await until(lambda: connections)
        connections[0].close()
        await asyncio.sleep(0.1)
        assert len(connections) == 2  # it was asked again, and lives
        assert not dying.done()
    connections[1].close()
    await asyncio.wait_for(dying, 5)


async def test_a_process_that_resets_connections_is_asked_less_and_less_often(monkeypatch) -> None:
    delays: list[float] = []

    async def connect(host: str, port: int) -> None:
        raise ConnectionResetError if len(delays) < 12 else ConnectionRefusedError

    async def sleep(delay_s: float) -> None:
        delays.append(delay_s)

    monkeypatch.setattr(module.asyncio, "open_connection", connect)
    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    await has_died("127.0.0.1:1")
    assert delays == sorted(delays)
    assert sum(delays[:5]) < module.RETRY_DELAY_S == delays[-1]


def test_an_election_in_etcd_says_what_to_install(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, EtcdElector.__module__)
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(InvalidRequestError, match=r"election: needs pip install 'kvplane\[etcd\]'"):
        elector_of("etcd://h:1/name", "h:1", ttl_s=5)


def test_the_settings_name_the_elector(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    for text, cls in [
        ("file:/run/leader", FileElector),
        ("kubernetes://ns/name", KubernetesElector),
    ]:
        assert isinstance(elector_of(text, "h:1", ttl_s=5), cls)
    for text in ("", "file:relative", "etcd://h:1", "etcd:///name", "redis://h:1/name"):
        with pytest.raises(InvalidRequestError, match="election: must be"):
            elector_of(text, "h:1", ttl_s=5)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(InvalidRequestError, match="not in a pod"):
        elector_of("kubernetes://ns/name", "h:1", ttl_s=5)
    assert next_incarnation(2**70) == 2**70 + 1


async def test_a_server_stands_by_until_it_leads_and_ends_when_it_has_lost(tmp_path) -> None:
    path = tmp_path / "leader"
    async with (
        control_plane(election=f"file:{path}") as first,
        control_plane(election=f"file:{path}") as second,
        ControlClient(f"{first.address},{second.address}") as both,
        ControlClient(second.address, timeout_s=0.2) as standby,
        grpc.aio.insecure_channel(second.address) as channel,
    ):
        before = await both.get_server_info()
        assert await check(second.address) == "NOT_SERVING"
        with pytest.raises(PlaneUnavailableError, match="stands by"):
            await standby.get_server_info()
        error = from_rpc_error(await RawShard(stub_of(channel)).failure())
        assert (error.reason, "stands by" in str(error)) == ("PLANE_UNAVAILABLE", True)
        with pytest.raises(PlaneUnavailableError):
            await standby.wait_ready("pool", 0.1)
        await first.stop()
        after = await both.get_server_info()
        assert after.incarnation > before.incarnation
        assert await check(second.address) == "SERVING"
        path.rename(tmp_path / "other")  # somebody else may lock another file there
        path.touch()
        with pytest.raises(PlaneUnavailableError, match="does not lead any more"):
            await asyncio.wait_for(second.run_until_signal(), 10)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"election": "file:/x", "incarnation": 5}, "incarnation"),
        ({"advertise": "nowhere"}, "advertise"),
    ],
)
def test_settings_of_an_election_that_contradict_each_other_are_refused(settings, field) -> None:
    with refused(InvalidRequestError, field):
        ControlPlaneSettings(**settings)


async def test_several_addresses_have_a_family_and_a_name_in_common() -> None:
    for target, field in [
        ("localhost", "target"),
        ("127.0.0.1:1,nowhere", "target"),
        ("127.0.0.1:1,no.such.host.invalid:1", "target"),
    ]:
        with refused(InvalidRequestError, field):
            ControlClient(target)
    with pytest.raises(InvalidRequestError, match=r"tls\.server_name"):
        ControlClient("127.0.0.1:1,127.0.0.2:1", tls=Tls())
