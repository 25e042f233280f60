"""One pool: its shards, its two tiers of blocks, what its sessions are guaranteed.

    register ──► report ──► (all shards reported, old sessions fenced) ──► built ──► ready
       ▲                                                                     │ while all are
       └──────────────── a shard registers with a new epoch ◄────────────────┘ connected

Invariant: a session that ended is in ``fenced`` until every shard has fenced it. Sessions build on
pools, so a pool knows their ids alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from control_plane.blocks.block_store import CACHED, FREE, RETIRED, BlockStore
from control_plane.blocks.reservations import Reservations
from control_plane.planning.model import (
    BlockRef,
    Blocks,
    Fence,
    Hello,
    Outgoing,
    PoolCounters,
    PoolInfo,
    Publications,
    PublishBlocks,
    ReportedBlock,
    ShardInfo,
    Tier,
    TierUsage,
)

# Publications in one message: at most 256 tokens of 4 bytes each, far below the message limit.
_MAX_PUBLICATIONS: Final = 1024


class ShardState:
    """One registered data plane."""

    __slots__ = ("connected", "hello", "outgoing", "report", "reported")

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.connected = True
        self.reported = False
        self.report: dict[tuple[Tier, int], ReportedBlock] = {}
        self.outgoing: deque[Outgoing] = deque()

    def info(self) -> ShardInfo:
        hello = self.hello
        return ShardInfo(hello.shard, hello.epoch, hello.address, self.connected)


class Pool:
    """State of one pool; what registers, plans and publishes is in modules of their own."""

    def __init__(self, hello: Hello, key: bytes, watermark: float) -> None:
        self.id = hello.pool_id
        self.key = key
        self.layout = hello.layout
        self.num_shards = hello.shard.num_shards
        self.shards: dict[int, ShardState] = {}
        self.session_ids: set[int] = set()  # open ones
        self.fenced: dict[int, set[int]] = {}  # ended session -> shards that have not fenced it
        self.counters = PoolCounters()
        self.reservations = Reservations()
        self.built = False
        # Generations outlive a rebuild, also those of blocks that a smaller shard took away: a
        # shard that went on must not see one again.
        self.generations: dict[Tier, list[int]] = {Tier.DEVICE: [], Tier.HOST: []}
        self._watermark = watermark
        self.tiers: dict[Tier, BlockStore] = {}
        self.set_tiers(dict.fromkeys(Tier, 0))

    @property
    def block_size(self) -> int:
        """Token slots of a block."""
        return self.layout.block_size_tokens

    @property
    def host(self) -> BlockStore:
        """The tier that sequences are swapped out to."""
        return self.tiers[Tier.HOST]

    @property
    def ready(self) -> bool:
        """Whether sessions can be opened."""
        return self.built and all(shard.connected for shard in self.shards.values())

    @property
    def epochs(self) -> tuple[int, ...]:
        """The shards' epochs, by shard index."""
        return tuple(self.shards[i].hello.epoch for i in range(self.num_shards))

    def set_tiers(self, num_blocks: dict[Tier, int]) -> None:
        """Start over with so many blocks, all of them free, of the generations known."""
        for store in self.tiers.values():
            self.counters.num_evictions += store.num_evictions
        for tier, num in num_blocks.items():
            generations = self.generations[tier]
            generations += [0] * (num - len(generations))
        self.tiers = {
            tier: BlockStore(num_blocks[tier], self.block_size, self.generations[tier])
            for tier in Tier
        }
        self.device = self.tiers[Tier.DEVICE]  # the tier that attention reads

    # Blocks as they travel

    def ref(self, tier: Tier, block: int) -> BlockRef:
        """The block with its generation."""
        return BlockRef(tier, block, self.tiers[tier].generation[block])

    def refs(self, tier: Tier, blocks: Sequence[int]) -> Blocks:
        """The blocks with their generations, in columns."""
        return Blocks(tier, blocks, self.tiers[tier].generations(blocks))

    # Room

    def num_available(self, session_id: int, tier: Tier) -> int:
        """Blocks that the session may allocate now, what others are guaranteed left aside."""
        num_obtainable = self.tiers[tier].num_obtainable(session_id)
        if tier is Tier.DEVICE:
            num_obtainable -= self.reservations.num_reserved_for_others(session_id)
        return num_obtainable

    def num_watermark_blocks(self) -> int:
        """Device blocks that admissions leave free while anything is held."""
        return int(self._watermark * self.device.num_blocks) if self.device.num_held() else 0

    # Sessions

    def open(self, session_id: int) -> None:
        """A session leases from the pool."""
        self.session_ids.add(session_id)
        self.reservations.open(session_id)

    def end(self, session_id: int) -> None:
        """The session, which released all it held, ended: every shard must fence it."""
        self.session_ids.remove(session_id)
        self.reservations.close(session_id)
        self.fenced[session_id] = set(self.shards)
        for shard in self.shards.values():
            if shard.connected:
                shard.outgoing.append(Fence(session_id))

    def fence_done(self, session_id: int, shard_index: int) -> None:
        """The shard will never again run a plan of the ended session."""
        waiting = self.fenced.get(session_id)
        if waiting is None:
            return
        waiting.discard(shard_index)
        if not waiting:
            del self.fenced[session_id]
            for tier in self.tiers.values():
                tier.session_fenced(session_id)

    # Publications

    def announce(self, tenant: str, blocks: list[int]) -> None:
        """Queue publications for every connected shard; others hear of all on coming back."""
        if not blocks:
            return
        self.counters.num_publications += len(blocks)
        messages = self._publications(tenant, blocks)
        for shard in self.shards.values():
            if shard.connected:
                shard.outgoing.extend(messages)

    def recall(self, shard_index: int) -> None:
        """Queue for a shard that came back all it may have missed."""
        shard = self.shards[shard_index]
        shard.outgoing.clear()
        for session_id, waiting in self.fenced.items():
            if shard_index in waiting:
                shard.outgoing.append(Fence(session_id))
        by_root: dict[bytes, list[int]] = {}
        for root, block in self.device.index.published():
            by_root.setdefault(root, []).append(block)
        for root, blocks in by_root.items():
            shard.outgoing.extend(self._publications(root.decode(), blocks))

    def _publications(self, tenant: str, blocks: list[int]) -> list[PublishBlocks]:
        return [
            PublishBlocks(self._columns(tenant, blocks[i : i + _MAX_PUBLICATIONS]))
            for i in range(0, len(blocks), _MAX_PUBLICATIONS)
        ]

    def _columns(self, tenant: str, blocks: list[int]) -> Publications:
        index = self.device.index
        return Publications(
            tenant=tenant,
            blocks=self.refs(Tier.DEVICE, blocks),
            parent_hashes=index.parent_hashes(blocks),
            hashes=index.hashes(blocks),
            token_ids=index.token_ids(blocks),
        )

    # What it tells

    def usage(self) -> tuple[TierUsage, ...]:
        """How the blocks of each tier are used."""
        return tuple(map(self._usage, Tier))

    def info(self, num_sequences: int) -> PoolInfo:
        """What DescribePool answers with, for a pool with so many live sequences."""
        counters = replace(self.counters)
        for tier in self.tiers.values():
            counters.num_evictions += tier.num_evictions
        return PoolInfo(
            pool_id=self.id,
            layout=self.layout,
            shards=self.shard_infos(),
            ready=self.ready,
            usage=self.usage(),
            num_sessions=len(self.session_ids),
            num_sequences=num_sequences,
            counters=counters,
        )

    def shard_infos(self) -> tuple[ShardInfo, ...]:
        """What is told of each shard, by shard index."""
        return tuple(self.shards[i].info() for i in sorted(self.shards))

    def _usage(self, tier: Tier) -> TierUsage:
        store = self.tiers[tier]
        num_free = store.num_in[FREE]
        # No state of a block: so many of those free are kept for what sessions are guaranteed.
        num_reserved = min(num_free, self.reservations.num_reserved) if tier is Tier.DEVICE else 0
        return TierUsage(
            tier=tier,
            num_blocks=store.num_blocks,
            num_free_blocks=num_free - num_reserved,
            num_cached_blocks=store.num_in[CACHED],
            num_held_blocks=store.num_held(),
            num_limbo_blocks=store.num_in[RETIRED],
            num_reserved_blocks=num_reserved,
        )
