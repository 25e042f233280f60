"""Faults of pushes by NIXL, each of which a test of them must notice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from patched_faults import Run, assert_noticed, load
from two_pools import LAYOUT, two_pools

from data_plane.server.push import chunks
from data_plane.server.push.nixl import packets
from data_plane.server.push.nixl.outgoing import Outgoing, Stalls
from data_plane.server.push.nixl.process import AgentProcess
from data_plane.server.push.nixl.staging import Incoming, Staging
from data_plane.server.push.nixl.transport import NixlTransport, _StagedPush
from data_plane.server.push.receiver import BlockReceiver
from kvplane.errors import KvplaneError
from kvplane.shard import Shard

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]
TESTS = load("nixl/test_nixl_pushes.py")
STALLS = load("nixl/test_stalled_peers.py")
AGENTS: set[AgentProcess] = set()


def bytes_are_looked_at_where_a_peer_writes(patch: pytest.MonkeyPatch) -> None:
    """What was checked is not what is kept."""

    def read(self: Incoming, slot: int, num_bytes: int) -> Any:
        original(self, slot, num_bytes)
        return self._slots[slot][:num_bytes]

    def checked(self: BlockReceiver, chunk: Any, data: Any, ticket: Any, num_left: int) -> Any:
        blocks = check(self, chunk, bytearray(data), ticket, num_left)
        return torch.frombuffer(data, dtype=blocks.dtype).reshape(blocks.shape)

    original, check = Incoming.read, BlockReceiver._checked
    patch.setattr(Incoming, "read", read)
    patch.setattr(BlockReceiver, "_checked", checked)


def checksums_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Whatever is in a slot is written."""
    patch.setattr(chunks, "check", lambda *_: None)


def any_slot_is_read(patch: pytest.MonkeyPatch) -> None:
    """A sender says where in the staging memory its bytes are."""

    def read(self: Incoming, slot: int, num_bytes: int) -> bytearray:
        return bytearray(self._slots[slot % len(self._slots)][: abs(num_bytes)])

    patch.setattr(Incoming, "read", read)


def grpc_takes_over_unasked(patch: pytest.MonkeyPatch) -> None:
    """Who asks for NIXL alone gets gRPC where the receiver has none."""
    push = NixlTransport.push

    def fall_back(self: NixlTransport, *what: Any) -> Any:
        self._only = False
        return push(self, *what)

    patch.setattr(NixlTransport, "push", fall_back)


def a_dead_agent_ends_the_push(patch: pytest.MonkeyPatch) -> None:
    """gRPC takes over nowhere."""

    def fail(self: _StagedPush, error: KvplaneError) -> None:
        raise error

    patch.setattr(_StagedPush, "_fall_back", fail)


def what_was_not_written_is_announced(patch: pytest.MonkeyPatch) -> None:
    """A write counts as done when it begins."""
    patch.setattr(Outgoing, "write", lambda *_: None)


def an_agent_is_never_replaced(patch: pytest.MonkeyPatch) -> None:
    """After an agent has died there is no NIXL until the data plane restarts."""
    patch.setattr(AgentProcess, "has_ended", property(lambda self: False))


def a_stalled_write_ends_the_agent(patch: pytest.MonkeyPatch) -> None:
    """One peer that hangs takes NIXL from all others."""
    add = Stalls.add

    def end(self: Stalls, name: bytes, write: Any) -> None:
        add(self, name, write)
        for agent in AGENTS:
            agent.end()

    begin = AgentProcess.begin

    def remember(self: AgentProcess, kind: int, body: bytes = b"") -> Any:
        AGENTS.add(self)
        return begin(self, kind, body)

    patch.setattr(AgentProcess, "begin", remember)
    patch.setattr(Stalls, "add", end)


def the_agent_makes_one_write_at_a_time(patch: pytest.MonkeyPatch) -> None:
    """Writes to other peers wait for the one that hangs."""
    write, turn = Outgoing.write, threading.Lock()

    def in_turn(self: Outgoing, slot: int, data: memoryview) -> None:
        with turn:
            write(self, slot, data)

    patch.setattr(Outgoing, "write", in_turn)


def peers_that_hang_are_tried_again(patch: pytest.MonkeyPatch) -> None:
    """Each push to one waits anew."""
    patch.setattr(Stalls, "check", lambda *_: None)


def memory_that_is_sent_from_is_free(patch: pytest.MonkeyPatch) -> None:
    """What the next push has in it goes to the peer that hangs."""
    patch.setattr(Staging, "_free_later", lambda self, share, write: share.close())


def stalled_shares_are_lost(patch: pytest.MonkeyPatch) -> None:
    """Peers that never go on take NIXL from this data plane for good."""
    patch.setattr(Staging, "_end_if_useless", lambda self: None)
    patch.setattr(STALLS, "PATIENCE_S", 3.0)


def a_hanging_agent_is_kept(patch: pytest.MonkeyPatch) -> None:
    """That it does not answer is put down to the peer."""
    call = AgentProcess.call
    patch.setattr(
        AgentProcess,
        "call",
        lambda self, kind, body=b"": b"" if kind == packets.PING else call(self, kind, body),
    )


def a_peer_may_take_longer_than_the_receiver_waits(patch: pytest.MonkeyPatch) -> None:
    """The push is cut off before it goes by gRPC."""
    patch.setattr("data_plane.server.push.nixl.outgoing.WRITE_S", 30.0)


def the_agent_has_the_whole_environment(patch: pytest.MonkeyPatch) -> None:
    """Keys and tokens in it are in one more process, which peers can write into."""
    patch.setattr(
        "data_plane.server.push.nixl.process._environment",
        lambda ours, only_loopback: {"UCX_NET_DEVICES": "lo", **ours},
    )


def in_pools(name: str, **settings: str) -> Run:
    """A test that takes two pools, and the tests' own staging memory if it wants it."""

    def run(folder: Path, patch: pytest.MonkeyPatch) -> None:
        test = getattr(TESTS, name)
        wanted = test.__code__.co_varnames[: test.__code__.co_argcount]

        async def in_both() -> None:
            size = chunks.max_chunk_bytes(LAYOUT, Shard.whole(LAYOUT))
            with closing(Staging(1, size, only_loopback=True)) as staging:
                TESTS.ready(staging)
                async with two_pools(folder, here_settings=settings, **settings) as pools:
                    have = {"pools": pools, "staging": staging, "monkeypatch": patch}
                    await test(**{each: have[each] for each in wanted})

        asyncio.run(in_both())

    return run


def alone(name: str, **arguments: Any) -> Run:
    """A test that makes its own pools."""

    def run(folder: Path, patch: pytest.MonkeyPatch) -> None:
        test = getattr(TESTS, name)
        wanted = test.__code__.co_varnames[: test.__code__.co_argcount]
        have = {"tmp_path": folder, "monkeypatch": patch, **arguments}
        asyncio.run(test(**{each: have[each] for each in wanted}))

    return run


def stalled(name: str) -> Run:
    """A test of stalled peers."""

    def run(folder: Path, patch: pytest.MonkeyPatch) -> None:
        test = getattr(STALLS, name)
        wanted = test.__code__.co_varnames[: test.__code__.co_argcount]
        have = {"tmp_path": folder, "monkeypatch": patch}
        patch.setenv("UCX_TLS", "tcp")
        running = test(**{each: have[each] for each in wanted})
        if running is not None:
            asyncio.run(running)

    return run


HANGS = stalled("test_a_peer_that_hangs_holds_up_nobody_else_and_is_left_alone_until_it_goes_on")
WRONG = in_pools("test_what_is_wrong_is_refused_and_nothing_of_it_is_found", **TESTS.BY_NIXL)
DIES = alone("test_an_agent_that_dies_on_the_way_is_replaced_by_grpc", whose="there")
NOTICED_BY: dict[Callable[[pytest.MonkeyPatch], None], Run] = {
    checksums_are_not_compared: WRONG,
    any_slot_is_read: WRONG,
    bytes_are_looked_at_where_a_peer_writes: in_pools(
        "test_what_a_peer_writes_after_the_checksum_is_not_what_is_kept", **TESTS.BY_NIXL
    ),
    grpc_takes_over_unasked: alone("test_nothing_is_sent_by_grpc_where_that_is_not_wanted"),
    a_dead_agent_ends_the_push: DIES,
    what_was_not_written_is_announced: alone(
        "test_what_both_have_is_used", here=TESTS.AUTO, there=TESTS.AUTO
    ),
    a_stalled_write_ends_the_agent: HANGS,
    the_agent_makes_one_write_at_a_time: HANGS,
    peers_that_hang_are_tried_again: HANGS,
    memory_that_is_sent_from_is_free: stalled(
        "test_memory_that_is_being_sent_from_is_given_to_no_other_push"
    ),
    stalled_shares_are_lost: stalled(
        "test_an_agent_that_has_nothing_but_stalled_writes_is_replaced"
    ),
    a_hanging_agent_is_kept: stalled("test_an_agent_that_hangs_itself_is_ended"),
    a_peer_may_take_longer_than_the_receiver_waits: stalled(
        "test_blocks_for_a_peer_that_hangs_go_by_grpc_in_time"
    ),
    the_agent_has_the_whole_environment: stalled(
        "test_the_agent_gets_no_secrets_of_the_environment"
    ),
    an_agent_is_never_replaced: in_pools(
        "test_a_push_by_nixl_alone_fails_with_its_agent_and_gives_the_blocks_back",
        **TESTS.BY_NIXL,
    ),
}


@pytest.mark.parametrize("fault", NOTICED_BY, ids=lambda fault: fault.__name__)
def test_a_fault_of_pushes_by_nixl_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_noticed(fault, NOTICED_BY[fault], monkeypatch, tmp_path)
