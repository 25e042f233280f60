"""Pools of two layer groups, one of them with a window, through both planes: whatever is done, the
groups stay in step, and each holds what the tokens say as far back as its window reaches.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from kvplane_blocks import Pool

from control_plane import queries
from data_plane import Executor
from kvplane import ops
from kvplane.layout import LayerGroup
from kvplane.results import SequenceState, sequence_states
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_data_plane import Plane
from tests.helpers.core.core_messages import BLOCK, HOST, POOL, spans_of
from tests.helpers.core.core_model import Engine, World
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.planning.registration_messages import LAYOUT

WINDOW = 20
GROUPS = (
    LayerGroup("full", (0, 2), 2, 16),
    LayerGroup("window", (1, 3), 1, 8, sliding_window_tokens=WINDOW),
)


def value_of(tokens: Sequence[int], end: int) -> int:
    """Return the value in the slot of token ``end - 1``."""
    return zlib.crc32(columns.pack(INT32, tokens[:end])) % 2**20


class MemoryPlane(Plane):
    """A data plane with memory. Each slot gets a number that follows from the tokens up to it."""

    def __init__(self, world: World, **fields: Any) -> None:
        super().__init__(world, **fields)
        groups = self.hello.groups
        self.executor = Executor(
            world.layout,
            pool_id=POOL,
            num_device_blocks=tuple(group.num_device_blocks for group in groups),
            num_host_blocks=tuple(group.num_host_blocks for group in groups),
            num_threads=1,
            epoch=self.epoch,
        )
        self.tokens: dict[int, list[int]] = {}
        """Those of the present session's sequences."""
        self.seen: Counter[str] = Counter()

    def register(self, **changes: Any) -> rpb.Welcome:
        welcome = super().register(**changes)
        self.executor.install(welcome.incarnation, welcome.key)
        return welcome

    def report_all(self) -> None:
        for part in self.executor.report(3):
            self.report(part)

    def obey(self, message: rpb.RegisterResponse) -> None:
        super().obey(message)
        if message.HasField("publish"):
            self.executor.publish(message.publish.publications)
        elif message.HasField("withdraw"):
            self.executor.withdraw(message.withdraw)

    def run(self, signed: tpb.SignedPayload) -> bool:
        plan = plan_pb2.Plan.FromString(signed.payload)
        session_id = plan.session.session_id
        self.last_receipt = self.executor.start(session_id, signed).receipt
        values = [
            value_of(self.tokens[span.sequence_id], span.first_position + i + 1)
            for span in spans_of(plan)
            for i in range(span.num_tokens)
        ]
        if not values:
            return True
        for layer in self.executor.layers:
            group = next(group for group in GROUPS if layer in group.layers)
            shape = len(values), group.num_kv_heads, group.head_size
            key = torch.tensor(values, dtype=torch.float32)[:, None, None].expand(shape) + layer
            named = of_latest(self.executor, session_id)
            self.executor.layer(session_id, layer, None, key.contiguous(), -key, **named)
        self.last_receipt = self.executor.receipt(session_id)
        return True

    def receipt(self, plan: tpb.SignedPayload) -> tpb.SignedPayload:
        assert self.last_receipt is not None
        return self.last_receipt


class Caller(Engine):
    """An engine that knows the tokens of its sequences; its plans run at once."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "tenant")
        (self.plane,) = world.shards
        self.plane.executor.open(self.opened.grant)
        self.seen = self.plane.seen
        self.sequences: dict[int, list[int]] = {}
        self.plane.tokens = self.sequences

    @classmethod
    def of(cls, device: tuple[int, int], host: tuple[int, int] = (6, 4), **settings: Any) -> Caller:
        """Return the only engine of a new world with these blocks of each group."""
        layout = replace(LAYOUT, groups=GROUPS)
        return cls(
            World(
                num_device=device,
                num_host=host,
                layout=layout,
                plane=MemoryPlane,
                lease_s=1e9,
                max_plans_in_flight=3,
                **settings,
            )
        )

    def restarted(self) -> Caller:
        """Return the engine of a new control plane, which learns the pool from its data plane."""
        self.world.restart_control_plane()
        return Caller(self.world)

    def take(self, *operations: cpb.Operation, num_receipts: int = 9) -> cpb.StepResponse:
        """Take a step with the first receipts at hand, and run its plan."""
        given, self.receipts = self.receipts[:num_receipts], self.receipts[num_receipts:]
        answer = self.step(*operations, receipts=given)
        for operation, result in zip(operations, answer.results, strict=True):
            self.believe(operation, result)
        self.run_all()
        self.world.pump()
        return answer

    def believe(self, operation: cpb.Operation, result: cpb.OperationResult) -> None:
        """Note the tokens of sequences after an operation, of one item if it can fail."""
        kind = operation.WhichOneof("operation")
        self.seen[f"{kind} {'refused' if result.failures else 'done'}"] += 1
        message = getattr(operation, kind)
        if result.failures or kind == "swap":
            return
        if kind == "admit":
            self.sequences[message.sequence_id] = list(columns.read(INT32, message.token_ids, ""))
            self.seen["hits"] += result.admit.num_cached_tokens > 0
            return
        for sequence_id in columns.read(INT64, message.sequence_ids, ""):
            if kind == "append":
                self.sequences[sequence_id] += columns.read(INT32, message.token_ids, "")
            elif kind == "fork":
                (parent,) = columns.read(INT64, message.parent_sequence_ids, "")
                self.sequences[sequence_id] = list(self.sequences[parent])
            elif kind == "free":
                del self.sequences[sequence_id]
            else:
                (num_kept,) = columns.read(INT32, message.num_tokens, "")
                del self.sequences[sequence_id][num_kept:]

    def abort_all(self) -> None:
        """Abort all plans without receipts; sequences keep written tokens."""
        self.receipts.clear()
        self.abort(min(self.session.plans))
        self.seen["aborts"] += 1
        for state in self.states():
            del self.sequences[state.sequence_id][state.num_tokens :]
        self.world.pump()

    def states(self) -> list[SequenceState]:
        return sequence_states(queries.states(self.session))

    def columns_of(self, sequence_id: int) -> list[list[int]]:
        """Return the indices of the blocks of a sequence, of each group; -1 for one trimmed."""
        tables = self._about(sequence_id, with_tables=True).tables
        return [columns.read(INT32, table.indices, "").tolist() for table in tables]

    def usages(self) -> list[Any]:
        return [core.usage(1) for core in self.world.pool.groups]

    def held(self) -> list[int]:
        """Return the device blocks that are held, of each group."""
        return [self.world.usage(group=group)["held"] for group in (0, 1)]

    def check(self) -> None:
        """Check the planes' own invariants, and that the groups are in step with right values."""
        self.world.core.check_integrity()
        self.plane.executor.check_integrity()
        session, groups = self.session, self.world.pool.groups
        for core in groups[1:]:
            events = Pool([core]).take_family_events(session.handle)
            assert not events, "the first group tells for all"
        states = [core.states(session.handle, None) for core in groups]
        assert all(other == states[0] for other in states), "the groups are out of step"
        for state in self.states():
            assert state.num_tokens == len(self.sequences[state.sequence_id])
            if state.num_written_tokens < state.num_scheduled_tokens or self.receipts:
                continue  # the data plane may be ahead
            for group, indices in enumerate(self.columns_of(state.sequence_id)):
                self.check_table(state, group, indices)

    def check_table(self, state: SequenceState, group: int, indices: list[int]) -> None:
        tokens = self.sequences[state.sequence_id]
        num_trimmed = indices.count(-1)
        window = GROUPS[group].sliding_window_tokens
        num_gone = max(0, state.num_written_tokens - window + 1) // BLOCK if window else 0
        assert num_trimmed <= num_gone, "a block that a position sees was freed"
        self.seen["trimmed"] += num_trimmed > 0
        num_blocks = -(-state.num_written_tokens // BLOCK) - num_trimmed  # others may be to come
        if self.session.resync_due or num_blocks <= 0:
            return
        blocks, _ = self.plane.executor.read_blocks(
            self.id,
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


def prompt_of(rng: Random, num_tokens: int) -> list[int]:
    """Return a prompt that begins as others do."""
    seed = rng.randrange(2)
    branch = rng.choice((0, 8, 16, 24, 40))
    return [(seed * 100 + i) if i < branch else rng.randrange(1000) for i in range(num_tokens)]


def decode(caller: Caller, sequence_id: int, num: int) -> None:
    for _ in range(num):
        first = len(caller.sequences[sequence_id])
        result = caller.take(ops.append(sequence_id, [first % 7], 1, first_positions=first))
        assert not result.results[0].failures, result
        caller.check()


def test_a_group_with_a_window_gives_back_what_lies_behind_it() -> None:
    caller = Caller.of((16, 6))
    caller.take(ops.admit(1, range(40)))
    assert caller.held() == [5, 5]
    decode(caller, 1, 60)
    held = caller.held()
    assert held[0] == 13
    assert held[1] <= -(-WINDOW // BLOCK) + 2
    num_trimmed = [indices.count(-1) for indices in caller.columns_of(1)]
    assert num_trimmed[0] == 0 and num_trimmed[1] >= 9
    caller.take(ops.free([1]))
    caller.take()
    assert caller.held() == [0, 0]


def test_a_quota_holds_in_each_group() -> None:
    caller = Caller.of((16, 12), max_tenant_blocks=6)
    caller.take(ops.admit(1, range(33)))
    before = caller.usages()
    refused = caller.take(ops.admit(2, range(300, 317))).results[0].failures[0]
    assert refused.status == cpb.ITEM_STATUS_LATER
    assert refused.shortage.reason == cpb.SHORTAGE_REASON_QUOTA
    assert caller.usages() == before
    never = caller.take(ops.admit(2, range(300, 349))).results[0].failures[0]
    assert never.status == cpb.ITEM_STATUS_NEVER
    assert never.shortage.reason == cpb.SHORTAGE_REASON_QUOTA
    decode(caller, 1, 15)
    assert caller.held() == [6, 3], "the window's group has room for more"
    before = caller.usages()
    grown = caller.take(ops.append(1, [5], 1, first_positions=48)).results[0].failures[0]
    assert grown.status == cpb.ITEM_STATUS_NEVER
    assert grown.shortage.reason == cpb.SHORTAGE_REASON_QUOTA
    assert caller.usages() == before
    caller.check()


def test_an_abort_that_leaves_one_group_nothing_begins_again_in_all() -> None:
    caller = Caller.of((16, 12))
    prompt = list(range(57))
    caller.take(ops.admit(1, prompt[:25]))
    caller.take()  # three blocks are published
    caller.take(ops.admit(2, prompt))
    caller.take(ops.admit(3, [*prompt, 1]), num_receipts=0)  # shares what sequence 2 computes
    tables = caller.columns_of(3)
    assert [len(indices) for indices in tables] == [8, 8]
    assert tables[1][:4] == [-1] * 4
    caller.abort_all()
    states = {s.sequence_id: s.num_written_tokens for s in caller.states()}
    assert states == {1: 25, 2: 24, 3: 0}  # the window of the third sees what was never written
    caller.check()


def test_a_new_control_plane_finds_what_was_cached() -> None:
    caller = Caller.of((16, 12))
    prompt = list(range(41))
    caller.take(ops.admit(1, prompt))
    caller.take(ops.free([1]))
    caller.take()
    caller = caller.restarted()
    assert caller.take(ops.admit(1, prompt)).results[0].admit.num_cached_tokens == 40
    caller.check()


@pytest.mark.parametrize("seed", range(6))
def test_groups_stay_in_step(seed: int) -> None:
    walk(seed, 250)


def test_an_abort_leaves_no_group_with_more_published_than_written() -> None:
    """One group found a prefix that another had to wait for, and the plan was aborted."""
    walk(122, 1500)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 166))
def test_groups_stay_in_step_for_long(seed: int) -> None:
    walk(seed, 1500)


def walk(seed: int, num_steps: int) -> None:
    rng = Random(seed)
    device = rng.choice(((16, 12), (12, 12), (20, 8), (8, 16)))
    caller = Caller.of(device, rng.choice(((6, 4), (12, 12), (0, 0))))
    for _ in range(num_steps):
        dice = rng.random()
        if dice < 0.02 and caller.world.pool.native.plans_in_flight(caller.session.handle):
            caller.abort_all()
        elif dice < 0.03:
            caller = caller.restarted()
        else:
            caller.take(
                *operations(caller, rng),
                num_receipts=rng.choice((0, 1, 9, 9)) if len(caller.session.plans) < 2 else 9,
            )
        caller.check()
    if caller.sequences:
        caller.take(ops.free(list(caller.sequences)))
    caller.take()
    caller.check()
    assert caller.held() == [0, 0]
    for kind in (
        "admit done",
        "append done",
        "fork done",
        "truncate done",
        "free done",
        "hits",
        "trimmed",
        "tables checked",
    ):
        assert caller.seen[kind], (kind, caller.seen)


def operations(caller: Caller, rng: Random) -> list[cpb.Operation]:
    """One to three operations, on sequences that the others do not touch."""
    ids = list(caller.sequences)
    rng.shuffle(ids)
    made: list[cpb.Operation] = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.random()
        if kind < 0.25 or not ids:
            new = next(i for i in range(1, 99) if i not in caller.sequences)
            if any(op.HasField("admit") or op.HasField("fork") for op in made):
                continue
            num_compute = rng.choice((None, None, 8, 16))
            prompt = prompt_of(rng, rng.choice((5, 8, 16, 17, 24, 40, 41, 57)))
            made.append(ops.admit(new, prompt, num_compute_tokens=num_compute))
            continue
        sequence_id = ids.pop()
        num_tokens = len(caller.sequences[sequence_id])
        state = next(s for s in caller.states() if s.sequence_id == sequence_id)
        if kind < 0.65:
            first = state.num_scheduled_tokens
            num = rng.choice((1, 1, 1, 4, 9))
            num_new = max(0, first + num - num_tokens)
            tokens = [rng.randrange(1000) for _ in range(num_new)]
            made.append(ops.append(sequence_id, tokens, num, first_positions=first))
        elif kind < 0.75:
            new = next(i for i in range(1, 99) if i not in caller.sequences)
            if not any(op.HasField("admit") or op.HasField("fork") for op in made):
                made.append(ops.fork(sequence_id, new))
        elif kind < 0.82 and num_tokens:
            made.append(ops.truncate(sequence_id, rng.randint(max(1, num_tokens - 12), num_tokens)))
        elif kind < 0.92:
            made.append(ops.free([sequence_id]))
        elif state.tier == HOST:
            made.append(ops.swap([sequence_id], "device"))
        else:
            made.append(ops.swap([sequence_id], "host"))
    return made
