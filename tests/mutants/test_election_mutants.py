"""Faults of elections, each of which a test of them must notice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from control_plane.server.election import file_elector
from control_plane.server.election.file_elector import FileElector
from control_plane.server.server import ControlPlaneServer
from kvplane.integrations.etcd.elector import EtcdElector
from tests.helpers.etcd_cluster import EtcdCluster
from tests.helpers.patched_faults import Run, assert_noticed, load

TESTS = load("rpc/test_elections.py")


def incarnations_from_the_clock(patch: pytest.MonkeyPatch) -> None:
    """The last leader's is not looked at."""
    patch.setattr(file_elector, "next_incarnation", lambda last: time.time_ns())


def locks_are_not_held(patch: pytest.MonkeyPatch) -> None:
    """Whoever opens the file leads."""
    patch.setattr(file_elector.fcntl, "flock", lambda *_: None)


def losses_are_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """A leader goes on whatever happens to its lease."""

    async def hold(self: FileElector) -> None:
        await asyncio.Event().wait()

    patch.setattr(FileElector, "hold", hold)


def closed_connections_are_deaths(patch: pytest.MonkeyPatch) -> None:
    """Who closes a connection is taken for dead, unasked."""

    async def has_died(address: str) -> None:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await reader.read()
        writer.close()

    patch.setattr(TESTS, "has_died", has_died)


def standbys_serve(patch: pytest.MonkeyPatch) -> None:
    """A server that does not lead answers calls."""
    original = ControlPlaneServer._serve

    async def serve(self: ControlPlaneServer, *, serving: bool = True) -> None:
        self._gate.stands_by = False
        await original(self, serving=serving)

    patch.setattr(ControlPlaneServer, "_serve", serve)


def former_leaders_do_not_look(patch: pytest.MonkeyPatch) -> None:
    """Who was followed by mistake renews a lease, and goes on."""

    async def is_replaced(self: EtcdElector, timeout_s: float) -> bool:
        return False

    patch.setattr(EtcdElector, "_is_replaced", is_replaced)
    patch.setattr(TESTS, "PATIENCE_S", 2 * TESTS.TTL_S)


def winners_wait_for_themselves(patch: pytest.MonkeyPatch) -> None:
    """Who was not told that it leads takes itself for another."""
    patch.setattr(EtcdElector, "_is_ours", lambda self, leader: False)
    patch.setattr(TESTS, "PATIENCE_S", 2 * TESTS.TTL_S)


def at_etcd(test: Callable[..., object], *, with_patch: bool = False) -> Run:
    """Run a test with etcd as the election."""

    def run(folder: Path, patch: pytest.MonkeyPatch) -> None:
        with EtcdCluster(folder, 1) as etcd:

            def make(address: str = "") -> EtcdElector:
                return EtcdElector(etcd.endpoints, "n", address, ttl_s=TESTS.TTL_S)

            asyncio.run(test(make, patch) if with_patch else test(make))

    return run


def at_a_file(
    test: Callable[..., object], *names: str
) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """Run a test with a file as the election."""

    def run(folder: Path, patch: pytest.MonkeyPatch) -> None:
        given = {
            "make": lambda address="": FileElector(folder / "leader"),
            "kind": "file",
            "tmp_path": folder,
            "monkeypatch": patch,
        }
        asyncio.run(test(**{name: given[name] for name in names}))

    return run


NOTICED_BY = {
    incarnations_from_the_clock: at_a_file(
        TESTS.test_incarnations_rise_when_clocks_go_back, "make", "monkeypatch"
    ),
    locks_are_not_held: at_a_file(TESTS.test_of_many_candidates_one_leads, "make"),
    losses_are_not_noticed: at_a_file(
        TESTS.test_who_has_lost_is_interrupted_with_a_typed_error, "make", "kind", "tmp_path"
    ),
    closed_connections_are_deaths: at_a_file(
        TESTS.test_a_process_has_died_when_its_connection_ends_and_another_is_refused
    ),
    former_leaders_do_not_look: at_etcd(TESTS.test_a_leader_that_was_followed_by_mistake_ends),
    winners_wait_for_themselves: at_etcd(
        TESTS.test_a_candidate_leads_whose_transaction_was_not_answered, with_patch=True
    ),
    standbys_serve: at_a_file(
        TESTS.test_a_server_stands_by_until_it_leads_and_ends_when_it_has_lost, "tmp_path"
    ),
}


@pytest.mark.parametrize("fault", NOTICED_BY, ids=lambda fault: fault.__name__)
def test_a_fault_of_elections_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_noticed(fault, NOTICED_BY[fault], monkeypatch, tmp_path)
