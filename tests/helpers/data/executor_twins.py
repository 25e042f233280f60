"""Two executors that run the same random plans: one on the CPU's kernels, one on others.

Two sessions take turns, layer by layer: they admit, extend, fork, swap out and in, and drop. Their
outputs and contents are compared whenever a plan has its receipt.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvplane.layout import Layout
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.data_rig import LAYERS, Rig
from tests.helpers.data.plan_author import (
    BLOCK_SIZE,
    DEVICE,
    HOST,
    LAYOUT,
    BlockRef,
    Change,
    Span,
    Transfer,
    drop,
    fork,
    ref,
    set_blocks,
    span,
    transfer,
)

NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 12, 8  # of each session
MAX_TOKENS = 2 * BLOCK_SIZE + 3
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 16


class Side(Rig):
    """One executor, with sessions 1 and 2."""

    def __init__(self, layout: Layout, **settings: Any) -> None:
        blocks = {
            "num_device_blocks": 2 * NUM_DEVICE_BLOCKS,
            "num_host_blocks": 2 * NUM_HOST_BLOCKS,
        }
        super().__init__(layout=layout, **blocks, **settings)
        for tier in (self.executor.pools.device_tier, self.executor.pools.host_tier):
            tier.view(torch.uint8).fill_(0x33)
        self.open(2)
        self.outputs: dict[int, list[torch.Tensor]] = {1: [], 2: []}

    def feed(self, session_id: int, layer: int, *qkv: torch.Tensor) -> None:
        """Run a layer, and keep its output."""
        query, key, value = (tensor.to(self.executor.device) for tensor in qkv)
        output = self.run_layer(layer, query, key, value, session_id=session_id)
        assert output is not None
        self.outputs[session_id].append(output)

    def finish(self, session_id: int) -> list[torch.Tensor]:
        """Return the plan's outputs, once it has its receipt."""
        self.author.read_receipt(self.executor.receipt(session_id))
        outputs, self.outputs[session_id] = self.outputs[session_id], []
        return [output.cpu() for output in outputs]

    def blocks(self, session_id: int, sequence_id: int, num_blocks: int) -> torch.Tensor:
        """Return a table's contents, as bytes."""
        blocks = self.stored(session_id, sequence_id, num_blocks)
        self.executor.kernels.streams.finish()
        return blocks.cpu().view(torch.uint8)


@dataclass(slots=True)
class Sequence:
    tier: pb.Tier
    blocks: list[int]
    num_tokens: int


@dataclass(slots=True)
class Plan:
    """A plan under construction."""

    changes: list[Change] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    freed: list[tuple[pb.Tier, int]] = field(default_factory=list)
    """Free from the next plan on: sources of transfers must stay until the receipt."""


class SessionAuthor:
    """One session's control plane: it has its own share of the blocks."""

    def __init__(self, session_id: int, chance: random.Random) -> None:
        self.id = session_id
        self._chance = chance
        self.number = 0
        self.next_layer = len(LAYERS)
        self.num_tokens = 0
        first = (session_id - 1) * NUM_DEVICE_BLOCKS
        first_host = (session_id - 1) * NUM_HOST_BLOCKS
        self._free = {
            DEVICE: list(range(first, first + NUM_DEVICE_BLOCKS)),
            HOST: list(range(first_host, first_host + NUM_HOST_BLOCKS)),
        }
        self._generations: dict[tuple[pb.Tier, int], int] = {}
        self._sequences: dict[int, Sequence] = {}
        self._next_sequence = session_id * 1000

    @property
    def tables(self) -> dict[int, Sequence]:
        return self._sequences

    def next_plan(self) -> dict[str, Any]:
        """Return the fields of a plan of a few random operations."""
        plan = Plan()
        touched: set[int] = set()
        for _ in range(self._chance.randint(1, 4)):
            name = self._chance.choice(("admit", "extend", "extend", "fork", "out", "in", "drop"))
            wanted = HOST if name == "in" else DEVICE
            able = [i for i, s in self._sequences.items() if s.tier == wanted and i not in touched]
            if name == "admit":
                touched.add(self._admit(plan))
            elif able:
                chosen = self._chance.choice(able)
                touched.add(chosen)
                operation: Callable[[Plan, int], int] = getattr(self, f"_{name}")
                touched.add(operation(plan, chosen))
        for tier, index in plan.freed:
            self._free[tier].append(index)
        self.number += 1
        self.num_tokens = sum(each.num_tokens for each in plan.spans)
        self.next_layer = 0
        return {"changes": plan.changes, "transfers": plan.transfers, "spans": plan.spans}

    def _admit(self, plan: Plan) -> int:
        num_tokens = self._chance.randint(1, MAX_TOKENS)
        blocks = self._take(DEVICE, -(-num_tokens // BLOCK_SIZE))
        if blocks is None:
            return 0
        self._next_sequence += 1
        self._sequences[self._next_sequence] = Sequence(DEVICE, [i for i, _ in blocks], num_tokens)
        plan.changes.append(set_blocks(self._next_sequence, blocks))
        plan.spans.append(span(self._next_sequence, 0, num_tokens))
        return self._next_sequence

    def _extend(self, plan: Plan, chosen: int) -> int:
        sequence = self._sequences[chosen]
        num_new = self._chance.randint(1, 5)
        missing = -(-(sequence.num_tokens + num_new) // BLOCK_SIZE) - len(sequence.blocks)
        others = {i for n, s in self._sequences.items() if n != chosen for i in s.blocks}
        blocks = self._take(DEVICE, missing)
        if blocks is None or others & set(sequence.blocks[sequence.num_tokens // BLOCK_SIZE :]):
            self._undo_take(blocks)
            return chosen
        if blocks:
            change = set_blocks(chosen, blocks, first_block=len(sequence.blocks))
            plan.changes.append(change)
        sequence.blocks += [i for i, _ in blocks]
        plan.spans.append(span(chosen, sequence.num_tokens, num_new))
        sequence.num_tokens += num_new
        return chosen

    def _fork(self, plan: Plan, chosen: int) -> int:
        """Fork a sequence: the child copies the last block, and begins to write in it."""
        parent = self._sequences[chosen]
        blocks = self._take(DEVICE, 1)
        if blocks is None or parent.num_tokens % BLOCK_SIZE == 0:
            self._undo_take(blocks)
            return chosen
        self._next_sequence += 1
        child, last = self._next_sequence, len(parent.blocks) - 1
        plan.changes += [fork(child, chosen, last + 1), set_blocks(child, blocks, first_block=last)]
        plan.transfers.append(transfer(self._ref(DEVICE, parent.blocks[last]), ref(*blocks[0])))
        plan.spans.append(span(child, parent.num_tokens, 1))
        table = [*parent.blocks[:last], blocks[0][0]]
        self._sequences[child] = Sequence(DEVICE, table, parent.num_tokens + 1)
        return child

    def _out(self, plan: Plan, chosen: int) -> int:
        return self._swap(plan, chosen, HOST)

    def _in(self, plan: Plan, chosen: int) -> int:
        """Swap a sequence in, and compute it on at once."""
        self._swap(plan, chosen, DEVICE)
        sequence = self._sequences[chosen]
        if sequence.tier == DEVICE and sequence.num_tokens % BLOCK_SIZE:
            plan.spans.append(span(chosen, sequence.num_tokens, 1))
            sequence.num_tokens += 1
        return chosen

    def _swap(self, plan: Plan, chosen: int, tier: pb.Tier) -> int:
        sequence = self._sequences[chosen]
        blocks = self._take(tier, len(sequence.blocks))
        if blocks is None:
            return chosen
        for index, (there, generation) in zip(sequence.blocks, blocks, strict=True):
            destination = ref(there, generation, tier)
            plan.transfers.append(transfer(self._ref(sequence.tier, index), destination))
        plan.changes.append(set_blocks(chosen, blocks, tier=tier, replace=True))
        before = sequence.tier, sequence.blocks
        sequence.tier, sequence.blocks = tier, [i for i, _ in blocks]
        self._release(plan, *before)
        return chosen

    def _drop(self, plan: Plan, chosen: int) -> int:
        """Drop a sequence, whose blocks the same plan may allocate again."""
        sequence = self._sequences.pop(chosen)
        plan.changes.append(drop(chosen))
        now = Plan()
        self._release(now, sequence.tier, sequence.blocks)
        pinned = {(t.source.tier, t.source.index) for t in plan.transfers}
        for name in now.freed:
            if name in pinned:
                plan.freed.append(name)
            else:
                self._free[name[0]].append(name[1])
        return chosen

    def _release(self, plan: Plan, tier: pb.Tier, blocks: list[int]) -> None:
        """Free the blocks that no other table refers to."""
        held = {(s.tier, i) for s in self._sequences.values() for i in s.blocks}
        plan.freed += [(tier, index) for index in blocks if (tier, index) not in held]

    def _take(self, tier: pb.Tier, num_blocks: int) -> list[tuple[int, int]] | None:
        """Return blocks with their new generations; None when there are not as many."""
        free = self._free[tier]
        if num_blocks > len(free):
            return None
        taken = []
        for _ in range(num_blocks):
            index = free.pop(self._chance.randrange(len(free)))
            generation = self._generations.get((tier, index), 0) + 1
            self._generations[tier, index] = generation
            taken.append((index, generation))
        return taken

    def _undo_take(self, blocks: list[tuple[int, int]] | None) -> None:
        for index, _ in blocks or ():
            self._free[DEVICE].append(index)
            self._generations[DEVICE, index] -= 1

    def _ref(self, tier: pb.Tier, index: int) -> BlockRef:
        return ref(index, self._generations[tier, index], tier)


def run_twins(
    seed: int,
    num_turns: int,
    *,
    dtype: str = "float32",
    kv_dtype: str = "",
    tolerance: float = 1e-5,
    before_turn: Callable[[random.Random], None] = lambda _: None,
    **settings: Any,
) -> Side:
    """Run the plans and compare; return the side that was made with ``settings``."""
    layout = replace(LAYOUT, dtype=dtype, kv_dtype=kv_dtype or dtype)
    sides = Side(layout, num_threads=1), Side(layout, **settings)
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    sessions = [SessionAuthor(session_id, chance) for session_id in (1, 2)]

    def new(num_tokens: int, num_heads: int) -> torch.Tensor:
        tensor = torch.randn(num_tokens, num_heads, HEAD_SIZE, generator=generator)
        return tensor.to(getattr(torch, dtype))

    for _ in range(num_turns):
        before_turn(chance)
        session = chance.choice(sessions)
        if session.next_layer == len(LAYERS):
            fields = session.next_plan()
            started = [
                side.start(session.number, session_id=session.id, **fields) for side in sides
            ]
            done = [each.receipt is not None for each in started]
            assert done[0] == done[1]
            if done[0]:
                session.next_layer = len(LAYERS)
            continue
        heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        qkv = [new(session.num_tokens, num_heads) for num_heads in heads]
        for side in sides:
            side.feed(session.id, LAYERS[session.next_layer], *qkv)
        session.next_layer += 1
        if session.next_layer == len(LAYERS):
            _compare(session, *sides, tolerance)
    return sides[1]


def _compare(session: SessionAuthor, one: Side, other: Side, tolerance: float) -> None:
    for expected, actual in zip(one.finish(session.id), other.finish(session.id), strict=True):
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    for sequence_id, sequence in session.tables.items():
        name = session.id, sequence_id, len(sequence.blocks)
        assert torch.equal(one.blocks(*name), other.blocks(*name)), f"the bytes of {name}"
