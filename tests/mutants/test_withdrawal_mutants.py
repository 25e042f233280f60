"""Faults of withdrawals in the control plane, each of which a test of them must notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from control_plane.pools.pool import Pool
from control_plane.pools.shards import PoolShards, ShardState
from kvplane.wire.plane.v1.registration_pb2 import RegisterResponse
from tests.helpers.patched_faults import alone, assert_noticed, load

TESTS = load("unit/core/test_withdrawals.py")
MISSED = load("unit/registration/test_missed_messages.py")
Missed = tuple[list[RegisterResponse], int]


def never_sent(patch: pytest.MonkeyPatch) -> None:
    """Data planes are not told what was forgotten."""
    never = property(lambda pool: False, lambda pool, value: None)
    patch.setattr(Pool, "_has_forgotten", never, raising=False)


def sent_once(patch: pytest.MonkeyPatch) -> None:
    """A data plane that was away when something was forgotten is never told."""

    def missed(self: Pool, group: int, first_block: int) -> Missed:
        messages, next_block = original(self, group, first_block)
        return [each for each in messages if not each.HasField("withdraw")], next_block

    original = Pool.missed
    patch.setattr(Pool, "missed", missed)


def resent_at_once(patch: pytest.MonkeyPatch) -> None:
    """A data plane that comes back is sent all publications while everybody waits."""
    patch.setattr("control_plane.pools.pool.MAX_PUBLICATIONS", 10**6)


def resent_from_the_middle(patch: pytest.MonkeyPatch) -> None:
    """A stream that breaks again goes on where the last one was."""

    def disconnect(self: ShardState) -> None:
        begun = self.resends_from
        original(self)
        self.resends_from = begun

    def reconnect(self: ShardState, hello: Any, missed: Any) -> None:
        begun = self.resends_from
        resume(self, hello, missed)
        self.resends_from = begun or self.resends_from

    original, resume = ShardState.disconnect, ShardState.reconnect
    patch.setattr(ShardState, "disconnect", disconnect)
    patch.setattr(ShardState, "reconnect", reconnect)


def files_are_forgotten_at_once(patch: pytest.MonkeyPatch) -> None:
    """A data plane that comes back deletes files before it knows which blocks not to write."""

    def reconnect(self: PoolShards, hello: Any) -> None:
        original(self, hello)
        self.states[hello.shard.index].outgoing.extend(self.forgets_for(hello))

    original = PoolShards.reconnect
    patch.setattr(PoolShards, "reconnect", reconnect)


def files_are_forgotten_beside(patch: pytest.MonkeyPatch) -> None:
    """Files are deleted while a data plane is still sent what it missed."""

    def send(self: PoolShards, messages: Any, but: Any = ()) -> None:
        original(self, messages)

    original = PoolShards._send_to_files
    patch.setattr(PoolShards, "_send_to_files", send)


def the_last_blocks_are_left_out(patch: pytest.MonkeyPatch) -> None:
    """Publications are sent again up to the last whole slice."""

    def missed(self: Pool, group: int, first_block: int) -> Missed:
        messages, next_block = original(self, group, first_block)
        return (messages if next_block else []), next_block

    original = Pool.missed
    patch.setattr(Pool, "missed", missed)


FILES_BEHIND = MISSED.test_files_are_forgotten_behind_blocks_that_were_withdrawn_while_it_was_away
NOTICED_BY = {
    resent_at_once: MISSED.test_each_publication_is_sent_once_a_thousand_blocks_at_a_time,
    the_last_blocks_are_left_out: (
        MISSED.test_each_publication_is_sent_once_a_thousand_blocks_at_a_time
    ),
    files_are_forgotten_at_once: FILES_BEHIND,
    files_are_forgotten_beside: FILES_BEHIND,
    resent_from_the_middle: MISSED.test_a_stream_that_breaks_again_begins_again,
    never_sent: TESTS.test_a_control_plane_that_restarts_does_not_learn_what_was_forgotten,
    sent_once: TESTS.test_a_data_plane_that_was_away_withdraws_when_it_resumes,
}


@pytest.mark.parametrize("fault", NOTICED_BY, ids=lambda fault: fault.__name__)
def test_a_fault_of_withdrawals_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_noticed(fault, alone(NOTICED_BY[fault]), monkeypatch, tmp_path)
