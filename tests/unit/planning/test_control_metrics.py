"""Operations are counted item by item, by what came of each."""

from __future__ import annotations

from control_plane.server.metrics import ControlPlaneMetrics
from control_plane.steps.answers import StepAnswer
from control_plane.steps.operations import read_operations
from kvplane.wire import columns
from kvplane.wire.columns import INT64
from kvplane.wire.v1 import session_pb2 as pb

THREE = columns.pack(INT64, [1, 2, 3])


def failures(*statuses: pb.OperationStatus) -> list[pb.ItemFailure]:
    return [pb.ItemFailure(item=i, status=status) for i, status in enumerate(statuses)]


def test_items_are_counted_by_operation_and_status() -> None:
    metrics = ControlPlaneMetrics(5)
    operations = [
        pb.Operation(append=pb.Append(sequence_ids=THREE)),
        pb.Operation(append=pb.Append(sequence_ids=THREE[:9])),
        pb.Operation(swap_out=pb.SwapOut(sequence_ids=THREE)),
        pb.Operation(admit=pb.Admit()),
        pb.Operation(),
    ]
    never, later = pb.OPERATION_STATUS_NEVER, pb.OPERATION_STATUS_LATER
    failed = pb.OPERATION_STATUS_FAILED
    results = [
        pb.OperationResult(append=pb.AppendResult(), failures=failures(later)),
        pb.OperationResult(failures=failures(failed)),
        pb.OperationResult(swap_out=pb.SwapResult()),
        pb.OperationResult(failures=failures(never)),
        pb.OperationResult(failures=failures(failed)),
    ]
    metrics.count_step(StepAnswer(b"", 0, read_operations(operations, 99), results), 0.25)
    counted = metrics.operations.values
    assert counted == {
        ("append", "ok"): 2,
        ("append", "later"): 1,
        ("append", "failed"): 1,
        ("swap_out", "ok"): 1,
        ("admit", "never"): 1,
        ("none", "failed"): 1,
    }
    assert metrics.registry.get_sample_value("kvplane_step_duration_seconds_sum") == 0.25
    assert metrics.num_plans == 0
