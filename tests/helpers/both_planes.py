"""Both planes in this process, a small pool on them, and made-up tensors for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_plane.server.server import DataPlaneServer
from kvplane import Execution, LayerGroup, Layout, Session, Tensor
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.sharded_pool import ShardedPool

LAYOUT = Layout("m", 8, "float32", "float32", (LayerGroup("full", (0, 1, 2), 1, 8),))
POOL = "default"


class Planes(ShardedPool):
    """A control plane and one data plane."""

    def __init__(self, folder: Path, layout: Layout = LAYOUT, **settings: Any) -> None:
        super().__init__(folder, [{}], layout, POOL, **settings)

    @property
    def data(self) -> DataPlaneServer:
        return self.planes[0]


async def run_step(session: Session, execution: Execution, *operations: pb.Operation) -> None:
    """Run a step and its plan, and submit the receipt."""
    result = (await session.step(operations)).raise_for_status()
    await execution.start(result.plan)
    for layer in [] if execution.has_run else execution.layers:
        await execution.layer(layer, *3 * [zeros(execution.num_tokens)])
    add_receipts(session, execution)


def add_receipts(session: Session, execution: Execution) -> None:
    """Add the receipts of an execution that ``DataClient.open`` made."""
    assert execution.has_run
    for receipt in execution.receipts:
        session.add_receipt(receipt)


def zeros(num_tokens: int) -> Tensor:
    """Return queries, keys or values."""
    shape = (num_tokens, 1, 8)
    return Tensor("float32", shape, bytes(Tensor.size_bytes("float32", shape)))
