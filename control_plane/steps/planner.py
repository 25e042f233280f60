"""From a step's operations to calls of the native core, and back to messages.

The core checks, counts and then changes: an item that it refuses has changed nothing, and is
answered by itself.

    operation ──► core ──► done, in columns
                   └─► refused items ──► FAILED (typed error), LATER or NEVER (shortage)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvplane_blocks import ColumnError

from control_plane import checks
from control_plane.admission.decisions import MustWait
from control_plane.sharing.member import Member
from control_plane.sharing.sharing import Sharing
from control_plane.steps import prefixes
from control_plane.steps.failures import (
    Failure,
    add_error,
    add_failures,
    error_of_columns,
    shortage_of,
)
from control_plane.steps.slices import SLICE_BLOCKS, SLICE_TOKENS, parts_of
from kvplane.errors import InvalidRequestError, KvplaneError, TooManyPlansInFlightError
from kvplane.slices import Slices
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb

# Operations that name sequences in a column; the others are one item.
_OF_SEQUENCES: Final = ("append", "fork", "free", "truncate", "swap_out", "swap_in")
_WITHOUT_PLAN: Final = ("retain", "release", "forget")
_ALL: Final = -1
_ID_BYTES: Final = 8
_TOKEN_BYTES: Final = 4

# Its name, empty for one that is not known here, and its message.
Named = tuple[str, Any]


def read_operations(operations: Sequence[cpb.Operation], most: int) -> list[Named]:
    """The operations by name.

    Their items are counted by the lengths of their columns; each operation counts at least one, a
    swap as many as the sequences that it moves, an admission as many as it starts. Raises
    InvalidRequestError when there are more than ``most``.
    """
    named: list[Named] = []
    num_items = len(operations)
    if num_items <= most:
        for operation in operations:
            kind = operation.WhichOneof("operation")
            if kind is None:
                named.append(("", None))
                continue
            message = getattr(operation, kind)
            if kind in _OF_SEQUENCES:
                num_items += max(1, len(message.sequence_ids) // _ID_BYTES) - 1
            elif kind == "admit":
                num_items += len(message.fork_sequence_ids) // _ID_BYTES
            named.append((kind, message))
    if num_items > most:
        raise InvalidRequestError(
            f"must have at most {most} items in all: send them in several steps",
            field="operations",
        )
    return named


def may_plan(named: Named) -> bool:
    """Whether the operation may need a plan."""
    kind, message = named
    if kind == "append":
        return bool(message.num_slots.strip(b"\0") or message.num_lookahead_slots.strip(b"\0"))
    return kind not in _WITHOUT_PLAN


class Planner:
    """Runs the operations of one step, for which the session's draft is begun."""

    __slots__ = ("_check_as", "_member", "_session", "_sharing", "num_taken_tokens")

    def __init__(self, member: Member, sharing: Sharing, *, check_as: int = 0) -> None:
        """``check_as``: if it is not 0, the planner changes nothing, and gives each item the answer
        that it would get as the only item of the step with that number.
        """
        self._member = member
        self._session = member.session
        self._sharing = sharing
        self._check_as = check_as
        self.num_taken_tokens = 0
        """Tokens that operations have taken in since this was set to 0. A block that was swapped
        counts as the tokens that take as long.
        """

    def run(self, index: int, named: Named, result: cpb.OperationResult) -> Slices[None]:
        """Do the items of an operation that can be done. ``index`` is its place in the step."""
        kind, message = named
        try:
            if kind in _IN_SLICES:
                failures = yield from self._timed(kind, _IN_SLICES[kind](self, message, result))
            else:
                begin_s = time.perf_counter()
                try:
                    failures = _RUN[kind](self, message, result)
                finally:
                    self._add_time(kind, time.perf_counter() - begin_s)
            if failures is None:
                return
        except ColumnError as error:
            add_error(result, _at(index, kind), error_of_columns(error))
        except KvplaneError as error:
            add_error(result, _at(index, kind), error)
        else:
            add_failures(result, self._member, _at(index, kind), kind, failures)

    def _timed(self, kind: str, slices: Slices[list[Failure] | None]) -> Slices[Any]:
        """The slices, whose own time is counted."""
        spent_s = 0.0
        try:
            while True:
                begin_s = time.perf_counter()
                try:
                    next(slices)
                except StopIteration as end:
                    return end.value
                finally:
                    spent_s += time.perf_counter() - begin_s
                yield
        finally:
            self._add_time(kind, spent_s)

    def _add_time(self, kind: str, spent_s: float) -> None:
        if not self._check_as:
            self._session.pool.statistics.allocation_s[kind].add(spent_s)

    # Each does an operation, and returns the items that were refused.

    def _admit(self, message: cpb.Admit, result: cpb.OperationResult) -> list[Failure] | None:
        session, token_ids = self._session, message.token_ids
        checks.token_bytes(token_ids, at_least=1, field="token_ids")
        checks.count(message.max_total_tokens, field="max_total_tokens")
        checks.count(message.num_compute_tokens, field="num_compute_tokens")
        num_compute = message.num_compute_tokens if message.HasField("num_compute_tokens") else _ALL
        self.num_taken_tokens += len(token_ids) // _TOKEN_BYTES

        def admit(headroom: int) -> tuple[int, int, int] | Failure:
            return session.native.admit(
                session.handle,
                message.sequence_id,
                token_ids,
                message.fork_sequence_ids,
                num_compute,
                message.max_total_tokens,
                message.skip_prefix_lookup,
                headroom,
                self._check_as,
            )

        must_wait: MustWait | None = None
        if self._check_as:
            done = admit(session.pool.num_watermark_blocks())
        else:
            done, must_wait = self._sharing.admit(self._member, message, admit)
        if len(done) == 3:
            admitted = result.admit
            admitted.num_cached_tokens, admitted.num_blocks, admitted.num_scheduled_tokens = done
            return None
        return self._refused(result, done, must_wait)

    def _refused(
        self, result: cpb.OperationResult, failure: Failure, must_wait: MustWait | None
    ) -> list[Failure] | None:
        """Adds why an operation of one item has to wait, if the queue says so."""
        if must_wait is None:
            return [failure]
        shortage = shortage_of(self._session, failure, must_wait)
        result.failures.add(status=cpb.OPERATION_STATUS_LATER, shortage=shortage)
        return None

    def _append(
        self, message: cpb.Append, result: cpb.OperationResult
    ) -> Slices[list[Failure] | None]:
        if self._check_as:
            native = self._session.native
            result.append.num_blocks, refused = native.append(
                self._session.handle,
                message.sequence_ids,
                message.first_positions,
                message.num_slots,
                message.num_tokens,
                message.token_ids,
                message.num_lookahead_slots,
                self._check_as,
            )
            return refused
        num_blocks, failures = bytearray(), list[Failure]()
        for first, part in parts_of(message):
            num_tokens = len(part.token_ids) // _TOKEN_BYTES
            if first or self.num_taken_tokens + num_tokens > 2 * SLICE_TOKENS:
                self.num_taken_tokens = 0
                yield
            done, refused = self._sharing.append(self._member, part)
            self.num_taken_tokens += num_tokens
            num_blocks += done
            failures += [(first + failure[0], *failure[1:]) for failure in refused or ()]
        result.append.num_blocks = bytes(num_blocks)
        return failures or None

    def _truncate(self, message: cpb.Truncate, result: cpb.OperationResult) -> list[Failure] | None:
        released, failures = self._session.native.truncate(
            self._session.handle, message.sequence_ids, message.num_tokens, self._check_as
        )
        result.truncate.num_released_blocks = released
        return failures

    def _fork(self, message: cpb.Fork, result: cpb.OperationResult) -> list[Failure] | None:
        if self._check_as:
            num_blocks, failures = self._session.native.fork(
                self._session.handle,
                message.parent_sequence_ids,
                message.sequence_ids,
                self._check_as,
            )
        else:
            num_blocks, failures = self._sharing.fork(self._member, message)
        result.fork.num_blocks = num_blocks
        return failures

    def _free(self, message: cpb.Free, result: cpb.OperationResult) -> list[Failure] | None:
        released, failures = self._session.native.free(
            self._session.handle, message.sequence_ids, self._check_as
        )
        result.free.num_released_blocks = released
        if self._check_as:
            return failures
        return self._sharing.freed(self._member, message.sequence_ids, failures)

    def _swap_out(
        self, message: cpb.SwapOut, result: cpb.OperationResult
    ) -> Slices[list[Failure] | None]:
        _require_some(message.sequence_ids)
        done = self._begin_swap(message, tpb.TIER_HOST, 0)
        if not isinstance(done, int):
            return [done]
        result.swap_out.num_blocks = done
        if not self._check_as:
            self._sharing.swapped_out(self._member, message.sequence_ids)
            yield from self._swap(done)
        return None

    def _swap_in(
        self, message: cpb.SwapIn, result: cpb.OperationResult
    ) -> Slices[list[Failure] | None]:
        _require_some(message.sequence_ids)

        def swap(headroom: int) -> int | Failure:
            return self._begin_swap(message, tpb.TIER_DEVICE, headroom)

        must_wait: MustWait | None = None
        if self._check_as:
            done = swap(self._session.pool.num_watermark_blocks())
        else:
            done, must_wait = self._sharing.swap_in(self._member, message.sequence_ids, swap)
        if not isinstance(done, int):
            return self._refused(result, done, must_wait)
        result.swap_in.num_blocks = done
        if not self._check_as:
            yield from self._swap(done)
        return None

    def _begin_swap(
        self, message: cpb.SwapOut | cpb.SwapIn, tier: tpb.Tier, headroom: int
    ) -> int | Failure:
        """Takes all the room that the swap needs, and moves nothing yet."""
        session = self._session
        return session.native.swap(
            session.handle, message.sequence_ids, tier, headroom, 0, self._check_as
        )

    def _swap(self, num_blocks: int) -> Slices[None]:
        """Move the blocks of the swap that was begun."""
        session = self._session
        if num_blocks > SLICE_BLOCKS:
            yield
        while session.native.swap_some(session.handle, SLICE_BLOCKS):
            yield
        self.num_taken_tokens += num_blocks * (SLICE_TOKENS // SLICE_BLOCKS)

    def _retain(self, message: cpb.Retain, result: cpb.OperationResult) -> None:
        prefixes.retain(self._session, message, result, only_check=bool(self._check_as))

    def _release(self, message: cpb.Release, result: cpb.OperationResult) -> None:
        prefixes.release(self._session, message, result, only_check=bool(self._check_as))

    def _unknown(self, message: None, result: cpb.OperationResult) -> None:
        raise InvalidRequestError("is not an operation that is known here")

    def _forget(self, message: cpb.Forget, result: cpb.OperationResult) -> None:
        prefixes.forget(self._session, message, result, only_check=bool(self._check_as))


_Run = Callable[[Planner, Any, cpb.OperationResult], list[Failure] | None]
_RunInSlices = Callable[[Planner, Any, cpb.OperationResult], Slices[list[Failure] | None]]
_IN_SLICES: Final[dict[str, _RunInSlices]] = {
    "append": Planner._append,
    "swap_out": Planner._swap_out,
    "swap_in": Planner._swap_in,
}
_RUN: Final[dict[str, _Run]] = {
    "admit": Planner._admit,
    "fork": Planner._fork,
    "free": Planner._free,
    "truncate": Planner._truncate,
    "retain": Planner._retain,
    "release": Planner._release,
    "forget": Planner._forget,
    "": Planner._unknown,
}


def check_no_plan(member: Member, operations: Sequence[Named]) -> None:
    """No plan may be made now. Raises TooManyPlansInFlightError if one might."""
    session = member.session
    if session.resync_due or member.is_drafted or any(map(may_plan, operations)):
        raise TooManyPlansInFlightError(
            f"{len(session.plans)} plans wait for their receipts: run them, and hand in receipts "
            "with add_receipt or SubmitReceipts"
        )


def _require_some(sequence_ids: bytes) -> None:
    if not sequence_ids:
        raise InvalidRequestError("must be one or more distinct ids", field="sequence_ids")


def _at(index: int, kind: str) -> str:
    return f"operations[{index}].{kind}" if kind else f"operations[{index}]"
