"""The operations of a step: each is one class in one table, ``OPERATIONS``.

    operation ──► native core ──► done, in columns
                      └─► refused items ──► FAILED (typed error), LATER or NEVER (shortage)

The core checks, counts and then changes: an item that it refuses has changed nothing, and is
answered by itself. Whatever else has to know of an operation (limits, failures, metrics, checks,
the tests of the contract) reads it from the table.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from kvplane_blocks import ColumnError, _native

from control_plane import checks
from control_plane.admission.decisions import MustWait
from control_plane.pools.pool import Pool
from control_plane.sessions.pool_admission import LATER, PoolAdmission
from control_plane.sessions.session import QueuedAdmission, Session, forks_of
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
from control_plane.steps.plans import sign_pin_grant
from control_plane.steps.slices import SLICE_BLOCKS, SLICE_TOKENS, parts_of, ranges_of
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    SequenceExistsError,
    TooManyPlansInFlightError,
)
from kvplane.slices import Slices
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb

_NUM_COMPUTE: Final = "num_compute_tokens"
# What is computed by more than one plan, or by a later one.
_NOT_WITH_END: Final = (_NUM_COMPUTE, "fork_sequence_ids", "wait")
PINNED_COLUMNS: Final = ("groups", "tiers", "indices", "generations")
"""The columns of pinned blocks in a ``PinGrant``, in the core's order."""
_PIN_TOKENS: Final = 64  # that are looked up in the time that a pin takes besides its tokens
_ALL: Final = -1
_ID_BYTES: Final = 8
_TOKEN_BYTES: Final = 4


class Step:
    """State that the operations of one step share. The next plan's draft must be begun."""

    __slots__ = ("admission", "check_as", "handle", "native", "num_taken_tokens", "pool", "session")

    def __init__(self, session: Session, admission: PoolAdmission, *, check_as: int = 0) -> None:
        """``check_as``: 0 to run operations. Otherwise they change nothing, and each item is
        answered as the only one of the step with this number.
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
        """Do the items of an operation that can be done, and add the others to ``result``.
        ``index``: the operation's position in the request.
        """
        operation, message = named
        others_s, begin_s = 0.0, time.perf_counter()
        slices, failures = operation.run(self, message, result), None
        try:
            while True:
                next(slices)
                paused_s = time.perf_counter()
                yield
                others_s += time.perf_counter() - paused_s
        except StopIteration as end:
            failures = end.value
        except ColumnError as error:
            add_error(result, _at(index, operation), error_of_columns(error))
        except KvplaneError as error:
            add_error(result, _at(index, operation), error)
        spent_s = time.perf_counter() - begin_s - others_s
        if failures is not None:
            add_failures(result, self.session, _at(index, operation), operation, failures)
        if not self.check_as:
            self.pool.statistics.allocation_s[operation.name].add(spent_s)

    def refuse(
        self, result: cpb.OperationResult, failure: Failure, must_wait: MustWait | None
    ) -> Failures:
        """Return the failure of an operation of one item. If the queue has the operation wait, add
        the reason to ``result`` instead.
        """
        if must_wait is None:
            return [failure]
        num_headroom = self.admission.num_headroom()
        shortage = shortage_of(self.session, failure, must_wait, num_headroom)
        result.failures.add(status=cpb.ITEM_STATUS_LATER, shortage=shortage)
        return None


def _at(index: int, operation: Operation) -> str:
    """Return the path of an operation in its request, such as "operations[2].append"."""
    return f"operations[{index}].{operation.name}" if operation.name else f"operations[{index}]"


class Admit(OneSlice):
    """Starts a sequence from a prompt, and forks of it."""

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
        if message.checkpoint_position:
            _check_checkpoint(step.pool, message)
        if message.ends_with_plan:
            for field in _NOT_WITH_END:
                if message.HasField(field) if field == _NUM_COMPUTE else getattr(message, field):
                    raise InvalidRequestError("must not be given with ends_with_plan", field=field)
        num_compute = message.num_compute_tokens if message.HasField("num_compute_tokens") else _ALL
        step.num_taken_tokens += len(token_ids) // _TOKEN_BYTES
        admission, session = step.admission, step.session
        if session.queued is not None and not session.queued.is_of(message.sequence_id):
            _require_other_ids(session.queued, message)

        def ask_core(headroom: int) -> tuple[int, int, int] | Failure:
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
                message.checkpoint_position,
            )

        done, must_wait = ask_core(admission.asking_headroom()), None
        if len(done) == 5 and done[1] in LATER:
            must_wait = admission.decide_admission(session, message, done[2], step.check_as)
            if must_wait is None:
                done = ask_core(admission.num_headroom())
        if len(done) == 5:
            return step.refuse(result, done, must_wait)
        if not step.check_as:
            admission.admitted(session, message, done[0])
            if message.ends_with_plan:
                session.ending.append((session.numbers.last, message.sequence_id))
        admitted = result.admit
        admitted.num_cached_tokens, admitted.num_blocks, admitted.num_scheduled_tokens = done
        if checkpoint := message.checkpoint_position:
            ids = columns.pack(INT64, [message.sequence_id])
            _note_checkpoints(step, result, ids, columns.pack(INT32, [checkpoint]))
        return None


def _note_checkpoints(
    step: Step, result: cpb.OperationResult, sequence_ids: bytes, positions: bytes
) -> None:
    """Say in a result which of the checkpoints that were asked for have a block."""
    if positions and not step.check_as:
        result.checkpoint_positions = step.native.planned_checkpoints(
            step.handle, sequence_ids, positions
        )


def _require_other_ids(waiting: QueuedAdmission, message: cpb.Admit) -> None:
    """Raise SequenceExistsError if the message has an id that the waiting admission will start."""
    for i, sequence_id in enumerate([message.sequence_id, *forks_of(message)]):
        if waiting.names(sequence_id):
            field = f"fork_sequence_ids[{i - 1}]" if i else "sequence_id"
            raise SequenceExistsError(f"sequence {sequence_id} waits to be admitted", field=field)


def _check_checkpoint(pool: Pool, message: cpb.Admit) -> None:
    """Raise InvalidRequestError if no plan of the admission could keep its checkpoint."""
    position, num_tokens = message.checkpoint_position, len(message.token_ids) // _TOKEN_BYTES
    is_whole = 0 < position <= num_tokens and position % pool.block_size == 0
    if not is_whole or pool.layout.state_group is None:
        raise InvalidRequestError(
            f"must be 0, or a multiple of the block size up to {num_tokens}, in a layout with "
            "states",
            field="checkpoint_position",
        )


class Append(Operation):
    """Extends live sequences by tokens, and schedules the computation of slots."""

    name = "append"
    computes = True

    def may_plan(self, message: cpb.Append) -> bool:
        return bool(message.num_slots.strip(b"\0") or message.num_lookahead_slots.strip(b"\0"))

    def run(self, step: Step, message: cpb.Append, result: cpb.OperationResult) -> Slices[Failures]:
        token_ids = message.token_ids  # each access to a message's bytes copies all of them
        num_tokens = len(token_ids) // _TOKEN_BYTES
        if step.check_as or step.num_taken_tokens + num_tokens <= SLICE_TOKENS:
            step.num_taken_tokens += num_tokens
            result.num_table_blocks, refused = append(step, message)
            _note_checkpoints(step, result, message.sequence_ids, message.checkpoint_positions)
            return refused
        num_blocks, failures = bytearray(), list[Failure]()
        for first, part in parts_of(message, token_ids):
            num_tokens = len(part.token_ids) // _TOKEN_BYTES
            if first or step.num_taken_tokens + num_tokens > 2 * SLICE_TOKENS:
                step.num_taken_tokens = 0
                yield
            done, refused = append(step, part)
            step.num_taken_tokens += num_tokens
            num_blocks += done
            failures += [(first + failure[0], *failure[1:]) for failure in refused or ()]
        result.num_table_blocks = bytes(num_blocks)
        _note_checkpoints(step, result, message.sequence_ids, message.checkpoint_positions)
        return failures or None


def append(step: Step, message: cpb.Append) -> tuple[bytes, Failures]:
    """Extend sequences. While an older sequence waits for blocks, no other grows. Those that are
    extended no longer wait for what they were refused before.
    """
    native, handle = step.native, step.handle
    ids, firsts, slots = message.sequence_ids, message.first_positions, message.num_slots
    given = message.num_tokens, message.token_ids
    ahead, states = message.num_lookahead_slots, message.checkpoint_positions
    num_obtainable, check_as = 0, step.check_as
    if not step.admission.is_growth_blocked:
        sure = native.append(handle, ids, firsts, slots, *given, ahead, check_as, True, states)
        if sure is not None:
            return sure
        num_obtainable = native.num_obtainable(handle, tpb.TIER_DEVICE)
    growth = native.growth(handle, ids, firsts, slots, ahead, step.check_as)
    if sum(columns.read(INT32, growth, "growth")) > num_obtainable:
        num_blocks, refused = _append_in_turn(step, message)
    else:
        done = native.append(handle, ids, firsts, slots, *given, ahead, check_as, False, states)
        assert done is not None
        num_blocks, refused = done
    _stop_waiting(step, ids, refused)
    return num_blocks, refused


def _stop_waiting(step: Step, sequence_ids: bytes, refused: Failures) -> None:
    """Let sequences that were changed wait no more for growth that they were refused before."""
    if not step.session.wanted or step.check_as:
        return
    items = {failure[0] for failure in refused or ()}
    ids = columns.read(INT64, sequence_ids, "sequence_ids")
    done = {each for item, each in enumerate(ids) if item not in items}
    step.admission.stop_waiting(step.session, done)


def _append_in_turn(step: Step, message: cpb.Append) -> tuple[bytes, Failures]:
    """Extend sequences item by item: none grows while an older one waits for blocks."""
    native, handle = step.native, step.handle
    num = columns.count(INT64, message.sequence_ids)
    given = columns.read(INT32, message.num_tokens, "num_tokens", length=num)
    # Each access to a message's bytes copies all of them.
    all_ids, all_tokens = message.sequence_ids, message.token_ids
    columns_of_4 = (
        message.first_positions,
        message.num_slots,
        message.num_tokens,
        message.num_lookahead_slots,
    )
    if checkpoints := message.checkpoint_positions:
        columns.read(INT32, checkpoints, "checkpoint_positions", length=num)
    checks.token_columns(given, all_tokens)
    failures: list[Failure] = []
    done = bytearray()
    begin = 0
    for item in range(num):
        end = begin + 4 * given[item]
        ids = all_ids[8 * item : 8 * item + 8]
        firsts, slots, tokens, ahead = (column[4 * item : 4 * item + 4] for column in columns_of_4)
        columns_of_one = ids, firsts, slots, tokens, all_tokens[begin:end], ahead
        if failure := _must_wait(step, *columns_of_one):
            failures.append((item, *failure))
            done += bytes(4)
        else:
            checkpoint = checkpoints[4 * item : 4 * item + 4]
            answer = native.append(handle, *columns_of_one, step.check_as, False, checkpoint)
            assert answer is not None
            one, refused = answer
            failures += [(item, *failure[1:]) for failure in refused or ()]
            done += one
        begin = end
    return bytes(done), failures or None


def _must_wait(
    step: Step,
    sequence_ids: bytes,
    first_positions: bytes,
    num_slots: bytes,
    num_tokens: bytes,
    token_ids: bytes,
    num_lookahead: bytes,
) -> tuple[int, int, int, int] | None:
    """Return how the extension of one sequence fails if it has to wait for blocks."""
    native, handle = step.native, step.handle
    where = sequence_ids, first_positions, num_slots

    def num_needed(num_lookahead: bytes) -> int:
        growth = native.growth(handle, *where, num_lookahead, step.check_as)
        (num,) = columns.read(INT32, growth, "growth")
        return num

    num = num_needed(num_lookahead)
    if not num:
        return None
    # Nobody waits, or yields, for lookahead.
    num_awaited = num_needed(b"") if num_lookahead else num
    # Numbers of blocks are those of the pool's smallest group, and another may be what is short.
    check_as = step.check_as or step.session.numbers.last
    checked = native.append(handle, *where, num_tokens, token_ids, num_lookahead, check_as)
    assert checked is not None
    fits = not any(failure[1] in LATER for failure in checked[1] or ())
    (sequence_id,) = columns.read(INT64, sequence_ids, "sequence_ids")
    if step.admission.may_grow(
        step.session,
        sequence_id,
        num,
        num_awaited=num_awaited,
        fits=fits,
        check_as=step.check_as,
    ):
        return None
    return _native.LATER, num, native.num_obtainable(handle, tpb.TIER_DEVICE), tpb.TIER_DEVICE


class Fork(OneSlice):
    """Starts sequences that share the blocks of live ones."""

    name = "fork"
    parent_field = "parent_sequence_ids"

    def do(self, step: Step, message: cpb.Fork, result: cpb.OperationResult) -> Failures:
        session = step.session
        if session.queued is None:
            result.num_table_blocks, failures = step.native.fork(
                step.handle, message.parent_sequence_ids, message.sequence_ids, step.check_as
            )
        else:
            result.num_table_blocks, failures = _fork_beside(session.queued, step, message)
        if not step.check_as:
            step.admission.apply(session)
            if session.revoked:
                not_done = {failure[0] for failure in failures or ()}
                ids = columns.read(INT64, message.sequence_ids, "sequence_ids")
                for item, sequence_id in enumerate(ids):
                    if item not in not_done:
                        session.revoked.pop(sequence_id, None)
        return failures


def _fork_beside(waiting: QueuedAdmission, step: Step, message: cpb.Fork) -> tuple[bytes, Failures]:
    """Fork, but refuse the items that name an id which the waiting admission will start."""
    ids = columns.read(INT64, message.sequence_ids, "sequence_ids")
    parents = columns.read(
        INT64, message.parent_sequence_ids, "parent_sequence_ids", length=len(ids)
    )
    items = [i for i, sequence_id in enumerate(ids) if not waiting.names(sequence_id)]
    column, refused = step.native.fork(
        step.handle,
        columns.pack(INT64, [parents[i] for i in items]),
        columns.pack(INT64, [ids[i] for i in items]),
        step.check_as,
    )
    num_blocks = dict(zip(items, columns.read(INT32, column, "num_blocks"), strict=True))
    failures = [(items[item], code, a, b, c) for item, code, a, b, c in refused or ()]
    taken = set(range(len(ids))).difference(items)
    failures += [(i, _native.EXISTS, ids[i], 0, 0) for i in taken]
    done = columns.pack(INT32, [num_blocks.get(i, 0) for i in range(len(ids))])
    return done, sorted(failures) or None


class _OfMany(Operation):
    """Base class of an operation that does the same to each of many sequences."""

    columns: ClassVar[Mapping[str, str]] = {"sequence_ids": INT64}
    """The columns of the operation's message, each with the type of its elements."""

    @abstractmethod
    def do(self, step: Step, part: Sequence[bytes]) -> tuple[bytes, Failures]:
        """Do some of the items, whose columns are given. Returns how many blocks each item
        released, and the items that were refused.
        """

    def run(self, step: Step, message: Any, result: cpb.OperationResult) -> Slices[Failures]:
        given = [getattr(message, field) for field in self.columns]
        native, handle = step.native, step.handle
        num_held, num_items = native.num_blocks_held(handle), self.num_items(message)
        if step.check_as or num_held <= SLICE_TOKENS or not self._fit(given, num_items):
            result.num_released_blocks, refused = self.do(step, given)
            return refused
        num_released, failures, first, size = bytearray(), list[Failure](), 0, 1
        while first < num_items:
            if step.num_taken_tokens >= SLICE_TOKENS:
                step.num_taken_tokens = 0
                yield
            part = [
                columns.part(kind, column, first, first + size)
                for column, kind in zip(given, self.columns.values(), strict=True)
            ]
            done, refused = self.do(step, part)
            num_released += done
            failures += [(first + failure[0], *failure[1:]) for failure in refused or ()]
            first += size
            num_left = native.num_blocks_held(handle)
            step.num_taken_tokens += num_held - num_left  # a block takes as long as a token
            is_short = num_held - num_left < SLICE_TOKENS // 4
            size = 2 * size if is_short else max(1, size // 2)
            num_held = num_left
        result.num_released_blocks = bytes(num_released)
        return failures or None

    def _fit(self, given: Sequence[bytes], num_items: int) -> bool:
        """Return whether each column has ``num_items`` elements, without which it is refused."""
        sizes = [columns.size_bytes(kind) * num_items for kind in self.columns.values()]
        return [len(column) for column in given] == sizes


class Free(_OfMany):
    """Ends sequences and releases their blocks."""

    name = "free"

    def do(self, step: Step, part: Sequence[bytes]) -> tuple[bytes, Failures]:
        (ids,) = part
        released, failures = step.native.free(step.handle, ids, step.check_as)
        admission, session, remaining = step.admission, step.session, list[Failure]()
        if not step.check_as:
            admission.apply(session)
        # Freeing an admission that waits withdraws it; freeing a cut sequence succeeds.
        for failure in failures or ():
            if failure[1] != _native.NOT_FOUND or not session.may_forget(failure[2]):
                remaining.append(failure)
            elif not step.check_as:
                admission.forget(session, failure[2])
        _stop_waiting(step, ids, failures)
        return released, remaining or None


class Truncate(_OfMany):
    """Shortens sequences to fewer tokens."""

    name = "truncate"
    columns: ClassVar = {"sequence_ids": INT64, "num_tokens": INT32}

    def do(self, step: Step, part: Sequence[bytes]) -> tuple[bytes, Failures]:
        ids, num_tokens = part
        done = step.native.truncate(step.handle, ids, num_tokens, step.check_as)
        _stop_waiting(step, ids, done[1])
        return done


class Swap(Operation):
    """Moves sequences between the device and the host tier."""

    name = "swap"
    is_one_item = True
    names_each_once = True

    def run(self, step: Step, message: cpb.Swap, result: cpb.OperationResult) -> Slices[Failures]:
        if message.tier not in (tpb.TIER_DEVICE, tpb.TIER_HOST):
            raise InvalidRequestError("must be TIER_DEVICE or TIER_HOST", field="tier")
        ids = message.sequence_ids
        if not ids:
            raise InvalidRequestError("must be one or more distinct ids", field="sequence_ids")
        if step.pool.layout.state_group is not None:
            raise InvalidRequestError("is not served in a layout with states", field="tier")

        admission, session, must_wait = step.admission, step.session, None
        is_in = message.tier == tpb.TIER_DEVICE
        done = yield from _swap(step, message, admission.asking_headroom() if is_in else 0)
        if is_in and not isinstance(done, int) and done[1] in LATER:
            (first, *_) = columns.read(INT64, ids, "sequence_ids")
            must_wait = admission.decide_swap_in(session, first, done[2], step.check_as)
            if must_wait is None:
                done = yield from _swap(step, message, admission.num_headroom())
        if not isinstance(done, int):
            return step.refuse(result, done, must_wait)
        result.num_swapped_blocks = done
        if not step.check_as:
            admission.apply(session)
            _stop_waiting(step, ids, None)
            step.num_taken_tokens += done * (SLICE_TOKENS // SLICE_BLOCKS)
        return None


def _swap(step: Step, message: cpb.Swap, headroom: int) -> Slices[int | Failure]:
    """Allocate all blocks that the swap needs in the other tier, and then move them, about
    ``SLICE_BLOCKS`` at a time. Returns how many were moved, or why the swap is refused.
    """
    native, handle = step.native, step.handle
    done = native.swap(
        handle, message.sequence_ids, message.tier, headroom, SLICE_BLOCKS, step.check_as
    )
    while done is None:
        yield
        done = native.swap_some(handle, SLICE_BLOCKS)
    return done


class Pin(Operation):
    """Holds the cached blocks of prompts for reading. A pin ends by itself after as long as a
    lease: its blocks may then be evicted, and data planes notice when they are.
    """

    name = "pin"
    noun = "pin"
    id_field = "pin_ids"

    def may_plan(self, message: cpb.Pin) -> bool:
        return False

    def run(self, step: Step, message: cpb.Pin, result: cpb.OperationResult) -> Slices[Failures]:
        pin_ids, counts, token_ids = message.pin_ids, message.num_tokens, message.token_ids
        num_pins = len(columns.read(INT64, pin_ids, "pin_ids"))
        num_tokens = columns.read(INT32, counts, "num_tokens", length=num_pins)
        checks.token_columns(num_tokens, token_ids, at_least=1)
        checks.token_ids(token_ids, field="token_ids")
        pool, headroom = step.pool, step.admission.asking_headroom()
        num_blocks, failures = bytearray(), list[Failure]()
        blocks = tuple(bytearray() for _ in PINNED_COLUMNS)
        for items, tokens in ranges_of(num_tokens):
            if step.num_taken_tokens >= SLICE_TOKENS:
                step.num_taken_tokens = 0
                yield
            done, refused, pinned = step.native.pin(
                step.handle,
                pin_ids[8 * items.start : 8 * items.stop],
                counts[4 * items.start : 4 * items.stop],
                token_ids[4 * tokens.start : 4 * tokens.stop],
                headroom,
                pool.now_s + pool.lease_s,
                step.check_as,
            )
            step.num_taken_tokens += len(tokens) + _PIN_TOKENS * len(items)
            num_blocks += done
            failures += [(items.start + each[0], *each[1:]) for each in refused or ()]
            for column, part in zip(blocks, pinned, strict=True):
                column += part
        if step.check_as:
            return failures or None
        result.num_pinned_blocks = bytes(num_blocks)
        if blocks[0]:
            named = zip(PINNED_COLUMNS, map(bytes, blocks), strict=True)
            result.pin_grant.CopyFrom(sign_pin_grant(step.session, dict(named)))
        return failures or None


class Unpin(OneSlice):
    """Ends pins. Those that have ended already are passed over."""

    name = "unpin"
    noun = "pin"
    id_field = "pin_ids"

    def may_plan(self, message: cpb.Unpin) -> bool:
        return False

    def do(self, step: Step, message: cpb.Unpin, result: cpb.OperationResult) -> Failures:
        columns.read(INT64, message.pin_ids, "pin_ids")
        if not step.check_as:
            step.native.unpin(step.handle, message.pin_ids)
        return None


class _DeferredTokens(Refusable):
    """Tokens of slots that appends scheduled without them. They are no operation, but their items
    are refused as an operation's are.
    """

    name = "deferred_tokens"


class _Unknown(OneSlice):
    """Answers an operation that this release does not know or serve, or an empty one."""

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
        Pin(),
        Unpin(),
    )
}
"""Each operation that the control plane serves, by its field in ``kvplane.v1.Operation``. One more
is a message there, a class here, a builder in ``kvplane.ops``, and in tests a row of ``ROWS``
(``test_operations_table``).
"""
DEFERRED_TOKENS: Final = _DeferredTokens()
_UNKNOWN: Final = _Unknown()


def read_operations(operations: Sequence[cpb.Operation], most: int) -> list[Named]:
    """Parse the operations of a request. Raises InvalidRequestError when they change more than
    ``most`` sequences in all, each operation counted as one at least.
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


def may_plan(session: Session, operations: Sequence[Named]) -> bool:
    """Return whether a step of these operations may make a plan. Tables of sequences that ended
    with their plans are dropped by the next one, and need none for that.
    """
    if session.resync_due or session.is_drafted:
        return True
    return any(operation.may_plan(message) for operation, message in operations)


def check_no_plan(session: Session, operations: Sequence[Named]) -> None:
    """Raise TooManyPlansInFlightError if an operation may need a plan: none may be made."""
    if may_plan(session, operations):
        raise TooManyPlansInFlightError(
            f"{len(session.plans)} plans wait for their receipts: run them, and submit receipts "
            "with add_receipt or submit_receipts"
        )
