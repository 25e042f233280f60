"""One row an operation: the contract, the core's table, the builders and this table have the same,
and each row is done, counted, checked and refused over a socket as its class says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pytest

from control_plane.server.server import ControlPlaneServer
from control_plane.steps.operations import OPERATIONS
from kvplane import ops
from kvplane.v1 import control_pb2 as pb
from tests.helpers.planning.control_wire import RawSession

PROMPT: Final = list(range(1, 21))  # 2 full blocks of 8 tokens and a part of one
ADMITTED: Final = (ops.admit(1, PROMPT), ops.admit(2, PROMPT[:9]))


@dataclass(frozen=True)
class Row:
    """``done``: can be done after the steps ``before``, and is answered by ``num_items``.
    ``refused``: cannot, because of ``field``.
    """

    done: pb.Operation
    num_items: int
    refused: pb.Operation
    field: str
    before: tuple[pb.Operation, ...] = ADMITTED


ROWS: Final = {
    "admit": Row(ops.admit(3, PROMPT, fork_sequence_ids=[4]), 1, ops.admit(0, [1]), "sequence_id"),
    "append": Row(
        ops.appends([1, 2], [20, 9], [1, 1], [1, 1], [5, 6]),
        2,
        ops.append(9, [1], first_position=0),
        "sequence_ids[0]",
    ),
    "fork": Row(ops.forks([1, 1], [3, 4]), 2, ops.fork(9, 3), "parent_sequence_ids[0]"),
    "free": Row(ops.free([1, 2]), 2, ops.free([9]), "sequence_ids[0]"),
    "truncate": Row(ops.truncates([1, 2], [20, 8]), 2, ops.truncate(9, 1), "sequence_ids[0]"),
    "swap_out": Row(ops.swap_out([1, 2]), 1, ops.swap_out([]), "sequence_ids"),
    "swap_in": Row(
        ops.swap_in([1]), 1, ops.swap_in([2]), "sequence_ids[0]", (*ADMITTED, ops.swap_out([1]))
    ),
    "retain": Row(
        ops.retain(PROMPT, time_to_live_s=60.0),
        1,
        ops.retain(PROMPT, time_to_live_s=0.0),
        "time_to_live",
    ),
    "release": Row(ops.release(PROMPT), 1, ops.release([]), "token_ids"),
    "forget": Row(ops.forget(PROMPT[:8], force=True), 1, ops.forget(PROMPT[:7]), "token_ids"),
}


def in_contract(message: type[pb.Operation | pb.OperationResult], oneof: str) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.oneofs_by_name[oneof].fields}


def test_no_table_lacks_an_operation() -> None:
    operations = in_contract(pb.Operation, "operation")
    assert in_contract(pb.OperationResult, "done") == operations
    assert OPERATIONS.keys() == ROWS.keys() == operations
    for name, operation in OPERATIONS.items():
        assert operation.name == name
        built = getattr(ops, name)
        assert callable(built)
    for name, row in ROWS.items():
        assert row.done.WhichOneof("operation") == row.refused.WhichOneof("operation") == name


async def ready(session: RawSession, row: Row) -> None:
    for operation in row.before:
        result = await session.step(operation)
        assert not result.results[0].failures


async def checked(session: RawSession, operation: pb.Operation) -> pb.OperationResult:
    request = pb.CheckOperationsRequest(session=session.ref, operations=[operation])
    await session.submit()
    (result,) = (await session.stub.CheckOperations(request)).results
    return result


@pytest.mark.parametrize("name", ROWS)
async def test_an_operation_is_done_and_counted(
    session: RawSession, control_server: ControlPlaneServer, name: str
) -> None:
    row = ROWS[name]
    await ready(session, row)
    result = await checked(session, row.done)
    assert not result.failures
    assert result.WhichOneof("done") == (name if OPERATIONS[name].is_checked_with_answer else None)
    counted = control_server.metrics.operations
    before = counted.values.get((name, "ok"), 0)
    (done,) = (await session.step(row.done)).results
    assert not done.failures
    assert done.WhichOneof("done") == name
    assert counted.values[name, "ok"] - before == row.num_items
    control_server.core.check_integrity()


@pytest.mark.parametrize("name", ROWS)
async def test_an_operation_is_refused_as_its_check_says(
    session: RawSession, control_server: ControlPlaneServer, name: str
) -> None:
    row = ROWS[name]
    await ready(session, row)
    answer = await checked(session, row.refused)
    (refused,) = (await session.step(row.refused)).results
    for result in (answer, refused):
        (failure,) = result.failures
        assert failure.status == pb.OPERATION_STATUS_FAILED
        assert failure.error.field == f"operations[0].{name}.{row.field}"
    assert answer.failures[0].error.reason == refused.failures[0].error.reason
    control_server.core.check_integrity()
