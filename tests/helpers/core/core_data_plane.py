"""A model of a data plane that keeps content, and asserts the checks of a real one.

Instead of keys and values a slot holds the hash of the whole prefix that it was computed from. So a
span that reads its context sees whether every slot before it holds its own prefix. A wrong plan is
an AssertionError, never a refusal.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvplane.wire import columns, protocol, signing
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_messages import (
    BLOCK,
    DEVICE,
    HOST,
    NUM_HEADS,
    POOL,
    TIERS,
    Block,
    BlockId,
    Published,
    Span,
    allocations_of,
    changes_of,
    prefix_values,
    publications_of,
    root_value,
    spans_of,
    transfers_of,
    unpack,
)
from tests.helpers.planning.registration_messages import all_outgoing

if TYPE_CHECKING:
    from tests.helpers.core.core_model import World

# In the table of a sequence that was cut: a block that was allocated again.
_TAKEN: BlockId = (0, -1)


class DataPlane:
    """One shard's blocks, tables and publications."""

    def __init__(
        self, world: World, index: int, num_shards: int, num_device: int, num_host: int
    ) -> None:
        self.world = world
        self.index = index
        num_heads = NUM_HEADS // num_shards
        self.shard = tpb.Shard(
            index=index,
            num_shards=num_shards,
            num_layers=2,
            first_kv_head=index * num_heads,
            num_kv_heads=num_heads,
        )
        self.sizes = {DEVICE: num_device, HOST: num_host}
        self.check_values = True  # whether each published hash is of one prefix only
        self.restart()

    def restart(self) -> None:
        """Begin another process: all content is lost."""
        self.world.epoch += 1
        self.epoch = self.world.epoch
        self.incarnation = 0
        self.key = b""
        self.generation: dict[BlockId, int] = {}
        self.content: dict[BlockId, list[int | None]] = {}
        self.published: dict[int, Published] = {}
        self.quit_all()

    def quit_all(self) -> None:
        """Drop every table, as for a new incarnation."""
        self.tables: dict[int, dict[int, list[BlockId]]] = {}
        self.finished: dict[int, int] = {}
        self.running: dict[int, tuple[int, dict[int, list[BlockId]]]] = {}
        # By session: generation and content of the blocks that its latest plan allocated, before
        # it. Transfers run once in a real data plane, so other sessions' plans change nothing here.
        self.former: dict[int, dict[tuple[BlockId, int], list[int | None]]] = {}
        # (session, sequence) that was cut -> the last plan before; the next one drops the table.
        self.cut: dict[tuple[int, int], int] = {}
        self.quit: set[int] = set()

    # Registration

    def hello(self) -> rpb.Hello:
        return rpb.Hello(
            version="test",
            oldest_payload_version=protocol.OLDEST_PAYLOAD_VERSION,
            newest_payload_version=protocol.NEWEST_PAYLOAD_VERSION,
            pool_id=POOL,
            shard=self.shard,
            epoch=self.epoch,
            layout=self.world.layout.to_proto(),
            num_device_blocks=self.sizes[DEVICE],
            num_host_blocks=self.sizes[HOST],
            address=f"shard{self.index}:1",
            incarnation=self.incarnation,
            key_id=signing.key_id(self.key),
        )

    def join(self) -> bool:
        """Register, and report unless resumed. Returns whether it was resumed."""
        welcome = self.world.core.register(self.hello())
        self.incarnation = welcome.incarnation
        if not welcome.resumed:
            self.key = welcome.key
            self.quit_all()
            self.report()
        return welcome.resumed

    def report(self) -> None:
        """Report what every block holds, in two parts."""
        owned: dict[tuple[str, str], list[int]] = {}
        for index, published in self.published.items():
            owned.setdefault(published.owner, []).append(index)
        parts = [
            rpb.BlockReport(blocks=map(self._reported, TIERS)),
            rpb.BlockReport(
                publications=[self._publications(owner, owned[owner]) for owner in owned],
                last=True,
            ),
        ]
        for part in parts:
            self.world.core.report(POOL, self.index, self.epoch, part)

    def _reported(self, tier: tpb.Tier) -> tpb.Blocks:
        known = {index: g for (of, index), g in self.generation.items() if of == tier}
        return tpb.Blocks(
            tier=tier,
            indices=columns.pack(INT32, known.keys()),
            generations=columns.pack(INT64, known.values()),
        )

    def _publications(self, owner: tuple[str, str], indices: list[int]) -> plan_pb2.Publications:
        published = [self.published[index] for index in indices]
        return plan_pb2.Publications(
            tenant=owner[0],
            namespace=owner[1],
            hash_algorithm="xxh3-128",
            indices=columns.pack(INT32, indices),
            generations=columns.pack(INT64, [p.generation for p in published]),
            parent_indices=columns.pack(INT32, [p.parent[0] for p in published]),
            parent_generations=columns.pack(INT64, [p.parent[1] for p in published]),
            hashes=b"".join(p.hash for p in published),
            token_ids=b"".join(p.token_ids for p in published),
        )

    def leave(self) -> None:
        """Break the registration stream; messages under way on it are lost."""
        self.world.core.take_outgoing(POOL, self.index)
        self.world.core.disconnect(POOL, self.index, self.epoch)

    def pump(self) -> None:
        """Receive all waiting messages of the registration stream."""
        while messages := all_outgoing(self.world.core, POOL, self.index):
            for message in messages:
                self.take(message)

    def take(self, message: rpb.RegisterResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "fence":
            session = message.fence.session
            self.tables.pop(session.session_id, None)
            self.quit.add(session.session_id)
            done = rpb.FenceDone(session=session)
            self.world.core.fence_done(POOL, self.index, self.epoch, done)
        elif kind == "publish":
            for index, published in publications_of(message.publish.publications).items():
                self._publish(index, published)
        elif kind == "withdraw":
            withdraw = message.withdraw
            indices = columns.read(INT32, withdraw.indices, "indices")
            for index, generation in zip(
                indices, columns.read(INT64, withdraw.generations, "generations"), strict=True
            ):
                if self.generation.get((DEVICE, index)) == generation:
                    self.published.pop(index, None)
        else:
            assert kind == "report_request", kind
            self.report()

    def _publish(self, index: int, published: Published) -> None:
        block_id = (DEVICE, index)
        known = self.generation.get(block_id, 0)
        assert known >= published.generation, f"{block_id} was published before it was allocated"
        if known != published.generation:
            return
        content = self.content[block_id]
        if self.check_values:
            value = self.world.values[(published.owner, published.hash)]
            assert content[-1] == value, f"{block_id} was published before it was written"
        parent, generation = published.parent
        start: int | None = None
        if parent == -1:
            assert generation == 0
            start = root_value(published.owner)
        elif self.generation.get((DEVICE, parent)) == generation:
            start = self.content[(DEVICE, parent)][-1]
            assert start is not None, f"the parent of {block_id} is not written"
        if start is not None:
            values = prefix_values(unpack(published.token_ids), start)
            assert content == values, f"{block_id} does not hold what was published of it"
        self.published[index] = published

    # Plans

    def started(self, session_id: int) -> int:
        """Return the session's latest plan that ran, or began to."""
        running = self.running[session_id][0] if session_id in self.running else 0
        return max(running, self.finished.get(session_id, 0))

    def receipt(self, plan: plan_pb2.Plan, digest: bytes) -> tpb.SignedPayload:
        """Return the signed statement that the plan ran."""
        return self.sign_receipt(
            plan_pb2.Receipt(
                version=protocol.NEWEST_PAYLOAD_VERSION,
                session=plan.session,
                pool_id=POOL,
                shard_index=self.index,
                epoch=self.epoch,
                plan_number=plan.number,
                plan_digest=digest,
            )
        )

    def sign_receipt(self, receipt: plan_pb2.Receipt) -> tpb.SignedPayload:
        payload = receipt.SerializeToString(deterministic=True)
        signature = signing.sign(self.key, signing.RECEIPT, payload)
        return tpb.SignedPayload(type=signing.RECEIPT, payload=payload, signature=signature)

    def run(
        self, signed: tpb.SignedPayload, expected: dict[int, list[int]], *, halfway: bool = False
    ) -> bool:
        """Run a plan from its start; return False when it was refused, or stopped ``halfway``.

        ``expected[sequence]``: the values of all positions up to the end of its span.
        """
        if signed.signature != signing.sign(self.key, signed.type, signed.payload):
            return False
        plan = plan_pb2.Plan.FromString(signed.payload)
        assert (signed.type, plan.version) == (signing.PLAN, protocol.NEWEST_PAYLOAD_VERSION)
        session_id = plan.session.session_id
        if (
            plan.shard_epochs[self.index] != self.epoch
            or plan.session.incarnation != self.incarnation
            or session_id in self.quit
        ):
            return False
        last = self.finished.get(session_id, 0)
        if plan.number <= last:
            return plan.number == last
        if not plan.resync and plan.previous != last:
            return False
        assert plan.finished <= last, "tables of a plan that has not run are kept"
        again = self.running.get(session_id, (0, {}))
        if again[0] > plan.number:
            return False
        if again[0] == plan.number:
            before = again[1]
        else:
            before = {i: list(t) for i, t in self.tables.get(session_id, {}).items()}
        self.running[session_id] = (plan.number, before)
        self.tables[session_id] = {} if plan.resync else {i: list(t) for i, t in before.items()}
        if again[0] != plan.number:
            self.former[session_id] = {}
        self._apply(plan, before, again=again[0] == plan.number)
        for source, destination in transfers_of(plan):
            self._copy(session_id, source, destination)
        spans = spans_of(plan)
        for span in spans[: len(spans) // 2] if halfway else spans:
            self._compute(plan, span, expected[span.sequence_id])
        if halfway:
            return False
        self.finished[session_id] = plan.number
        return True

    def _apply(self, plan: plan_pb2.Plan, before: dict[int, list[BlockId]], *, again: bool) -> None:
        session_id = plan.session.session_id
        tables = self.tables[session_id]
        for key, last_plan in list(self.cut.items()):
            if key[0] == session_id and last_plan < plan.number:
                del self.cut[key]
        for change in changes_of(plan):
            if change.kind == plan_pb2.TABLE_CHANGE_KIND_FORK:
                assert change.sequence_id not in tables, "a fork over a live table"
                parent = tables[change.parent_id]
                assert change.num_blocks <= len(parent)
                tables[change.sequence_id] = parent[: change.num_blocks]
            elif change.kind == plan_pb2.TABLE_CHANGE_KIND_KEEP:
                assert plan.resync and change.sequence_id not in tables
                kept = before[change.sequence_id]
                assert change.num_blocks <= len(kept)
                tables[change.sequence_id] = kept[: change.num_blocks]
            elif change.kind == plan_pb2.TABLE_CHANGE_KIND_DROP:
                del tables[change.sequence_id]
            elif change.kind == plan_pb2.TABLE_CHANGE_KIND_TRUNCATE:
                assert change.num_blocks <= len(tables[change.sequence_id])
                del tables[change.sequence_id][change.num_blocks :]
            else:
                for block, allocated in zip(change.blocks, change.allocated, strict=True):
                    self._check_block(session_id, block, allocated=allocated, again=again)
                block_ids = [block.block_id for block in change.blocks]
                replace = change.kind == plan_pb2.TABLE_CHANGE_KIND_REPLACE
                table = [] if replace else tables.setdefault(change.sequence_id, [])
                assert change.first_block <= len(table), "a table with a hole"
                table[change.first_block : change.first_block + len(block_ids)] = block_ids
                assert len({tier for tier, _ in table}) == 1, "a table in two tiers"
                tables[change.sequence_id] = table

        for block in allocations_of(plan):
            self._check_block(session_id, block, allocated=True, again=again)

    def _check_block(self, session_id: int, block: Block, *, allocated: bool, again: bool) -> None:
        block_id = block.block_id
        assert block.index < self.sizes[block.tier]
        known = self.generation.get(block_id, 0)
        if not allocated:
            assert block.generation == known, f"{block_id} is of generation {known}: {block}"
            return
        if again and block.generation <= known:
            return
        assert block.generation > known, f"{block_id} is of generation {known}, not new: {block}"
        for other, tables in self.tables.items():
            for i, table in tables.items() if other != session_id else ():
                if block_id not in table:
                    continue
                assert self.cut.get((other, i), math.inf) <= self.finished.get(other, 0), (
                    f"{block_id} was allocated to session {session_id} while a table of session "
                    f"{other} refers to it"
                )
                table[table.index(block_id)] = _TAKEN
        if block_id in self.content:
            self.former[session_id][block_id, known] = self.content[block_id]
        self.generation[block_id] = block.generation
        self.content[block_id] = [None] * BLOCK
        if block.tier == DEVICE:
            self.published.pop(block.index, None)

    def _copy(self, session_id: int, source: Block, destination: Block) -> None:
        known = self.generation.get(destination.block_id)
        assert known == destination.generation, f"a transfer to {destination}, which is {known}"
        known = self.generation.get(source.block_id)
        content = self.content[source.block_id]
        if known != source.generation:
            # Earlier contents of a block that this plan allocates: nothing has written it yet.
            former = self.former[session_id].get((source.block_id, source.generation))
            assert former is not None, f"a transfer of {source}, which is {known}"
            content = former
        if destination.tier == DEVICE:
            assert destination.index not in self.published, "a copy over a published block"
        self.content[destination.block_id] = list(content)

    def _compute(self, plan: plan_pb2.Plan, span: Span, values: list[int]) -> None:
        session_id, sequence_id = plan.session.session_id, span.sequence_id
        table = self.tables[session_id][sequence_id]
        for position in range(span.first_position):
            block_id = table[position // BLOCK]
            assert self.content[block_id][position % BLOCK] == values[position], (
                f"session {session_id} sequence {sequence_id} reads a wrong position {position} "
                f"of {block_id} in plan {plan.number}"
            )
        for position in range(span.first_position, span.first_position + span.num_tokens):
            block_id = table[position // BLOCK]
            assert block_id[0] == DEVICE, "a write to the host tier"
            assert block_id[1] not in self.published, f"a write to published block {block_id}"
            self._check_alone(plan, sequence_id, block_id)
            self.content[block_id][position % BLOCK] = values[position]

    def _check_alone(self, plan: plan_pb2.Plan, sequence_id: int, block_id: BlockId) -> None:
        """Check that only sequences that this plan lets read the block, past its end, share it."""
        session_id = plan.session.session_id
        firsts = {span.sequence_id: span.first_position for span in spans_of(plan)}
        for other, tables in self.tables.items():
            for i, table in tables.items():
                if (other, i) == (session_id, sequence_id) or block_id not in table:
                    continue
                end = (table.index(block_id) + 1) * BLOCK
                assert other == session_id and firsts.get(i, end) >= end, (
                    f"{block_id} is written while session {other} shares it"
                )
