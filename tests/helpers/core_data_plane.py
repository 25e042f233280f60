"""A data plane that holds bytes, and checks what a real one must.

A slot's bytes are stood for by the hash of the whole prefix that they were computed from, so a row
that reads its context sees at once whether every slot before it holds exactly its own prefix. A
wrong plan is an AssertionError, never a refusal.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from control_plane.planning.model import (
    BlockRef,
    Fence,
    ForkTable,
    Hello,
    Outgoing,
    Plan,
    Publication,
    PublishBlocks,
    ReportedBlock,
    SetBlocks,
    Shard,
    Tier,
)
from kvplane.layout import LayerGroup, Layout

if TYPE_CHECKING:
    from core_model import World

BLOCK = 8
LAYOUT = Layout("model", BLOCK, "float32", "float32", (LayerGroup("full", (0, 1), 2, 8),))
ROOT = 0

Name = tuple[Tier, int]


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as they travel."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def prefix_values(tokens: Sequence[int], start: int = ROOT) -> list[int]:
    """What each position's KV is computed from: all tokens up to it."""
    values, value = [], start
    for token in tokens:
        value = hash((value, token))
        values.append(value)
    return values


class DataPlane:
    """One shard's blocks, tables and publications."""

    def __init__(
        self, world: World, index: int, num_shards: int, num_device: int, num_host: int
    ) -> None:
        self.world = world
        self.shard = Shard(index, num_shards, num_layers=1, num_kv_heads=1)
        self.sizes = {Tier.DEVICE: num_device, Tier.HOST: num_host}
        self.restart()

    def restart(self) -> None:
        """Another process: nothing is left."""
        self.world.epoch += 1
        self.epoch = self.world.epoch
        self.incarnation = 0
        self.generation: dict[Name, int] = {}
        self.content: dict[Name, list[int | None]] = {}
        self.published: dict[int, Publication] = {}
        self.max_session_id = 0
        self.quit_all()

    def quit_all(self) -> None:
        """Drop every table, as for a new incarnation."""
        self.tables: dict[int, dict[int, list[Name]]] = {}
        self.finished: dict[int, int] = {}
        self.running: dict[int, tuple[int, dict[int, list[Name]]]] = {}
        self.quit: set[int] = set()

    def hello(self) -> Hello:
        return Hello(
            pool_id="pool",
            shard=self.shard,
            epoch=self.epoch,
            layout=self.world.layout,
            num_device_blocks=self.sizes[Tier.DEVICE],
            num_host_blocks=self.sizes[Tier.HOST],
            address=f"shard{self.shard.index}:1",
            incarnation=self.incarnation,
        )

    def join(self) -> bool:
        """Register, and report unless resumed. Returns whether it was resumed."""
        core = self.world.core
        welcome = core.register(self.hello())
        self.incarnation = welcome.incarnation
        if not welcome.resumed:
            self.quit_all()
            blocks = self.report()
            half = len(blocks) // 2
            for part, last in ((blocks[:half], False), (blocks[half:], True)):
                core.report(
                    "pool",
                    self.shard.index,
                    self.epoch,
                    part,
                    last=last,
                    max_session_id=self.max_session_id,
                )
        return welcome.resumed

    def report(self) -> list[ReportedBlock]:
        reported = []
        for (tier, index), generation in self.generation.items():
            publication = self.published.get(index) if tier is Tier.DEVICE else None
            reported.append(ReportedBlock(BlockRef(tier, index, generation), publication))
        return reported

    def leave(self) -> None:
        """The registration stream breaks; what was under way on it is lost."""
        self.world.core.take_outgoing("pool", self.shard.index)
        self.world.core.disconnect("pool", self.shard.index, self.epoch)

    def pump(self) -> None:
        core = self.world.core
        for message in core.take_outgoing("pool", self.shard.index):
            self.take(message)

    def take(self, message: Outgoing) -> None:
        if isinstance(message, Fence):
            self.tables.pop(message.session_id, None)
            self.quit.add(message.session_id)
            self.world.core.fence_done("pool", self.shard.index, self.epoch, message.session_id)
        elif isinstance(message, PublishBlocks):
            for publication in message.publications:
                self._publish(publication)

    def _publish(self, publication: Publication) -> None:
        name = (publication.block.tier, publication.block.index)
        if self.generation.get(name) != publication.block.generation:
            return
        start = ROOT
        if publication.parent_hash:
            start = self.world.values[(publication.tenant, publication.parent_hash)]
        tokens = struct.unpack(f"<{BLOCK}i", publication.token_ids)
        values = prefix_values(tokens, start)
        assert self.content[name] == values, f"{name} was published before it was written"
        assert self.world.values[(publication.tenant, publication.hash)] == values[-1]
        self.published[publication.block.index] = publication

    # Plans

    def started(self, session_id: int) -> int:
        """The session's latest plan that ran, or began to."""
        running = self.running[session_id][0] if session_id in self.running else 0
        return max(running, self.finished.get(session_id, 0))

    def run(self, plan: Plan, expected: dict[int, list[int]], *, halfway: bool = False) -> bool:
        """Run a plan from its start; False when it was refused, or stopped ``halfway``.

        ``expected[sequence]``: the values of all positions up to the end of its row.
        """
        session_id = plan.session_id
        if (
            plan.shard_epochs[self.shard.index] != self.epoch
            or plan.incarnation != self.incarnation
            or session_id in self.quit
        ):
            return False
        last = self.finished.get(session_id, 0)
        if plan.number <= last:
            return plan.number == last
        if not plan.resync and plan.previous != last:
            return False
        again = self.running.get(session_id, (0, {}))
        if again[0] > plan.number:
            return False
        if again[0] == plan.number:
            before = again[1]
        else:
            before = {i: list(t) for i, t in self.tables.get(session_id, {}).items()}
        self.running[session_id] = (plan.number, before)
        self.max_session_id = max(self.max_session_id, session_id)
        self.tables[session_id] = {} if plan.resync else {i: list(t) for i, t in before.items()}
        self._apply(plan, again=again[0] == plan.number)
        for transfer in plan.transfers:
            self._copy(transfer.source, transfer.destination)
        rows = plan.rows[: len(plan.rows) // 2] if halfway else plan.rows
        for row in rows:
            self._compute(plan, row.sequence_id, row.first_position, row.num_tokens, expected)
        if halfway:
            return False
        self.finished[session_id] = plan.number
        return True

    def _apply(self, plan: Plan, *, again: bool) -> None:
        tables = self.tables[plan.session_id]
        for change in plan.changes:
            if isinstance(change, SetBlocks):
                for block, fresh in zip(change.blocks, change.fresh, strict=True):
                    self._check_block(plan.session_id, block, fresh=fresh, again=again)
                names = [(block.tier, block.index) for block in change.blocks]
                table = [] if change.replace else tables.setdefault(change.sequence_id, [])
                assert change.first_block <= len(table), "a table with a hole"
                table[change.first_block : change.first_block + len(names)] = names
                assert len({tier for tier, _ in table}) == 1, "a table in two tiers"
                tables[change.sequence_id] = table
            elif isinstance(change, ForkTable):
                assert change.sequence_id not in tables, "a fork over a live table"
                parent = tables[change.parent_sequence_id]
                assert change.num_blocks <= len(parent)
                tables[change.sequence_id] = parent[: change.num_blocks]
            else:
                del tables[change.sequence_id]

    def _check_block(self, session_id: int, block: BlockRef, *, fresh: bool, again: bool) -> None:
        name = (block.tier, block.index)
        assert block.index < self.sizes[block.tier]
        known = self.generation.get(name, 0)
        if not fresh:
            assert block.generation == known, f"{name} is of generation {known}: {block}"
            return
        if again and block.generation <= known:
            return
        assert block.generation > known, f"{name} is of generation {known}, not new: {block}"
        for other, tables in self.tables.items():
            if other != session_id:
                assert all(name not in table for table in tables.values()), (
                    f"{name} was handed to session {session_id} while session {other} names it"
                )
        self.generation[name] = block.generation
        self.content[name] = [None] * BLOCK
        if block.tier is Tier.DEVICE:
            self.published.pop(block.index, None)

    def _copy(self, source: BlockRef, destination: BlockRef) -> None:
        for block in (source, destination):
            known = self.generation.get((block.tier, block.index))
            assert known == block.generation, f"a transfer of {block}, which is {known}"
        if destination.tier is Tier.DEVICE:
            assert destination.index not in self.published, "a copy over a published block"
        self.content[(destination.tier, destination.index)] = list(
            self.content[(source.tier, source.index)]
        )

    def _compute(
        self,
        plan: Plan,
        sequence_id: int,
        first: int,
        num_tokens: int,
        expected: dict[int, list[int]],
    ) -> None:
        table = self.tables[plan.session_id][sequence_id]
        values = expected[sequence_id]
        for position in range(first):
            name = table[position // BLOCK]
            assert self.content[name][position % BLOCK] == values[position], (
                f"session {plan.session_id} sequence {sequence_id} reads a wrong position "
                f"{position} of {name} in plan {plan.number}"
            )
        for position in range(first, first + num_tokens):
            name = table[position // BLOCK]
            assert name[0] is Tier.DEVICE, "a write to the host tier"
            assert name[1] not in self.published, f"a write to published block {name}"
            self._check_alone(plan.session_id, sequence_id, name)
            self.content[name][position % BLOCK] = values[position]

    def _check_alone(self, session_id: int, sequence_id: int, name: Name) -> None:
        for other, tables in self.tables.items():
            for i, table in tables.items():
                if (other, i) != (session_id, sequence_id):
                    assert name not in table, f"{name} is written while session {other} shares it"
