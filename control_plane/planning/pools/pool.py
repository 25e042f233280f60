"""One pool: its shards, its two tiers of blocks, and the guarantees of its sessions.

    register ──► report ──► (all reported, old sessions fenced) ──► built ──► ready
       ▲                                                             │ while all are connected
       └──────────── a shard registers with a new epoch ◄────────────┘

Sessions refer to their pool; the pool knows only their ids.
"""

from __future__ import annotations

from control_plane.blocks.block_store import CACHED, FREE, RETIRED, BlockStore
from control_plane.blocks.reservations import Reservations
from control_plane.planning.pools.publications import publish_messages
from control_plane.planning.pools.shards import TIERS, PoolShards
from kvplane.layout import Layout
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb


class Pool:
    """State of one pool; registration, planning and publication are in other modules."""

    def __init__(self, pool_id: str, shards: PoolShards, watermark: float) -> None:
        """``watermark``: share of the device blocks that admissions leave free."""
        self.id = pool_id
        self.shards = shards
        self.session_ids: set[int] = set()  # open ones
        self.counters = cpb.PoolCounters()
        self.reservations = Reservations()
        self.built = False
        # Generations are kept over a rebuild, also those of blocks beyond the size of a smaller
        # shard: a shard that kept running must not see one again.
        self.generations: dict[tpb.Tier, list[int]] = {tier: [] for tier in TIERS}
        self._watermark = watermark
        self.tiers: dict[tpb.Tier, BlockStore] = {}
        self.set_tiers(dict.fromkeys(TIERS, 0))

    @property
    def key(self) -> bytes:
        """Signs the pool's plans, grants and receipts."""
        return self.shards.key

    @property
    def layout(self) -> Layout:
        """What the pool's data means."""
        return self.shards.layout

    @property
    def epochs(self) -> list[int]:
        """The shards' epochs, by shard index."""
        return self.shards.epochs

    @property
    def block_size(self) -> int:
        """Token slots of a block."""
        return self.layout.block_size_tokens

    @property
    def host(self) -> BlockStore:
        """The tier that sequences are swapped out to."""
        return self.tiers[tpb.TIER_HOST]

    @property
    def ready(self) -> bool:
        """Whether sessions can be opened."""
        return self.built and self.shards.are_connected

    def close(self) -> None:
        """Forget all blocks until the pool is built again."""
        self.built = False
        self.set_tiers(dict.fromkeys(TIERS, 0))

    def set_tiers(self, num_blocks: dict[tpb.Tier, int]) -> None:
        """Start over with so many blocks of each tier, all free, at the generations known."""
        self.counters.num_evictions = self.num_evictions()
        for tier, num in num_blocks.items():
            generations = self.generations[tier]
            generations += [0] * (num - len(generations))
        self.tiers = {
            tier: BlockStore(num_blocks[tier], self.block_size, self.generations[tier])
            for tier in TIERS
        }
        self.device = self.tiers[tpb.TIER_DEVICE]  # the tier that attention reads

    # Room

    def num_available(self, session_id: int, tier: tpb.Tier) -> int:
        """Blocks that the session may allocate now, without those reserved for others."""
        num_obtainable = self.tiers[tier].num_obtainable(session_id)
        if tier == tpb.TIER_DEVICE:
            num_obtainable -= self.reservations.num_reserved_for_others(session_id)
        return num_obtainable

    def num_watermark_blocks(self) -> int:
        """Device blocks that admissions leave free while anything is held."""
        return int(self._watermark * self.device.num_blocks) if self.device.num_held() else 0

    # Sessions

    def open(self, session_id: int) -> None:
        """Add a session."""
        self.session_ids.add(session_id)
        self.reservations.open(session_id)

    def end(self, session: tpb.SessionRef, ordinal: int) -> None:
        """Remove a session, which has released all it held; every shard must fence it."""
        self.session_ids.remove(session.session_id)
        self.reservations.close(session.session_id)
        self.shards.fence(session, ordinal)

    def fence_done(self, session_id: int, shard_index: int) -> None:
        """The shard will never again run a plan of the session, if that has ended."""
        if self.shards.fence_done(session_id, shard_index):
            for store in self.tiers.values():
                store.session_fenced(session_id)

    # Publications

    def announce(self, root: bytes, blocks: list[int]) -> None:
        """Send publications to the shards, of one root, parents before children."""
        if blocks:
            self.shards.send(publish_messages(self.device, root, blocks))

    def missed(self, shard_index: int) -> list[cpb.RegisterResponse]:
        """What a shard that came back may not have been sent: fences, and all publications."""
        messages = self.shards.fences_for(shard_index)
        by_root: dict[bytes, list[int]] = {}
        for root, block in self.device.index.findable():
            by_root.setdefault(root, []).append(block)
        for root, blocks in by_root.items():
            messages += publish_messages(self.device, root, blocks)
        return messages

    # Descriptions

    def num_evictions(self) -> int:
        """Published blocks allocated for another use, since the pool registered."""
        return self.counters.num_evictions + sum(t.num_evictions for t in self.tiers.values())

    def revision(self) -> int:
        """Counts the changes to the prefix index."""
        return self.counters.num_publications + self.num_evictions()

    def usage(self) -> cpb.PoolUsage:
        """How the blocks of each tier are used."""
        return cpb.PoolUsage(tiers=map(self._usage, TIERS))

    def info(self, num_sequences: int) -> cpb.DescribePoolResponse:
        """The pool's description; the caller counts its live sequences."""
        counters = cpb.PoolCounters()
        counters.CopyFrom(self.counters)
        counters.num_evictions = self.num_evictions()
        return cpb.DescribePoolResponse(
            layout=self.layout.to_proto(),
            shards=self.shards.infos(),
            ready=self.ready,
            usage=self.usage(),
            num_sessions=len(self.session_ids),
            num_sequences=num_sequences,
            counters=counters,
        )

    def _usage(self, tier: tpb.Tier) -> cpb.TierUsage:
        store = self.tiers[tier]
        return cpb.TierUsage(
            tier=tier,
            num_blocks=store.num_blocks,
            num_free_blocks=store.num_in[FREE],
            num_cached_blocks=store.num_in[CACHED],
            num_held_blocks=store.num_held(),
            num_retired_blocks=store.num_in[RETIRED],
        )
