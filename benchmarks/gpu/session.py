"""An executor with one session, whose plans this file signs itself, without a control plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from data_plane import Executor
from data_plane.kernels.backend import Kernels
from kvplane.layout import Layout
from kvplane.wire import columns, signing
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.protocol import NEWEST_PAYLOAD_VERSION
from kvplane.wire.v1 import types_pb2 as pb

POOL_ID: Final = "benchmark"
SESSION: Final = pb.SessionRef(incarnation=1, session_id=1)


class Session:
    """Sequences 1 to ``batch`` have tables for ``tokens`` tokens each. Blocks hold whatever was in
    memory.
    """

    def __init__(
        self, layout: Layout, batch: int, tokens: int, device: torch.device, kernels: Kernels | None
    ) -> None:
        self._of_table = -(-tokens // layout.block_size_tokens)
        self._batch = batch
        self.executor = Executor(
            layout,
            pool_id=POOL_ID,
            num_device_blocks=batch * self._of_table,
            device=device,
            kernels=kernels,
        )
        self._key = signing.new_key()
        self.number = 0
        """The number of the plan that was started last."""
        self.executor.install(SESSION.incarnation, self._key)
        grant = plan_pb2.SessionGrant(
            **self._heading(),
            ordinal=1,
            tenant="default",
            layout_fingerprint=layout.fingerprint,
            max_plans_in_flight=1,
        )
        self.executor.open(self._sign(signing.GRANT, grant.SerializeToString()))

    def start(self, positions: Sequence[int]) -> None:
        """Start a plan that computes the token at one position of each sequence. The first plan
        makes the tables; their blocks hold whatever was in memory.
        """
        self.number += 1
        ids = range(1, self._batch + 1)
        plan = plan_pb2.Plan(
            **self._heading(),
            number=self.number,
            previous=self.number - 1,
            changes=self._tables() if self.number == 1 else plan_pb2.TableChanges(),
            spans=plan_pb2.Spans(
                sequence_ids=columns.pack(columns.INT64, ids),
                first_positions=columns.pack(columns.INT32, positions),
                num_tokens=columns.pack(columns.INT32, [1] * self._batch),
            ),
        )
        signed = self._sign(signing.PLAN, plan.SerializeToString())
        self.executor.start(SESSION.session_id, signed)

    def _heading(self) -> dict[str, Any]:
        return {
            "version": NEWEST_PAYLOAD_VERSION,
            "session": SESSION,
            "pool_id": POOL_ID,
            "shard_epochs": [self.executor.epoch],
        }

    def _tables(self) -> plan_pb2.TableChanges:
        batch, total = self._batch, self._batch * self._of_table
        return plan_pb2.TableChanges(
            kinds=columns.pack(columns.UINT8, [plan_pb2.TABLE_CHANGE_KIND_SET] * batch),
            sequence_ids=columns.pack(columns.INT64, range(1, batch + 1)),
            tiers=columns.pack(columns.UINT8, [pb.TIER_DEVICE] * batch),
            first_blocks=columns.pack(columns.INT32, [0] * batch),
            num_blocks=columns.pack(columns.INT32, [self._of_table] * batch),
            indices=columns.pack(columns.INT32, range(total)),
            generations=columns.pack(columns.INT64, [1] * total),
            allocated=columns.pack(columns.UINT8, [1] * total),
        )

    def _sign(self, tag: str, payload: bytes) -> pb.SignedPayload:
        signature = signing.sign(self._key, tag, payload)
        return pb.SignedPayload(type=tag, payload=payload, signature=signature)
