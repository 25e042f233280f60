"""Operations are counted item by item, by what came of each."""

from __future__ import annotations

from control_plane.server.metrics import ControlPlaneMetrics
from control_plane.steps.answers import StepAnswer
from control_plane.steps.operations import read_operations
from kvplane.wire import columns
from kvplane.wire.columns import INT64
from kvplane.wire.v1 import session_pb2 as pb

THREE = columns.pack(INT64, [1, 2, 3])


def failures(*statuses: pb.ItemStatus) -> list[pb.ItemFailure]:
    return [pb.ItemFailure(item=i, status=status) for i, status in enumerate(statuses)]


def test_items_are_counted_by_operation_and_status() -> None:
    metrics = ControlPlaneMetrics(5)
    operations = [
        pb.Operation(append=pb.Append(sequence_ids=THREE)),
        pb.Operation(append=pb.Append(sequence_ids=THREE[:9])),
        pb.Operation(swap=pb.Swap(sequence_ids=THREE)),
        pb.Operation(admit=pb.Admit()),
        pb.Operation(),
    ]
    never, later = pb.ITEM_STATUS_NEVER, pb.ITEM_STATUS_LATER
    failed = pb.ITEM_STATUS_FAILED
    results = [
        pb.OperationResult(num_table_blocks=bytes(12), failures=failures(later)),
        pb.OperationResult(failures=failures(failed)),
        pb.OperationResult(num_swapped_blocks=1),
        pb.OperationResult(failures=failures(never)),
        pb.OperationResult(failures=failures(failed)),
    ]
    answer = StepAnswer(b"", 0, read_operations(operations, 99), results)
    metrics.count_step(answer, "search", 0.25)
    counted = metrics.operations.values
    assert counted == {
        ("append", "ok"): 2,
        ("append", "later"): 1,
        ("append", "failed"): 1,
        ("swap", "ok"): 1,
        ("admit", "never"): 1,
        ("none", "failed"): 1,
    }
    assert metrics.tenant_items.values == {
        ("search", "ok"): 3,
        ("search", "later"): 1,
        ("search", "never"): 1,
        ("search", "failed"): 2,
    }
    assert metrics.registry.get_sample_value("kvplane_step_duration_seconds_sum") == 0.25
    assert metrics.num_plans == 0
