"""Faults of pushes, each of which a test of them must notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from data_plane.execution import table_blocks
from data_plane.execution.executor import Executor
from data_plane.execution.shards.shard_kernels import ShardKernels
from kvplane.errors import InvalidRequestError
from kvplane.integrations.push import chunks, receiver, sender
from kvplane.integrations.push.client import PrefixMover
from kvplane.integrations.push.push_pb2 import OpenPush, PushBlocksResponse
from kvplane.integrations.push.receiver import BlockReceiver
from kvplane.integrations.push.sender import BlockSender
from kvplane.integrations.push.tickets import PushSlots, Ticket, Tickets
from kvplane.serving.callers.identity import Gate
from tests.helpers.patched_faults import Run, alone, assert_noticed, load

PUSHES, SLOW, ACCESS, TICKETS, SILENCE, ADDRESSES = (
    load(f"../integrations/push/tests/test_{name}.py")
    for name in (
        *("pushes", "slow_pushes", "push_access"),
        *("tickets", "silent_senders", "push_addresses"),
    )
)


def checksums_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Whatever arrives is written."""
    patch.setattr(chunks, "check", lambda *_: None)


def checksums_cover_the_data_alone(patch: pytest.MonkeyPatch) -> None:
    """A block that changed its place on the way is written there."""
    patch.setattr(chunks, "_checksum", lambda chunk, data: xxhash.xxh3_64(data).intdigest())


def layouts_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A ticket is all that is looked at."""
    patch.setattr(BlockReceiver, "_check_source", lambda *_: None)


def parts_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Other layers or heads count as the receiver's."""
    original = BlockReceiver._check_source

    def check(self: BlockReceiver, opening: OpenPush) -> None:
        opening.shard.CopyFrom(self._outside.shard.to_proto())
        original(self, opening)

    patch.setattr(BlockReceiver, "_check_source", check)


def tickets_serve_again(patch: pytest.MonkeyPatch) -> None:
    """Whoever saw a ticket can use it too."""
    patch.setattr(Tickets, "take", lambda self, secret: self._open[secret][1])


def tickets_do_not_expire(patch: pytest.MonkeyPatch) -> None:
    """A ticket that was never used can be used forever."""
    patch.setattr(Tickets, "_drop_expired", lambda self: None)


def tickets_are_not_bounded(patch: pytest.MonkeyPatch) -> None:
    """A session gets as many as it asks for."""

    def give(self: Tickets, ticket: Ticket) -> bytes:
        secret = bytes([len(self._open) % 256]) * 32
        self._open[secret] = self._clock(), ticket
        return secret

    patch.setattr(Tickets, "give", give)


def short_pushes_count_as_done(patch: pytest.MonkeyPatch) -> None:
    """A push that ends early has succeeded."""
    original = BlockReceiver._receive

    def receive(self: BlockReceiver, requests: Any, silence: Any) -> PushBlocksResponse:
        try:
            return original(self, requests, silence)
        except InvalidRequestError as error:
            if "early" not in error.message:
                raise
            return PushBlocksResponse()

    patch.setattr(BlockReceiver, "_receive", receive)


def entries_past_the_ticket_are_taken(patch: pytest.MonkeyPatch) -> None:
    """A push may write any entry of its sequence's table, as often as it likes."""
    original = BlockReceiver._check

    def check(self: BlockReceiver, chunk: Any, ticket: Ticket, num_left: int) -> None:
        original(self, chunk, replace(ticket, blocks=range(-9, 99)), 0)

    patch.setattr(BlockReceiver, "_check", check)


def what_is_computed_is_sent(patch: pytest.MonkeyPatch) -> None:
    """A block goes out while a plan writes it."""
    patch.setattr(table_blocks, "_check_written", lambda *_: None)


def blocks_go_anywhere(patch: pytest.MonkeyPatch) -> None:
    """A caller says which host a data plane connects to."""
    patch.setattr(BlockSender, "_check", lambda *_: None)


def late_pushes_are_written(patch: pytest.MonkeyPatch) -> None:
    """A push writes to whatever plan is the session's latest."""
    original = Executor.write_blocks

    def write(self: Executor, *where: Any, plan_number: int | None = None, **layers: Any) -> Any:
        return original(self, *where, **layers)

    patch.setattr(Executor, "write_blocks", write)


def silent_senders_stay(patch: pytest.MonkeyPatch) -> None:
    """Who sends nothing more keeps a thread."""

    patch.setattr(receiver._Silence, "_watch", lambda self: None)
    patch.setattr(PUSHES, "PATIENCE_S", 3.0)


def one_caller_has_all_pushes(patch: pytest.MonkeyPatch) -> None:
    """No push is left to others."""
    original = PushSlots.__init__

    def init(self: PushSlots, max_pushes: int) -> None:
        original(self, max_pushes)
        self._most = max_pushes

    patch.setattr(PushSlots, "__init__", init)


def pushes_without_a_slot_use_their_tickets(patch: pytest.MonkeyPatch) -> None:
    """Who is told to try again is refused when it does."""
    take, used = Tickets.take, dict[bytes, Ticket]()

    def find(self: Tickets, secret: bytes) -> Ticket:
        used[secret] = take(self, secret)
        return used[secret]

    patch.setattr(Tickets, "find", find)
    patch.setattr(Tickets, "take", lambda self, secret: used.pop(secret))


def deaf_receivers_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Who takes nothing keeps a push for good."""
    patch.setattr(sender._Reading, "is_stalled", False)
    patch.setattr(SLOW, "PATIENCE_S", 10.0)


def failed_moves_keep_their_blocks(patch: pytest.MonkeyPatch) -> None:
    """What was reserved for a move stays reserved."""

    async def nothing(self: PrefixMover, number: int, sequence_id: int) -> None:
        pass

    patch.setattr(PrefixMover, "_undo", nothing)


def blocks_arrive_in_reverse(patch: pytest.MonkeyPatch) -> None:
    """The last block of a chunk is written in place of the first."""
    original = ShardKernels.write_span

    def write(self: ShardKernels, batch: Any, span: int, layers: range, first: int, *rest: Any):
        blocks, tokens = rest
        return original(self, batch, span, layers, first, blocks.flip(1), tokens)

    patch.setattr(ShardKernels, "write_span", write)


def anybody_pushes(patch: pytest.MonkeyPatch) -> None:
    """The role of who pushes is not looked at."""

    class Open(Gate):
        def admit(self, method: str, context: Any) -> str:
            return ""

    patch.setattr(receiver, "Gate", Open)


def the_receivers_time_is_the_senders(patch: pytest.MonkeyPatch) -> None:
    """A sender is cut off since the receiver is busy."""

    @contextmanager
    def waiting(self: receiver._Silence) -> Iterator[None]:
        began_s = receiver.time.monotonic()
        self._until_s = began_s + self._left_s
        yield
        self._left_s -= receiver.time.monotonic() - began_s

    patch.setattr(receiver._Silence, "waiting", waiting)


def what_does_not_parse_is_an_internal_error(patch: pytest.MonkeyPatch) -> None:
    """Bytes that are no request are the receiver's fault."""
    patch.setattr(receiver, "DecodeError", ZeroDivisionError)


def any_host_may_be_a_scheme(patch: pytest.MonkeyPatch) -> None:
    """What gRPC takes for a path or a scheme counts as a host."""

    def may_send_to(address: str, hosts: Any) -> bool:
        host = address.rpartition(":")[0]
        return host != "" and "/" not in host and not {host, "*"}.isdisjoint(hosts)

    patch.setattr(ADDRESSES, "may_send_to", may_send_to)


def busy_receiver(folder: Path, patch: pytest.MonkeyPatch) -> None:
    SILENCE.test_the_receivers_own_time_is_no_silence(SILENCE.patched_clock(patch))


def no_request(folder: Path, patch: pytest.MonkeyPatch) -> None:
    test = ACCESS.test_bytes_that_are_no_request_are_refused_by_name
    asyncio.run(test(folder, b"\xff"))


def in_pools(name: str, *more: Any, tests: Any = PUSHES) -> Run:
    """A test that takes two pools."""

    def run(folder: Path, patch: pytest.MonkeyPatch) -> None:
        async def in_both() -> None:
            async with PUSHES.two_pools(folder) as pools:
                test = getattr(tests, name)
                takes_patch = (
                    "monkeypatch" in test.__code__.co_varnames[: test.__code__.co_argcount]
                )
                await test(pools, *more, *([patch] if takes_patch else []))

        asyncio.run(in_both())

    return run


def over_tls(folder: Path, patch: pytest.MonkeyPatch) -> None:
    async def with_peers() -> None:
        peers = ACCESS.TlsPools(folder)
        await peers.start()
        try:
            test = ACCESS.test_a_ticket_is_of_no_use_to_who_is_no_data_plane
            await test(peers, "engine-a", ACCESS.NotPermittedError)
        finally:
            await peers.stop()

    asyncio.run(with_peers())


WRONG = in_pools("test_a_push_that_is_wrong_publishes_nothing_and_a_right_one_can_follow")
FULL = in_pools("test_one_caller_cannot_hold_all_pushes", tests=SLOW)
NOTICED_BY: dict[Callable[[pytest.MonkeyPatch], None], Run] = {
    checksums_are_not_compared: WRONG,
    checksums_cover_the_data_alone: WRONG,
    layouts_are_not_compared: WRONG,
    parts_are_not_compared: WRONG,
    short_pushes_count_as_done: WRONG,
    entries_past_the_ticket_are_taken: WRONG,
    tickets_serve_again: in_pools("test_a_ticket_serves_once"),
    tickets_do_not_expire: alone(TICKETS.test_a_ticket_expires),
    tickets_are_not_bounded: alone(
        TICKETS.test_tickets_that_are_not_used_are_bounded_and_make_room_when_they_expire
    ),
    what_is_computed_is_sent: in_pools("test_only_what_is_written_is_sent"),
    blocks_go_anywhere: in_pools("test_blocks_go_only_where_they_may"),
    late_pushes_are_written: in_pools("test_a_push_after_an_abort_is_refused"),
    silent_senders_stay: in_pools("test_a_silent_sender_is_cut_off"),
    one_caller_has_all_pushes: FULL,
    pushes_without_a_slot_use_their_tickets: FULL,
    deaf_receivers_are_waited_for: in_pools(
        "test_a_receiver_that_takes_nothing_is_given_up", tests=SLOW
    ),
    failed_moves_keep_their_blocks: in_pools(
        "test_a_move_that_failed_gives_its_blocks_back_and_can_be_made_again"
    ),
    blocks_arrive_in_reverse: in_pools(
        "test_what_is_prefilled_here_is_decoded_there_bit_for_bit", chunks.CHUNK_BYTES
    ),
    anybody_pushes: over_tls,
    the_receivers_time_is_the_senders: busy_receiver,
    what_does_not_parse_is_an_internal_error: no_request,
    any_host_may_be_a_scheme: alone(lambda: ADDRESSES.test_only_hosts_are_sent_to("unix:a:1")),
}


@pytest.mark.parametrize("fault", NOTICED_BY, ids=lambda fault: fault.__name__)
def test_a_fault_of_pushes_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_noticed(fault, NOTICED_BY[fault], monkeypatch, tmp_path)
