"""A data plane as the core sees it: it registers, reports, keeps tables and publications, and signs
receipts. It holds no contents: those of the native core's plans are checked by
``tests/helpers/native/native_plane.py``, and in real memory by ``tests/helpers/planes``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplane.wire import columns, protocol, signing
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_messages import (
    DEVICE,
    HOST,
    NUM_HEADS,
    POOL,
    TIERS,
    Block,
    BlockId,
    Published,
    allocations_of,
    changes_of,
    publications_of,
)
from tests.helpers.planning.registration_messages import all_outgoing

if TYPE_CHECKING:
    from tests.helpers.core.core_model import World


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
        self.restart()

    def restart(self) -> None:
        """Begin another process, which holds nothing."""
        self.world.epoch += 1
        self.epoch = self.world.epoch
        self.incarnation = 0
        self.key = b""
        self.generation: dict[BlockId, int] = {}
        self.published: dict[int, Published] = {}
        self.quit_all()

    def quit_all(self) -> None:
        """Drop every table, as for a new incarnation."""
        self.tables: dict[int, dict[int, list[BlockId]]] = {}
        self.finished: dict[int, int] = {}
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
        known = self.generation.get((DEVICE, index), 0)
        assert known >= published.generation, f"{index} was published before it was allocated"
        if known == published.generation:
            self.published[index] = published

    # Plans

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

    def run(self, signed: tpb.SignedPayload) -> bool:
        """Run a plan; return False when it was refused."""
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
        self._change_tables(plan)
        self.finished[session_id] = plan.number
        return True

    def _change_tables(self, plan: plan_pb2.Plan) -> None:
        before = self.tables.get(plan.session.session_id, {})
        tables = {} if plan.resync else {i: list(table) for i, table in before.items()}
        for change in changes_of(plan):
            i = change.sequence_id
            if change.kind == plan_pb2.TABLE_CHANGE_KIND_FORK:
                tables[i] = tables[change.parent_id][: change.num_blocks]
            elif change.kind == plan_pb2.TABLE_CHANGE_KIND_KEEP:
                tables[i] = before[i][: change.num_blocks]
            elif change.kind == plan_pb2.TABLE_CHANGE_KIND_DROP:
                del tables[i]
            elif change.kind == plan_pb2.TABLE_CHANGE_KIND_TRUNCATE:
                del tables[i][change.num_blocks :]
            else:
                replace = change.kind == plan_pb2.TABLE_CHANGE_KIND_REPLACE
                table = [] if replace else tables.setdefault(i, [])
                table[change.first_block :] = [block.block_id for block in change.blocks]
                tables[i] = table
                for block, allocated in zip(change.blocks, change.allocated, strict=True):
                    if allocated:
                        self._allocate(block)
        for block in allocations_of(plan):
            self._allocate(block)
        self.tables[plan.session.session_id] = tables

    def _allocate(self, block: Block) -> None:
        known = self.generation.get(block.block_id, 0)
        assert block.generation > known, f"{block} is not new: its generation is {known}"
        self.generation[block.block_id] = block.generation
        if block.tier == DEVICE:
            self.published.pop(block.index, None)
