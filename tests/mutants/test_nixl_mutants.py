"""Faults of pushes by NIXL, each of which a test of them must notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from patched_faults import Run, assert_noticed, load
from two_pools import LAYOUT, two_pools

from data_plane.server.push import chunks
from data_plane.server.push.nixl.process import AgentProcess
from data_plane.server.push.nixl.staging import Incoming, Outgoing, Staging
from data_plane.server.push.nixl.transport import NixlTransport, _StagedPush
from data_plane.server.push.receiver import BlockReceiver
from kvplane.errors import KvplaneError
from kvplane.shard import Shard

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]
TESTS = load("nixl/test_nixl_pushes.py")


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


def in_pools(name: str, **settings: str) -> Run:
    """A test that takes two pools, and the tests' own staging memory if it wants it."""

    def run(folder: Path, patch: pytest.MonkeyPatch) -> None:
        test = getattr(TESTS, name)
        wanted = test.__code__.co_varnames[: test.__code__.co_argcount]

        async def in_both() -> None:
            size = chunks.max_chunk_bytes(LAYOUT, Shard.whole(LAYOUT))
            with closing(Staging(1, size, only_loopback=True)) as staging:
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
