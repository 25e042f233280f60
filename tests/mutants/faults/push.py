"""Faults of blocks that are pushed from pool to pool."""

from __future__ import annotations

from tests.mutants.fault import Fault, first

CHUNKS, RECEIVER, SENDER, TICKETS, CLIENT = (
    f"integrations/push/{name}.py" for name in ("chunks", "receiver", "sender", "tickets", "client")
)
BLOCKS = "data_plane/execution/table_blocks.py"

PUSHES, SLOW, ACCESS, OF_TICKETS, SILENT, ADDRESSES = (
    f"integrations/push/tests/test_{name}.py"
    for name in (
        *("pushes", "slow_pushes", "push_access"),
        *("tickets", "silent_senders", "push_addresses"),
    )
)
WRONG = f"{PUSHES}::test_a_push_that_is_wrong_publishes_nothing_and_a_right_one_can_follow"
FULL = f"{SLOW}::test_one_caller_cannot_hold_all_pushes"

FAULTS = (
    Fault(
        "checksums_are_not_compared",
        CHUNKS,
        "if _checksum(chunk, chunk.data) != chunk.checksum:",
        "if False:",
        WRONG,
    ),
    Fault(  # A block that changed its place on the way is written there.
        "checksums_cover_the_data_alone",
        CHUNKS,
        "digest = xxhash.xxh3_64(_PLACE.pack(*place))",
        "digest = xxhash.xxh3_64()",
        WRONG,
    ),
    Fault(
        "layouts_are_not_compared",
        RECEIVER,
        *first("    def _check_source(self, opening: push_pb2.OpenPush) -> None:", "return"),
        WRONG,
    ),
    Fault(
        "parts_are_not_compared",
        RECEIVER,
        "if Shard.from_proto(opening.shard).part != self._outside.shard.part:",
        "if False:",
        WRONG,
    ),
    Fault(  # A push that ends early has succeeded.
        "short_pushes_count_as_done",
        RECEIVER,
        "        if self._num_left:\n            raise InvalidRequestError(\n"
        '                f"the push ended',
        "        if False:\n            raise InvalidRequestError(\n"
        '                f"the push ended',
        WRONG,
    ),
    Fault(
        "entries_past_the_ticket_are_taken",
        RECEIVER,
        "if not (blocks.start <= first < last <= blocks.stop) or num_left < 0:",
        "if False:",
        WRONG,
    ),
    Fault(
        "tickets_serve_again",
        TICKETS,
        "            del self._open[secret]\n        return ticket",
        "        return ticket",
        f"{PUSHES}::test_a_ticket_serves_once",
    ),
    Fault(
        "tickets_do_not_expire",
        TICKETS,
        "while self._open:",
        "while False:",
        f"{OF_TICKETS}::test_a_ticket_expires",
    ),
    Fault(
        "tickets_are_not_bounded",
        TICKETS,
        "if len(self._open) >= MAX_TICKETS or of_session >= MAX_TICKETS_PER_SESSION:",
        "if False:",
        f"{OF_TICKETS}::test_tickets_that_are_not_used_are_bounded_and_make_room_when_they_expire",
    ),
    Fault(  # A block goes out while a plan writes it.
        "what_is_computed_is_sent",
        BLOCKS,
        "if latest.receipt is not None or part.tier_key",
        "if True or part.tier_key",
        f"{PUSHES}::test_only_what_is_written_is_sent",
    ),
    Fault(
        "blocks_go_anywhere",
        SENDER,
        "if not may_send_to(ticket.address, self._hosts):",
        "if False:",
        f"{PUSHES}::test_blocks_go_only_where_they_may",
    ),
    Fault(  # A push writes to whatever plan is the session's latest.
        "late_pushes_are_written",
        BLOCKS,
        "        session, run = self._plans.latest(session_id, plan_number)\n"
        "        if run.pass_index is not None:",
        "        session, run = self._plans.latest(session_id, None)\n"
        "        if run.pass_index is not None:",
        f"{PUSHES}::test_a_push_after_an_abort_is_refused",
    ),
    Fault(
        "silent_senders_stay",
        RECEIVER,
        *first("    def _watch(self) -> None:", "return"),
        f"{PUSHES}::test_a_silent_sender_is_cut_off",
        timeout_s=30,
    ),
    Fault(  # Who is told to try again is refused when it does.
        "pushes_without_a_slot_use_their_tickets",
        RECEIVER,
        "        with self._slots.taken(self.tickets.find(opening.secret).lane.caller):\n"
        "            ticket = self.tickets.take(opening.secret)\n",
        "        ticket = self.tickets.take(opening.secret)\n"
        "        with self._slots.taken(ticket.lane.caller):\n",
        FULL,
    ),
    Fault(
        "one_caller_has_all_pushes",
        TICKETS,
        "self._most = max_pushes + NUM_RESERVED",
        "self._most = max_pushes",
        FULL,
    ),
    Fault(
        "deaf_receivers_are_waited_for",
        SENDER,
        "return given_s is not None and time.monotonic() - given_s >= STALL_S",
        "return False",
        f"{SLOW}::test_a_receiver_that_takes_nothing_is_given_up",
        timeout_s=30,
    ),
    Fault(  # What was reserved for a move stays reserved.
        "failed_moves_keep_their_blocks",
        CLIENT,
        *first("    async def _undo(self, number: int, sequence_id: int) -> None:", "return"),
        f"{PUSHES}::test_a_move_that_failed_gives_its_blocks_back_and_can_be_made_again",
    ),
    Fault(
        "blocks_arrive_in_reverse",
        BLOCKS,
        "layers, blocks.first_block, data, tokens)\n",
        "layers, blocks.first_block, data.flip(1), tokens)\n",
        f"{PUSHES}::test_what_is_prefilled_here_is_decoded_there_bit_for_bit[large]",
    ),
    Fault(
        "anybody_pushes",
        RECEIVER,
        "self._gate.admit(PUSH_BLOCKS, context)",
        "pass",
        f"{ACCESS}::test_a_ticket_is_of_no_use_to_who_is_no_data_plane",
    ),
    Fault(  # A sender is cut off since the receiver is busy.
        "the_receivers_time_is_the_senders",
        RECEIVER,
        "            self._until_s = None\n            self._left_s -=",
        "            self._left_s -=",
        f"{SILENT}::test_the_receivers_own_time_is_no_silence",
    ),
    Fault(
        "what_does_not_parse_is_an_internal_error",
        RECEIVER,
        "except DecodeError as error:",
        "except ZeroDivisionError as error:",
        f"{ACCESS}::test_bytes_that_are_no_request_are_refused_by_name",
    ),
    Fault(  # What gRPC takes for a path or a scheme counts as a host.
        "any_host_may_be_a_scheme",
        SENDER,
        '"/" not in host and (":" not in host or host.startswith("["))',
        '"/" not in host',
        f"{ADDRESSES}::test_only_hosts_are_sent_to",
    ),
)
