"""One pool: its shards, its two tiers of blocks, its prefix index, the sessions that lease from it.

    register ──► report ──► (all shards reported, old sessions quit everywhere) ──► built ──► ready
       ▲                                                                             │ while all
       └──────────────── a shard registers with a new epoch ◄────────────────────────┘ are connected

Invariants: ``num_guaranteed`` and ``num_promised`` are the sums over sessions of ``guarantee`` and
``shortfall``; a session that ended is in ``fenced`` until every shard has quit it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Final

from control_plane.blocks.block_store import CACHED, ENDED, FREE, LIMBO, BlockTier
from control_plane.blocks.prefix_index import Entry, PrefixIndex, parent_hash
from control_plane.planning.model import (
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
from control_plane.planning.publish import Published
from control_plane.planning.session import Session

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
        self.sessions: dict[int, Session] = {}
        self.fenced: dict[int, set[int]] = {}  # ended session -> shards that have not quit it
        self.counters = PoolCounters()
        self.num_guaranteed = 0
        self.num_promised = 0
        self.built = False
        self.index = PrefixIndex(self.layout.block_size_tokens)
        self.tiers: dict[Tier, BlockTier] = {}
        # Generations outlive a rebuild: a shard that went on must not see one again.
        self.generations: dict[Tier, list[int]] = {Tier.DEVICE: [], Tier.HOST: []}
        self._watermark = watermark
        self.set_tiers(PrefixIndex(self.layout.block_size_tokens), self.generations)

    @property
    def block_size(self) -> int:
        """Token slots of a block."""
        return self.layout.block_size_tokens

    @property
    def host(self) -> BlockTier:
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

    def set_tiers(self, index: PrefixIndex, generations: dict[Tier, list[int]]) -> None:
        """Start over with these blocks, all of them free, and what ``index`` will find."""
        self.index = index
        self.generations = generations
        self.tiers = {
            tier: BlockTier(tier, generations[tier], index, self.counters) for tier in Tier
        }
        self.device = self.tiers[Tier.DEVICE]  # the tier that attention reads

    # Room

    def num_available(self, session: Session, tier: Tier) -> int:
        """Blocks that the session may take now, what others are promised left aside."""
        num_obtainable = self.tiers[tier].num_obtainable(session.id)
        if tier is Tier.DEVICE:
            num_obtainable -= self.num_promised - session.shortfall
        return num_obtainable

    def num_watermark_blocks(self) -> int:
        """Device blocks that admissions leave free while anything is held."""
        return int(self._watermark * self.device.num_blocks) if self.device.num_held() else 0

    # Ends of sessions

    def end(self, session: Session) -> None:
        """All the session's tables go. Its blocks stay in limbo until every shard has quit it."""
        for sequence in list(session.sequences.values()):
            session.drop(sequence.tier, sequence.table[::-1], ENDED)
            sequence.table = []
            session.remove(sequence)
        for record in session.plans.values():
            self.unpin(record.pins, session.id, ENDED)
        session.plans.clear()
        del self.sessions[session.id]
        self.fenced[session.id] = set(self.shards)
        for shard in self.shards.values():
            if shard.connected:
                shard.outgoing.append(Fence(session.id))

    def unpin(self, pins: list[tuple[BlockTier, int]], session_id: int, plan: int) -> None:
        """Transfers that read these blocks are given up, but may run until ``plan`` has."""
        for tier, block in reversed(pins):
            tier.fence([block], session_id, plan)
            tier.unpin([block])

    def quit(self, session_id: int, shard_index: int) -> None:
        """The shard will never again run a plan of the ended session."""
        waiting = self.fenced.get(session_id)
        if waiting is None:
            return
        waiting.discard(shard_index)
        if not waiting:
            del self.fenced[session_id]
            for tier in self.tiers.values():
                tier.lift(session_id, ENDED)

    # Publications

    def announce(self, published: list[Published]) -> None:
        """Queue publications for every connected shard; others hear of all on coming back."""
        if not published:
            return
        messages = self._publications(published)
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
        by_tenant: dict[str, list[Entry]] = {}
        for tenant, entry in self.index.published():
            by_tenant.setdefault(tenant, []).append(entry)
        shard.outgoing.extend(self._publications(list(by_tenant.items())))

    def _publications(self, published: list[Published]) -> list[PublishBlocks]:
        by_tenant: dict[str, list[Entry]] = {}
        for tenant, entries in published:
            by_tenant.setdefault(tenant, []).extend(entries)
        return [
            PublishBlocks(self._columns(tenant, entries[i : i + _MAX_PUBLICATIONS]))
            for tenant, entries in by_tenant.items()
            for i in range(0, len(entries), _MAX_PUBLICATIONS)
        ]

    def _columns(self, tenant: str, entries: list[Entry]) -> Publications:
        return Publications(
            tenant=tenant,
            blocks=self.device.refs([entry.block for entry in entries]),
            parent_hashes=[parent_hash(entry) for entry in entries],
            hashes=[entry.hash for entry in entries],
            token_ids=[entry.tokens for entry in entries],
        )

    # What it tells

    def usage(self) -> tuple[TierUsage, ...]:
        """How the blocks of each tier are used."""
        return tuple(self._tier_usage(self.tiers[tier]) for tier in Tier)

    def info(self) -> PoolInfo:
        """What DescribePool answers with."""
        return PoolInfo(
            pool_id=self.id,
            layout=self.layout,
            shards=tuple(self.shards[i].info() for i in sorted(self.shards)),
            ready=self.ready,
            usage=self.usage(),
            num_sessions=len(self.sessions),
            num_sequences=sum(len(session.sequences) for session in self.sessions.values()),
            counters=replace(self.counters),
        )

    def _tier_usage(self, tier: BlockTier) -> TierUsage:
        num_free = tier.num_in[FREE]
        num_reserved = min(num_free, self.num_promised) if tier.tier is Tier.DEVICE else 0
        return TierUsage(
            tier=tier.tier,
            num_blocks=tier.num_blocks,
            num_free_blocks=num_free - num_reserved,
            num_cached_blocks=tier.num_in[CACHED],
            num_held_blocks=tier.num_held(),
            num_limbo_blocks=tier.num_in[LIMBO],
            num_reserved_blocks=num_reserved,
        )
