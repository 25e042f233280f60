"""Both planes in this process with a pool of two layer groups, one of them with a window, and an
engine that knows what every slot must hold: a number that follows from the tokens up to it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import torch
from kvplane_blocks import Pool

from control_plane import queries
from control_plane.config import CoreConfig
from control_plane.core import ControlPlane
from control_plane.sessions.session import Session
from data_plane import Executor
from kvplane.layout import LayerGroup
from kvplane.results import SequenceState
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.data.plan_author import LAYOUT
from tests.helpers.planning.registration_messages import hello

BLOCK, WINDOW, TENANT, POOL = 8, 20, "tenant", "pool"
GROUPS = (
    LayerGroup("full", (0, 2), 2, 16),
    LayerGroup("window", (1, 3), 1, 8, sliding_window_tokens=WINDOW),
)
TWO_GROUPS = replace(LAYOUT, groups=GROUPS)


def value_of(tokens: Sequence[int], end: int) -> int:
    """Return the value in the slot of token ``end - 1``."""
    return zlib.crc32(columns.pack(INT32, tokens[:end])) % 2**20


class World:
    """One control plane, one data plane, one session."""

    def __init__(
        self,
        device: tuple[int, int] = (16, 12),
        host: tuple[int, int] = (6, 4),
        *,
        max_tenant_blocks: int = 0,
    ) -> None:
        self.blocks = device, host
        self.config = CoreConfig(
            lease_s=1e9,
            max_plans_in_flight=3,
            watermark=0.0,
            max_tenant_blocks=max_tenant_blocks,
        )
        self.executor = Executor(
            TWO_GROUPS,
            pool_id=POOL,
            num_device_blocks=device,
            num_host_blocks=host,
            num_threads=1,
            epoch=1,
        )
        self.seen: Counter[str] = Counter()
        self.sequences: dict[int, list[int]] = {}
        self.incarnation = 0
        self.restart_control()

    def restart_control(self) -> None:
        """Start a control plane, which learns the pool from its data plane, and a new session."""
        self.incarnation += 1
        self.core = ControlPlane(
            incarnation=self.incarnation, config=self.config, clock=lambda: 1.0
        )
        (device, host), executor = self.blocks, self.executor
        groups = [
            rpb.GroupBlocks(num_device_blocks=d, num_host_blocks=h)
            for d, h in zip(device, host, strict=True)
        ]
        said = hello(
            shard=executor.shard.to_proto(),
            epoch=executor.epoch,
            layout=TWO_GROUPS.to_proto(),
            num_device_blocks=device[0],
            num_host_blocks=host[0],
            groups=groups,
            incarnation=executor.incarnation,
            key_id=executor.key_id,
        )
        executor.install(self.incarnation, self.core.register(said).key)
        for part in executor.report(3):
            self.core.report(POOL, 0, executor.epoch, part)
        request = cpb.OpenSessionRequest(pool_id=POOL, layout=TWO_GROUPS.to_proto())
        opened = self.core.open_session(request, TENANT)
        self.session, self.number = opened.session, 0
        executor.open(opened.grant)
        self.sequences.clear()
        self.receipts: list[tpb.SignedPayload] = []
        self.pool = self.core._pools[POOL]

    @property
    def of_session(self) -> Session:
        return self.core.sessions.by_id[self.session.session_id]

    def step(self, *operations: cpb.Operation, num_receipts: int = 9) -> cpb.StepResponse:
        """Run a step and its plan. ``num_receipts``: submitted first."""
        self.number += 1
        given, self.receipts = self.receipts[:num_receipts], self.receipts[num_receipts:]
        request = cpb.StepRequest(
            session=self.session, number=self.number, operations=operations, receipts=given
        )
        result = self.core.step(request, TENANT)
        self.believe(operations, result)
        if result.HasField("plan"):
            self.run(result.plan)
        self.deliver()
        return result

    def believe(self, operations: Sequence[cpb.Operation], result: cpb.StepResponse) -> None:
        """Note the tokens of sequences after a step."""
        for operation, done in zip(operations, result.results, strict=True):
            kind = operation.WhichOneof("operation")
            message = getattr(operation, kind)
            refused = {failure.item for failure in done.failures}
            is_done = not refused
            self.seen[f"{kind} {'done' if is_done else 'refused'}"] += 1
            if kind == "admit":
                if done.HasField("admit"):
                    tokens = list(columns.read(INT32, message.token_ids, ""))
                    self.sequences[message.sequence_id] = tokens
                    self.seen["hits"] += done.admit.num_cached_tokens > 0
                continue
            if kind == "swap":
                continue
            ids = columns.read(INT64, message.sequence_ids, "")
            begin = 0
            for item, sequence_id in enumerate(ids):
                if kind == "append":
                    num = columns.read(INT32, message.num_tokens, "")[item]
                    given = columns.read(INT32, message.token_ids, "")[begin : begin + num]
                    begin += num
                if item in refused:
                    continue
                if kind == "append":
                    self.sequences[sequence_id] = [*self.sequences[sequence_id], *given]
                elif kind == "fork":
                    parent = columns.read(INT64, message.parent_sequence_ids, "")[item]
                    self.sequences[sequence_id] = list(self.sequences[parent])
                elif kind == "free":
                    del self.sequences[sequence_id]
                elif kind == "truncate":
                    keep = columns.read(INT32, message.num_tokens, "")[item]
                    del self.sequences[sequence_id][keep:]

    def run(self, plan: tpb.SignedPayload) -> None:
        """Run a plan: give each slot that it computes its value."""
        executor, session_id = self.executor, self.session.session_id
        started = executor.start(session_id, plan)
        spans = plan_pb2.Plan.FromString(plan.payload).spans
        values = [
            value_of(self.sequences[sequence_id], first + i + 1)
            for sequence_id, first, num in zip(
                columns.read(INT64, spans.sequence_ids, ""),
                columns.read(INT32, spans.first_positions, ""),
                columns.read(INT32, spans.num_tokens, ""),
                strict=True,
            )
            for i in range(num)
        ]
        receipt = started.receipt
        if values:
            for layer in executor.layers:
                group = next(g for g in GROUPS if layer in g.layers)
                shape = len(values), group.num_kv_heads, group.head_size
                key = torch.tensor(values, dtype=torch.float32)[:, None, None].expand(shape) + layer
                named = of_latest(executor, session_id)
                executor.layer(session_id, layer, None, key.contiguous(), -key, **named)
            receipt = executor.receipt(session_id)
        assert receipt is not None
        self.receipts.append(receipt)

    def abort(self) -> None:
        """Abort all plans without receipts; sequences keep written tokens."""
        self.number += 1
        self.receipts.clear()
        request = cpb.AbortPlansRequest(
            session=self.session, number=self.number, plan_number=min(self.of_session.plans)
        )
        self.core.abort_plans(request, TENANT)
        self.seen["aborts"] += 1
        for state in self.states():
            del self.sequences[state.sequence_id][state.num_tokens :]
        self.deliver()

    def deliver(self) -> None:
        """Deliver the control plane's messages to the data plane."""
        for message in self.core.take_outgoing(POOL, 0):
            if message.HasField("publish"):
                self.executor.publish(message.publish.publications)
            elif message.HasField("withdraw"):
                self.executor.withdraw(message.withdraw)

    def states(self) -> list[SequenceState]:
        return SequenceState.all_from_proto(queries.states(self.of_session))

    def tables(self, sequence_id: int) -> list[tpb.Blocks]:
        request = cpb.ListSequencesRequest(
            session=self.session,
            sequence_ids=columns.pack(INT64, [sequence_id]),
            with_tables=True,
        )
        return list(queries.list_sequences(self.of_session, request).tables)

    def check(self) -> None:
        """Check the planes' own invariants, and that the groups are in step with right values."""
        self.core.check_integrity()
        self.executor.check_integrity()
        handle = self.of_session.handle
        for core in self.pool.groups[1:]:
            events = Pool([core]).take_family_events(handle)
            assert not events, "the first group tells for all"
        states = [core.states(handle, None) for core in self.pool.groups]
        assert all(other == states[0] for other in states), "the groups are out of step"
        for state in self.states():
            tokens = self.sequences[state.sequence_id]
            assert state.num_tokens == len(tokens)
            if state.num_written_tokens < state.num_scheduled_tokens or self.receipts:
                continue  # the data plane may be ahead
            for group, table in enumerate(self.tables(state.sequence_id)):
                self.check_table(state, group, table)

    def check_table(self, state: SequenceState, group: int, table: tpb.Blocks) -> None:
        indices = columns.read(INT32, table.indices, "").tolist()
        tokens = self.sequences[state.sequence_id]
        num_trimmed = indices.count(-1)
        window = GROUPS[group].sliding_window_tokens
        num_gone = max(0, state.num_written_tokens - window + 1) // BLOCK if window else 0
        assert num_trimmed <= num_gone, "a block that a position sees was freed"
        self.seen["trimmed"] += num_trimmed > 0
        num_blocks = -(-state.num_written_tokens // BLOCK) - num_trimmed  # others may be to come
        if self.of_session.resync_due or num_blocks <= 0:
            return
        blocks, _ = self.executor.read_blocks(
            self.session.session_id,
            state.sequence_id,
            range(num_trimmed, num_trimmed + num_blocks),
            group=group,
        )
        end = min(state.num_written_tokens, len(tokens))
        for layer, of_layer in zip(GROUPS[group].layers, blocks.numpy(), strict=True):
            keys = of_layer[:, 0, 0, :, 0].reshape(-1)
            begin = num_trimmed * BLOCK
            wanted = [value_of(tokens, i + 1) + layer for i in range(begin, end)]
            assert np.array_equal(keys[: len(wanted)], wanted), (state.sequence_id, group, layer)
        self.seen["tables checked"] += 1

    def prompt(self, rng: Random, num_tokens: int) -> list[int]:
        """Return a prompt that begins as others do."""
        seed = rng.randrange(2)
        branch = rng.choice((0, 8, 16, 24, 40))
        return [(seed * 100 + i) if i < branch else rng.randrange(1000) for i in range(num_tokens)]
