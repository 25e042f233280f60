"""The operations of a step: each is one class in one table, ``OPERATIONS``.

    operation ──► native core ──► done, in columns
                      └─► refused items ──► FAILED (typed error), LATER or NEVER (shortage)

The core checks, counts and then changes: an item that it refuses has changed nothing, and is
answered by itself. Whatever else has to know of an operation (limits, failures, metrics, checks,
the tests of the contract) reads it from the table.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from kvplane_blocks import ColumnError

from control_plane import checks
from control_plane.admission.decisions import MustWait
from control_plane.sessions.pool_admission import PoolAdmission
from control_plane.sessions.session import Session
from control_plane.steps.failures import (
    add_error,
    add_failures,
    error_of_columns,
    shortage_of,
)
from control_plane.steps.operation import (
    Failure,
    Failures,
    Named,
    OneSlice,
    Operation,
    Refusable,
)
from control_plane.steps.slices import SLICE_BLOCKS, SLICE_TOKENS, parts_of
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    TooManyPlansInFlightError,
)
from kvplane.slices import Slices
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb

_ALL: Final = -1
_ID_BYTES: Final = 8
_TOKEN_BYTES: Final = 4


class Step:
    """The state that the operations of one step use; the session's draft must be begun."""

    __slots__ = ("admission", "check_as", "handle", "native", "num_taken_tokens", "pool", "session")

    def __init__(self, session: Session, admission: PoolAdmission, *, check_as: int = 0) -> None:
        """``check_as``: if not 0, operations change nothing, and answer each item as the only one
        of the step with that number.
        """
        self.session = session
        self.admission = admission
        self.pool = session.pool
        self.native, self.handle = session.native, session.handle
        self.check_as = check_as
        self.num_taken_tokens = 0
        """Tokens that operations have taken in since this was last set to 0. A swapped block counts
        as the number of tokens that take as long to take in as the block takes to swap.
        """

    def run(self, index: int, named: Named, result: cpb.OperationResult) -> Slices[None]:
        """Do the items of an operation that can be done. ``index``: its position in the request."""
        operation, message = named
        slices, failures, spent_s = operation.run(self, message, result), None, 0.0
        is_done = False
        while not is_done:  # count the time that it takes itself, without others' between slices
            begin_s = time.perf_counter()
            try:
                next(slices)
            except StopIteration as end:
                failures, is_done = end.value, True
            except ColumnError as error:
                add_error(result, _at(index, operation), error_of_columns(error))
                is_done = True
            except KvplaneError as error:
                add_error(result, _at(index, operation), error)
                is_done = True
            spent_s += time.perf_counter() - begin_s
            if not is_done:
                yield
        if failures is not None:
            add_failures(result, self.session, _at(index, operation), operation, failures)
        if not self.check_as:
            self.pool.statistics.allocation_s[operation.name].add(spent_s)

    def refuse(
        self, result: cpb.OperationResult, failure: Failure, must_wait: MustWait | None
    ) -> Failures:
        """Return the failure of an operation of one item; if the queue has it wait, add why to
        ``result`` instead.
        """
        if must_wait is None:
            return [failure]
        num_headroom = self.admission.num_headroom()
        shortage = shortage_of(self.session, failure, must_wait, num_headroom)
        result.failures.add(status=cpb.ITEM_STATUS_LATER, shortage=shortage)
        return None


def _at(index: int, operation: Operation) -> str:
    """Return the field of an operation in its request, such as "operations[2].append"."""
    return f"operations[{index}].{operation.name}" if operation.name else f"operations[{index}]"


class Admit(OneSlice):
    """Starts a sequence of a prompt, and forks of it."""

    name = "admit"
    is_one_item = True
    id_field = parent_field = "sequence_id"
    is_checked_with_answer = True

    def num_changes(self, message: cpb.Admit) -> int:
        return 1 + len(message.fork_sequence_ids) // _ID_BYTES

    def located(self, field: str, failure: Failure) -> tuple[str, int | None]:
        if field == "sequence_id" and failure[0]:
            return "fork_sequence_ids", failure[0] - 1
        if field == "token_ids":
            return field, failure[3]
        return super().located(field, failure)

    def do(self, step: Step, message: cpb.Admit, result: cpb.OperationResult) -> Failures:
        token_ids = message.token_ids
        checks.token_bytes(token_ids, at_least=1, field="token_ids")
        checks.count(message.max_total_tokens, field="max_total_tokens")
        checks.count(message.num_compute_tokens, field="num_compute_tokens")
        for field in ("ends_with_plan", "checkpoint_position"):
            if getattr(message, field):
                raise InvalidRequestError("is not served by this release", field=field)
        num_compute = message.num_compute_tokens if message.HasField("num_compute_tokens") else _ALL
        step.num_taken_tokens += len(token_ids) // _TOKEN_BYTES

        def admit(headroom: int) -> tuple[int, int, int] | Failure:
            return step.native.admit(
                step.handle,
                message.sequence_id,
                token_ids,
                message.fork_sequence_ids,
                num_compute,
                message.max_total_tokens,
                message.skip_prefix_lookup,
                headroom,
                step.check_as,
            )

        done, must_wait = step.admission.admit(step.session, message, admit, step.check_as)
        if len(done) == 3:
            admitted = result.admit
            admitted.num_cached_tokens, admitted.num_blocks, admitted.num_scheduled_tokens = done
            return None
        return step.refuse(result, done, must_wait)


class Append(Operation):
    """Extends live sequences by tokens, and has slots of them computed."""

    name = "append"
    computes = True

    def may_plan(self, message: cpb.Append) -> bool:
        return bool(message.num_slots.strip(b"\0") or message.num_lookahead_slots.strip(b"\0"))

    def run(self, step: Step, message: cpb.Append, result: cpb.OperationResult) -> Slices[Failures]:
        if message.checkpoint_positions:
            raise InvalidRequestError("is not served by this release", field="checkpoint_positions")
        num_tokens = len(message.token_ids) // _TOKEN_BYTES
        if step.check_as or step.num_taken_tokens + num_tokens <= SLICE_TOKENS:
            step.num_taken_tokens += num_tokens
            result.num_table_blocks, refused = step.admission.append(
                step.session, message, step.check_as
            )
            return refused
        num_blocks, failures = bytearray(), list[Failure]()
        for first, part in parts_of(message):
            num_tokens = len(part.token_ids) // _TOKEN_BYTES
            if first or step.num_taken_tokens + num_tokens > 2 * SLICE_TOKENS:
                step.num_taken_tokens = 0
                yield
            done, refused = step.admission.append(step.session, part, 0)
            step.num_taken_tokens += num_tokens
            num_blocks += done
            failures += [(first + failure[0], *failure[1:]) for failure in refused or ()]
        result.num_table_blocks = bytes(num_blocks)
        return failures or None


class Fork(OneSlice):
    """Starts sequences that share the blocks of live ones."""

    name = "fork"
    parent_field = "parent_sequence_ids"

    def do(self, step: Step, message: cpb.Fork, result: cpb.OperationResult) -> Failures:
        num_blocks, failures = step.admission.fork(step.session, message, step.check_as)
        result.num_table_blocks = num_blocks
        return failures


class Free(OneSlice):
    """Ends sequences."""

    name = "free"

    def do(self, step: Step, message: cpb.Free, result: cpb.OperationResult) -> Failures:
        released, failures = step.native.free(step.handle, message.sequence_ids, step.check_as)
        result.num_released_blocks = released
        return step.admission.freed(step.session, message.sequence_ids, failures, step.check_as)


class Truncate(OneSlice):
    """Shortens sequences."""

    name = "truncate"

    def do(self, step: Step, message: cpb.Truncate, result: cpb.OperationResult) -> Failures:
        released, failures = step.native.truncate(
            step.handle, message.sequence_ids, message.num_tokens, step.check_as
        )
        result.num_released_blocks = released
        return failures


class Swap(Operation):
    """Moves sequences to the other tier."""

    name = "swap"
    is_one_item = True
    names_each_once = True

    def run(self, step: Step, message: cpb.Swap, result: cpb.OperationResult) -> Slices[Failures]:
        if message.tier not in (tpb.TIER_DEVICE, tpb.TIER_HOST):
            raise InvalidRequestError("must be TIER_DEVICE or TIER_HOST", field="tier")
        ids = message.sequence_ids
        if not ids:
            raise InvalidRequestError("must be one or more distinct ids", field="sequence_ids")

        def begin(headroom: int) -> int | Failure:
            """Allocate all blocks that the swap needs, and move nothing yet."""
            return step.native.swap(step.handle, ids, message.tier, headroom, 0, step.check_as)

        if message.tier == tpb.TIER_DEVICE:
            done, must_wait = step.admission.swap_in(step.session, ids, begin, step.check_as)
            if not isinstance(done, int):
                return step.refuse(result, done, must_wait)
        else:
            done = begin(0)
            if not isinstance(done, int):
                return [done]
            if not step.check_as:
                step.admission.swapped_out(step.session, ids)
        result.num_swapped_blocks = done
        if not step.check_as:
            yield from self.move(step, done)
        return None

    def move(self, step: Step, num_blocks: int) -> Slices[None]:
        """Move the blocks of the swap that was begun."""
        if num_blocks > SLICE_BLOCKS:
            yield
        while step.native.swap_some(step.handle, SLICE_BLOCKS):
            yield
        step.num_taken_tokens += num_blocks * (SLICE_TOKENS // SLICE_BLOCKS)


class _DeferredTokens(Refusable):
    """The tokens of slots that appends scheduled without them: no operation, but its items are
    refused as those of one.
    """

    name = "deferred_tokens"


class _Unknown(OneSlice):
    """An operation of a later release, one that this release does not serve, or none at all."""

    is_one_item = True

    def num_changes(self, message: Any) -> int:
        return 1

    def do(self, step: Step, message: Any, result: cpb.OperationResult) -> None:
        raise InvalidRequestError("is not an operation that this release serves")


OPERATIONS: Final[dict[str, Operation]] = {
    operation.name: operation
    for operation in (
        Admit(),
        Append(),
        Fork(),
        Free(),
        Truncate(),
        Swap(),
    )
}
"""Every operation, by its field in ``kvplane.v1.Operation``."""
DEFERRED_TOKENS: Final = _DeferredTokens()
_UNKNOWN: Final = _Unknown()


def read_operations(operations: Sequence[cpb.Operation], most: int) -> list[Named]:
    """Return the operations of a request. Raises InvalidRequestError when they change more than
    ``most`` sequences in all, each counted as one at least.
    """
    named: list[Named] = []
    num_items = len(operations)
    if num_items <= most:
        for request in operations:
            kind = request.WhichOneof("operation")
            if kind is None:
                named.append((_UNKNOWN, None))
                continue
            operation, message = OPERATIONS.get(kind, _UNKNOWN), getattr(request, kind)
            num_items += operation.num_changes(message) - 1
            named.append((operation, message))
    if num_items > most:
        raise InvalidRequestError(
            f"must have at most {most} items in all: send them in several steps",
            field="operations",
        )
    return named


def check_no_plan(session: Session, operations: Sequence[Named]) -> None:
    """Raise TooManyPlansInFlightError if an operation may need a plan: none may be made now."""
    may_plan = any(operation.may_plan(message) for operation, message in operations)
    if session.resync_due or session.is_drafted or may_plan:
        raise TooManyPlansInFlightError(
            f"{len(session.plans)} plans wait for their receipts: run them, and submit receipts "
            "with add_receipt or submit_receipts"
        )
