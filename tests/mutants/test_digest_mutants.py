"""Faults of digests and of reports ahead, each of which a test of them must notice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from patched_faults import load

from control_plane.planning.pools import ahead
from control_plane.planning.pools import digests as of_control
from control_plane.planning.pools.digests import ShardDigests
from control_plane.planning.pools.reports import Reports
from control_plane.server.config import ControlPlaneConfig
from control_plane.server.registration_server import Registrar
from control_plane.server.server import ControlPlaneServer
from data_plane import block_digests as of_data
from data_plane.block_digests import BlockDigests
from data_plane.plans.tables.publications import Publications
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import control_pb2_grpc
from kvplane.wire import block_digests as wire

TESTS = load("unit/registration/test_digests.py")
ON_SOCKETS = load("rpc/test_reports_ahead.py")
NOTICED_WITHIN_S = 2.0


def _each_record(patch: pytest.MonkeyPatch, change: Callable[[bytearray], None]) -> None:
    """Both sides leave a part of each record of the device tier out."""
    size = wire.record_bytes(TESTS.LAYOUT.block_size_tokens, is_device=True)
    original = wire.digest_of

    def digest_of(records: bytes | memoryview, salt: bytes) -> bytes:
        changed = bytearray(records)
        if len(changed) % size == 0:
            for begin in range(0, len(changed), size):
                record = changed[begin : begin + size]
                change(record)
                changed[begin : begin + size] = record
        return original(bytes(changed), salt)

    patch.setattr(wire, "digest_of", digest_of)


def digests_ignore_generations(patch: pytest.MonkeyPatch) -> None:
    """A block that was allocated again looks as before."""

    def forget(record: bytearray) -> None:
        record[:8] = bytes(8)

    _each_record(patch, forget)


def digests_ignore_tenants(patch: pytest.MonkeyPatch) -> None:
    """A prefix of another tenant looks as that of the one before."""
    patch.setattr(wire, "scope_of", lambda tenant, namespace: bytes(16))


def digests_ignore_tokens(patch: pytest.MonkeyPatch) -> None:
    """The prefix's own hash stands for its tokens."""

    def forget(record: bytearray) -> None:
        record[8 + 1 + 4 + 8 + 16 + 16 :] = bytes(4 * TESTS.LAYOUT.block_size_tokens)

    _each_record(patch, forget)


def digests_ignore_parents(patch: pytest.MonkeyPatch) -> None:
    """A prefix looks the same wherever it hangs."""

    def forget(record: bytearray) -> None:
        record[9:21] = bytes(12)

    _each_record(patch, forget)


def ranges_end_early(patch: pytest.MonkeyPatch) -> None:
    """The last block of each range is in none: on both sides."""

    def blocks_of(number: int, num_blocks: int) -> tuple[int, int]:
        begin = number * wire.RANGE_BLOCKS
        return begin, min(begin + wire.RANGE_BLOCKS - 1, num_blocks)

    patch.setattr(wire, "blocks_of", blocks_of)


def the_last_range_is_left_out(patch: pytest.MonkeyPatch) -> None:
    """Where a tier's blocks are not a multiple of a range's."""
    for module in (of_data, of_control):
        patch.setattr(module.wire, "num_ranges", lambda num_blocks: max(1, num_blocks // 64))


def what_is_withdrawn_counts_on(patch: pytest.MonkeyPatch) -> None:
    """A digest is kept though a publication was dropped."""
    original = Publications.withdraw

    def withdraw(self: Publications, *arguments: object) -> int:
        before = self._changed.copy()
        num: int = original(self, *arguments)  # type: ignore[arg-type]
        self._changed[:] = before
        return num

    patch.setattr(Publications, "withdraw", withdraw)


def reported_ranges_are_not_looked_at_again(patch: pytest.MonkeyPatch) -> None:
    """The control plane keeps its digest of a range that has been reported since."""
    original = ShardDigests._known

    class Silent:
        def __init__(self, rebuild: object) -> None:
            self._rebuild = rebuild

        def take_changed(self, *_: int) -> list[int]:
            return []

        def __getattr__(self, name: str) -> object:
            return getattr(self._rebuild, name)

    def known(self: ShardDigests, *arguments: object) -> list[bytes]:
        rebuilds = self._rebuilds
        self._rebuilds = [Silent(each) for each in rebuilds]  # type: ignore[misc]
        try:
            return original(self, *arguments)  # type: ignore[arg-type]
        finally:
            self._rebuilds = rebuilds

    patch.setattr(ShardDigests, "_known", known)


def what_differs_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A publication that was dropped stays, as no report says so."""
    original = ShardDigests.compare

    def compare(self: ShardDigests, part: pb.BlockDigests) -> None:
        rebuilds = self._rebuilds

        class Keeping:
            def __init__(self, rebuild: object) -> None:
                self._rebuild = rebuild

            def forget(self, *_: int) -> None:
                pass

            def __getattr__(self, name: str) -> object:
                return getattr(self._rebuild, name)

        self._rebuilds = [Keeping(each) for each in rebuilds]  # type: ignore[misc]
        try:
            original(self, part)
        finally:
            self._rebuilds = rebuilds

    patch.setattr(ShardDigests, "compare", compare)


def salts_are_equal(patch: pytest.MonkeyPatch) -> None:
    """Who knows one process' salt knows all."""
    patch.setattr(of_data.os, "urandom", bytes)


def only_the_newest_digests_are_sent(patch: pytest.MonkeyPatch) -> None:
    """What changed two refreshes ago is taken to be known."""
    original = BlockDigests.messages

    def messages(self: BlockDigests, since: int) -> tuple[int, list[pb.BlockDigests]]:
        return original(self, max(since, self._num_refreshes - 1))

    patch.setattr(BlockDigests, "messages", messages)


def former_processes_are_believed(patch: pytest.MonkeyPatch) -> None:
    """What a process said that has been replaced counts for its successor."""
    patch.setattr(ahead, "is_same_run", lambda hello, known: True)


def walk() -> None:
    for seed in range(3):
        TESTS.test_what_differs_is_reported_and_nothing_else(seed)


def part(name: str, value: object) -> Callable[[], None]:
    return lambda: TESTS.test_each_part_of_a_publication_counts_by_itself({name: value})


def at_the_ends() -> None:
    for block in TESTS.DEVICE_BLOCKS:
        TESTS.test_each_change_of_each_block_is_found(block)


NOTICED_BY: dict[Callable[[pytest.MonkeyPatch], None], Callable[[], None]] = {
    digests_ignore_generations: at_the_ends,
    digests_ignore_tenants: part("tenant", "other"),
    digests_ignore_parents: part("parent_indices", b"\6\0\0\0"),
    digests_ignore_tokens: part("token_ids", bytes(4 * TESTS.LAYOUT.block_size_tokens)),
    ranges_end_early: at_the_ends,
    the_last_range_is_left_out: at_the_ends,
    what_is_withdrawn_counts_on: at_the_ends,
    reported_ranges_are_not_looked_at_again: walk,
    what_differs_is_kept: TESTS.test_what_changes_before_its_report_is_asked_for_next_time,
    salts_are_equal: TESTS.test_processes_have_salts_of_their_own,
    only_the_newest_digests_are_sent: walk,
    former_processes_are_believed: (
        TESTS.test_a_later_process_takes_the_place_of_what_an_earlier_one_said
    ),
}


@pytest.mark.parametrize("fault", NOTICED_BY, ids=lambda fault: fault.__name__)
def test_a_test_notices(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    notice = NOTICED_BY[fault]
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises((Exception, pytest.fail.Exception)):
            notice()


def leaders_take_reports_ahead(patch: pytest.MonkeyPatch) -> None:
    """What is told to who stands by is told to who leads, and goes nowhere."""
    patch.setattr(Registrar, "_require_standing_by", lambda self, hello: None)


def next_leaders_forget_what_they_were_told(patch: pytest.MonkeyPatch) -> None:
    """All is reported again."""
    patch.setattr(ahead.ReportsAhead, "take", lambda self, *_: None)


def cut_reports_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A process that was cut off begins anew."""
    patch.setattr(Reports, "knows", lambda self, hello: False)


def ranges_may_be_left_out(patch: pytest.MonkeyPatch) -> None:
    """What was not compared counts as equal."""
    original = ShardDigests.finish
    patch.setattr(ShardDigests, "finish", lambda self, all_ranges: original(self, all_ranges=False))


NOTICED_ON_SOCKETS_BY: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, tuple[str, ...]]] = {
    leaders_take_reports_ahead: (
        "test_a_report_ahead_ends_when_the_control_plane_leads",
        ("connect", "election"),
    ),
    next_leaders_forget_what_they_were_told: (
        "test_a_next_leader_that_was_told_all_asks_for_nothing",
        ("election", "tmp_path"),
    ),
    cut_reports_are_forgotten: (
        "test_a_report_that_was_cut_is_compared_when_its_process_comes_back",
        ("connect",),
    ),
    ranges_may_be_left_out: (
        "test_a_report_that_was_cut_is_compared_when_its_process_comes_back",
        ("connect",),
    ),
}


@pytest.mark.parametrize("fault", NOTICED_ON_SOCKETS_BY, ids=lambda fault: fault.__name__)
async def test_a_test_on_sockets_notices(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path
) -> None:
    name, wanted = NOTICED_ON_SOCKETS_BY[fault]
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises((Exception, pytest.fail.Exception)):
            async with asyncio.timeout(NOTICED_WITHIN_S):
                await _run(getattr(ON_SOCKETS, name), wanted, tmp_path)


async def _run(test: Callable[..., Awaitable[None]], wanted: tuple[str, ...], folder: Path) -> None:
    """A test, with what its fixtures would give it."""
    servers: list[ControlPlaneServer] = []
    channels: list[grpc.aio.Channel] = []

    async def start(**settings: Any) -> ControlPlaneServer:
        config = ControlPlaneConfig(bind="127.0.0.1:0", metrics_port=-1, grace_s=0.5, **settings)
        servers.append(await ControlPlaneServer.start(config))
        return servers[-1]

    def connect(server: ControlPlaneServer) -> Any:
        channels.append(grpc.aio.insecure_channel(server.address))
        return control_pb2_grpc.ControlPlaneServiceStub(channels[-1])

    has = {"connect": connect, "election": f"file:{folder}/leader", "tmp_path": folder}
    try:
        await test(start, *(has[name] for name in wanted))
    finally:
        for channel in channels:
            await channel.close()
        for server in servers:
            await server.stop()
