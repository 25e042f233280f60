"""One row an operation: the contract, the core's table, the builders and this table have the same
operations. Over a socket each is checked, done, counted and repeated. A refusal of each kind names
its reason and changes nothing; ``tests/unit/core`` and ``tests/unit/blocks`` have all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from control_plane.steps.operations import OPERATIONS
from kvplane import StepResult, ops
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    NeverFitsError,
    PoolFullError,
    QuotaExceededError,
    SequenceExistsError,
    SequenceNotFoundError,
)
from kvplane.results import ItemFailure
from kvplane.wire import columns
from kvplane.wire.columns import INT32
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.outcomes import outcomes
from tests.helpers.planning.operations_world import BLOCK, DEVICE, HOST, Caller, prompt

FAILED: Final = pb.ITEM_STATUS_FAILED
LATER, NEVER = pb.ITEM_STATUS_LATER, pb.ITEM_STATUS_NEVER
LACKS_BLOCKS, LACKS_HEADROOM, LACKS_QUOTA = (
    pb.SHORTAGE_REASON_BLOCKS,
    pb.SHORTAGE_REASON_HEADROOM,
    pb.SHORTAGE_REASON_QUOTA,
)

PROMPT: Final = list(range(1, 21))  # 2 full blocks and a part of one
ADMITTED: Final = (ops.admit(1, PROMPT), ops.admit(2, PROMPT[:9]))
"""Sequence 2 shares the first block of sequence 1."""

MIXED: Final = (
    ops.admit(1, prompt(1)),
    ops.admit(2, prompt(1, seed=1)),
    ops.swap(2, "host"),
    ops.admit(3, prompt(3, seed=2)),
    ops.free(3),
)
"""Sequence 1 has 9 tokens on the device and sequence 2 as many on the host. Of another prompt,
``RETAINED``, three blocks are cached; two of them are retained.
"""
RETAINED: Final = prompt(2, seed=2)
CROWDED: Final = (
    ops.admit(1, prompt(7, extra=0)),
    ops.admit(2, prompt(7, seed=1, extra=0)),
)
"""Two of the 16 device blocks are left."""


@dataclass(frozen=True)
class Refusal:
    """An operation that is not done after the steps ``before``, on a pool with these ``settings``.
    ``why``: an error and its field; or a status and the shortage: its tier, its reason and the
    numbers of blocks that are needed and available. ``waits``: whether it waits in the queue, and
    so is done later without being sent again; a check does not foresee that.
    """

    operation: pb.Operation
    why: tuple[type[KvplaneError], str] | tuple[int, int, int, int, int]
    before: tuple[pb.Operation, ...] = MIXED
    settings: dict[str, Any] = field(default_factory=dict)
    waits: bool = False


@dataclass(frozen=True)
class Row:
    """``done`` can be done after the steps ``before``, is counted as ``num_items`` and answered by
    ``answer``.
    """

    done: pb.Operation
    num_items: int
    answer: dict[str, Any]
    refusals: dict[str, Refusal]
    before: tuple[pb.Operation, ...] = ADMITTED


def int32(*values: int) -> bytes:
    return columns.pack(INT32, values)


def crowded(operation: pb.Operation, status: int, num_needed: int, num_available: int) -> Refusal:
    """Without room on the device, beside two sequences."""
    why = (status, DEVICE, LACKS_BLOCKS, num_needed, num_available)
    return Refusal(operation, why, CROWDED)


def over_quota(
    operation: pb.Operation, status: int, num_needed: int, num_available: int, num_tokens: int
) -> Refusal:
    """Beyond a tenant's four blocks, of which a sequence of ``num_tokens`` has some."""
    why = (status, DEVICE, LACKS_QUOTA, num_needed, num_available)
    before = (ops.admit(1, range(num_tokens)),)
    return Refusal(operation, why, before, {"max_tenant_blocks": 4})


OTHERS: Final = prompt(16, seed=5)
ROWS: Final = {
    "admit": Row(
        ops.admit(3, PROMPT, fork_sequence_ids=[4]),
        1,
        {"admit": pb.AdmitResult(num_cached_tokens=16, num_blocks=3, num_scheduled_tokens=4)},
        {
            "highest total": crowded(
                ops.admit(3, [1], max_total_tokens=2**31 - 1), NEVER, 2**28, 16
            ),
            "too long to wait": crowded(ops.admit(3, OTHERS, wait=True), NEVER, 17, 16),
            "quota, waiting": over_quota(
                ops.admit(2, OTHERS[:9], wait=True), LATER, 2, 1, num_tokens=17
            ),
            "over the quota": over_quota(ops.admit(2, OTHERS[:33]), NEVER, 5, 4, num_tokens=25),
        },
    ),
    "append": Row(
        ops.append(
            [1, 2], [5, 6], 1, first_positions=[20, 9], num_tokens=1, num_lookahead_slots=[0, 8]
        ),
        2,
        {"num_table_blocks": int32(3, 3)},
        {
            "no room to look ahead": crowded(
                ops.append(1, [5], 1, first_positions=56, num_lookahead_slots=2 * BLOCK),
                *(LATER, 3, 2),
            ),
        },
    ),
    "fork": Row(
        ops.fork(1, [3, 4]),
        2,
        {"num_table_blocks": int32(3, 3)},
        {},
    ),
    "free": Row(
        ops.free([1, 2]),
        2,
        {"num_released_blocks": int32(2, 2)},
        {
            "unknown": Refusal(ops.free(9), (SequenceNotFoundError, "sequence_ids[0]")),
        },
    ),
    "truncate": Row(
        ops.truncate([1, 2], [16, 8]),
        2,
        {"num_released_blocks": int32(1, 1)},
        {},
    ),
    "swap": Row(
        ops.swap([1, 2], "host"),
        1,
        {"num_swapped_blocks": 4},
        {
            "no room": Refusal(
                ops.swap(2, "host"),
                (LATER, HOST, LACKS_BLOCKS, 7, 1),
                (*CROWDED, ops.swap(1, "host")),
            ),
        },
    ),
    "swap back": Row(
        ops.swap(1, "device"),
        1,
        {"num_swapped_blocks": 3},
        {
            "no room": Refusal(
                ops.swap(1, "device"),
                (LATER, DEVICE, LACKS_BLOCKS, 7, 2),
                (*CROWDED, ops.swap(1, "host"), ops.admit(3, prompt(7, seed=2, extra=0))),
                waits=True,
            ),
            "headroom": Refusal(
                ops.swap(1, "device"),
                (LATER, DEVICE, LACKS_HEADROOM, 4, 3),
                (
                    ops.admit(1, prompt(4, extra=0)),
                    ops.swap(1, "host"),
                    ops.admit(2, prompt(9, seed=1, extra=0)),
                ),
                {"watermark": 0.25},
                waits=True,
            ),
            "quota": Refusal(
                ops.swap(1, "device"),
                (LATER, DEVICE, LACKS_QUOTA, 3, 2),
                (ops.admit(1, prompt(2)), ops.swap(1, "host"), ops.admit(2, prompt(1, seed=1))),
                {"max_tenant_blocks": 4},
            ),
        },
        (*ADMITTED, ops.swap(1, "host")),
    ),
    "pin": Row(
        ops.pin([1, 2, 3], [PROMPT, PROMPT[:9], [9] * BLOCK]),
        3,
        {"num_pinned_blocks": int32(2, 1, 0)},
        {
            "no id": Refusal(ops.pin(0, [RETAINED]), (InvalidRequestError, "pin_ids[0]")),
            "live": Refusal(
                ops.pin(1, [RETAINED]),
                (SequenceExistsError, "pin_ids[0]"),
                (*MIXED, ops.pin(1, [RETAINED])),
            ),
            "no token": Refusal(ops.pin(1, [[]]), (InvalidRequestError, "num_tokens[0]")),
            "negative": Refusal(ops.pin(1, [[-1]]), (InvalidRequestError, "token_ids")),
            "too many": Refusal(
                ops.pin(1, [RETAINED]),
                (QuotaExceededError, "pin_ids[0]"),
                settings={"max_pinned_blocks": 1},
            ),
            "headroom": Refusal(
                ops.pin(1, [RETAINED]),
                (LATER, DEVICE, LACKS_HEADROOM, 2, 1),
                (ops.admit(3, RETAINED), ops.free(3), ops.admit(1, prompt(2, seed=1))),
                {"watermark": 0.75},
            ),
            "quota": Refusal(
                ops.pin(1, [RETAINED]),
                (LATER, DEVICE, LACKS_QUOTA, 2, 0),
                (*MIXED, ops.admit(4, prompt(3, seed=4))),
                {"max_tenant_blocks": 6},
            ),
        },
    ),
    "unpin": Row(
        ops.unpin([1, 7]),
        2,
        {},
        {
            "no whole id": Refusal(
                pb.Operation(unpin=pb.Unpin(pin_ids=b"1")), (InvalidRequestError, "pin_ids")
            )
        },
        (*ADMITTED, ops.pin(1, [PROMPT])),
    ),
}


def operation_of(row: str) -> str:
    """Return the operation that the row is of."""
    return row.partition(" ")[0]


def test_no_table_lacks_an_operation() -> None:
    in_contract = {each.name for each in pb.Operation.DESCRIPTOR.oneofs[0].fields}
    assert OPERATIONS.keys() == in_contract
    assert OPERATIONS.keys() == {operation_of(row) for row in ROWS}
    for name, operation in OPERATIONS.items():
        assert operation.name == name
        assert callable(getattr(ops, name))
    for name, row in ROWS.items():
        for each in (row.done, *(refusal.operation for refusal in row.refusals.values())):
            assert each.WhichOneof("operation") == operation_of(name)


def without_grant(result: pb.OperationResult) -> pb.OperationResult:
    copy = pb.OperationResult()
    copy.CopyFrom(result)
    copy.ClearField("pin_grant")
    return copy


async def checked(caller: Caller, operation: pb.Operation) -> pb.OperationResult:
    """Return the answer of a check, which must have changed nothing."""
    before = caller.world.state()
    (result,) = outcomes(await caller.session.validate([operation]))
    assert caller.world.state() == before
    return result


async def repeat(caller: Caller, operation: pb.Operation, result: StepResult) -> None:
    """Assert that the last step, sent again by a unary call, is answered as before and changes
    nothing.
    """
    before = caller.world.state()
    session = caller.session
    step = pb.StepRequest(session=session._ref, number=session.last_number, operations=[operation])
    again = await caller.world.stub.Step(step)
    assert outcomes(again) == outcomes(result)
    assert StepResult(again).plan == result.plan
    assert again.revision == result.revision
    assert caller.world.state() == before


@pytest.mark.parametrize("name", ROWS)
async def test_an_operation_is_done_and_counted_and_its_repeat_is_answered_the_same(
    world, caller, name
) -> None:
    row = ROWS[name]
    for operation in row.before:
        await caller.do(operation)
    answer, name = pb.OperationResult(**row.answer), operation_of(name)
    is_answered = OPERATIONS[name].is_checked_with_answer
    assert await checked(caller, row.done) == (answer if is_answered else pb.OperationResult())
    counted = world.server.metrics.operations
    before = counted.values.get((name, "ok"), 0)
    result = await caller.session.step([row.done])
    (done,) = outcomes(result)
    assert done.HasField("pin_grant") == (name == "pin")
    assert without_grant(done) == answer
    assert counted.values[name, "ok"] - before == row.num_items
    await repeat(caller, row.done, result)
    world.server.core.check_integrity()


REFUSALS: Final = {
    f"{name}: {why}": refusal for name, row in ROWS.items() for why, refusal in row.refusals.items()
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_a_refusal_is_foreseen_by_a_check_and_changes_nothing(start_world, name) -> None:
    refusal = REFUSALS[name]
    world = await start_world(**refusal.settings)
    caller = await world.caller()
    for operation in refusal.before:
        await caller.do(operation)
    await caller.retain(RETAINED, time_to_live_s=60.0, priority=90)
    check = await checked(caller, refusal.operation)
    (failure,) = await caller.refuse(refusal.operation)
    assert_said(failure, refusal)
    for each in (*check.failures, failure):
        each.error.ClearField("request_id")  # each is of its own call
    assert list(check.failures) == [failure]
    world.server.core.check_integrity()


def assert_said(failure: pb.ItemFailure, refusal: Refusal) -> None:
    error, shortage = ItemFailure.from_proto(failure).error, failure.shortage
    if len(refusal.why) == 2:
        kind, at = refusal.why
        path = f"operations[0].{refusal.operation.WhichOneof('operation')}.{at}"
        assert (failure.status, type(error), error.field) == (FAILED, kind, path), repr(error)
        return
    lacks = shortage.num_blocks_needed, shortage.num_blocks_available
    assert (failure.status, shortage.tier, shortage.reason, *lacks) == refusal.why
    is_later = failure.status == LATER
    assert type(error) is (PoolFullError if is_later else NeverFitsError)
    assert shortage.HasField("retry_delay") == (is_later and not refusal.waits)
    assert shortage.queue_position == refusal.waits


async def test_what_is_no_operation_here_is_refused(caller) -> None:
    (failure,) = await caller.refuse(pb.Operation())
    assert (type(ItemFailure.from_proto(failure).error), failure.error.field) == (
        InvalidRequestError,
        "operations[0]",
    )
