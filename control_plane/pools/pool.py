"""One pool: its shards, and the native cores that keep the metadata of its blocks, one for each
layer group.

    register ──► report ──► (all reported, old sessions fenced) ──► built ──► ready
       ▲                                                             │ while all are connected
       └──────────── a shard registers with a new epoch ◄────────────┘

Sessions refer to their pool; the pool knows only those that have ended. Each build makes a new
core: generations, counters and the revision continue from the one before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from kvplane_blocks import LayerGroup
from kvplane_blocks import Pool as NativePool

from control_plane import limits
from control_plane.config import CoreConfig
from control_plane.pools.publications import (
    MAX_PUBLICATIONS,
    owner_of,
    publish_message,
    withdraw_message,
)
from control_plane.pools.reports import TIERS
from control_plane.pools.shards import EndedSession, PoolShards
from control_plane.pools.statistics import (
    BlockTimes,
    PoolCounters,
    PoolStatistics,
    read_block_times,
)
from kvplane.errors import PoolNotReadyError, QuotaExceededError
from kvplane.layout import Layout
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import pool_pb2 as ppb
from kvplane.wire.v1 import types_pb2 as tpb

_DEVICE: Final = tpb.TIER_DEVICE
_HOST: Final = tpb.TIER_HOST
_RETRY_DELAY_S: Final = 0.5
_MAX_TENANTS: Final = 65_536
_MAX_WITHDRAWN: Final = 65_536  # blocks in one message
_SLICE_ENTRIES: Final = 10_000  # freed at once: a few milliseconds
_COUNTERS: Final = PoolCounters._fields
_MAXIMUM: Final = _COUNTERS.index("max_held_blocks")  # does not add up
_OF_TOKENS: Final = [i for i, name in enumerate(_COUNTERS) if name.endswith("_tokens")]


class Watcher(Protocol):
    """A stream that is sent the changes of the prefix index."""

    wake: Callable[[], None]
    """Called when the index has changed."""


class Pool:
    """State of one pool: its shards and the native core that keeps its blocks. Registration, steps
    and publication are in other modules.
    """

    groups: list[LayerGroup]
    """The native core of each layer group."""
    native: NativePool
    """The native core that runs operations in all layer groups together."""
    primary: LayerGroup
    """The layer group that decides, outside of sessions, whether a prefix is cached: the first
    without an attention window, in which a prefix is whole.
    """

    def __init__(self, pool_id: str, shards: PoolShards, config: CoreConfig) -> None:
        self.id = pool_id
        self.shards = shards
        self.built = False
        self.is_building = False
        self.is_forgetting = False
        self.abandoned_s: float | None = None  # since when
        self.now_s = 0.0
        self.statistics = PoolStatistics()
        self._config = config
        self._owners: dict[str, int] = {}
        self._roots: dict[str, set[bytes]] = {}  # by tenant; some may not be in use any more
        self.releasing: deque[EndedSession] = deque()  # ended sessions that still have sequences
        self.watchers: set[Watcher] = set()
        self._keeps_changes = False
        self._followed_revision = 0
        self._has_forgotten = False  # since the shards were told to withdraw blocks
        self._earlier_counters = [0] * len(_COUNTERS)  # of the cores before this one
        self._earlier_times: list[float] = []
        self._earlier_revision = 1  # watchers say 0 where they have none
        self._usage: list[tpb.TierUsage] = []
        self._counted: dict[int, tuple[int, ...]] = {}
        self.groups = []
        self._use(self._made([dict.fromkeys(TIERS, 0)] * len(shards.layout.groups)))

    @property
    def key(self) -> bytes:
        """The key that signs the pool's plans, grants and receipts."""
        return self.shards.key

    @property
    def layout(self) -> Layout:
        """Return the layout that each shard registered with."""
        return self.shards.layout

    @property
    def epochs(self) -> list[int]:
        """The shards' epochs, by shard index."""
        return self.shards.epochs

    @property
    def block_size(self) -> int:
        """Number of token slots in a block."""
        return self.layout.block_size_tokens

    @property
    def ready(self) -> bool:
        """Says whether sessions can be opened."""
        return self.built and self.shards.are_connected and not self.silent_shards

    @property
    def silent_shards(self) -> set[int]:
        """Indices of shards that neither receipted a plan in time nor fenced its session since."""
        last_s = self.now_s - limits.RECEIPT_TIMEOUT_S
        return {
            shard
            for ended in self.shards.ended.values()
            if ended.lacks_receipt and ended.ended_s <= last_s
            for shard in ended.unfenced_shards
        }

    @property
    def has_work(self) -> bool:
        """Return whether ``work`` has something to do: building the pool, freeing forgotten
        entries, or releasing sequences of ended sessions.
        """
        return self.is_building or self.is_forgetting or bool(self.releasing)

    @property
    def has_announcements(self) -> bool:
        """Return whether there are publications or withdrawals to send to shards."""
        return self._has_forgotten or any(
            core.has_publications or core.has_withdrawn for core in self.groups
        )

    def num_blocks(self, tier: tpb.Tier) -> int:
        """Return how many blocks of a tier the layer group with the fewest has; 0 until built."""
        return self.native.usage(tier)[0]

    # Builds

    def close(self) -> None:
        """Drop all metadata until the pool is built again. Its sessions have ended. A report of
        what was forgotten does not count then: its blocks get other generations.
        """
        if self.built:
            for core in self.groups:
                core.outdate(self.is_forgetting)
        self.built = self.is_building = False
        self._earlier_revision += 1
        self.set_tiers(*(dict.fromkeys(TIERS, 0) for _ in self.layout.groups))

    def set_tiers(self, *num_blocks: dict[tpb.Tier, int]) -> None:
        """Start with an empty pool that has the shards' numbers of blocks for each layer group and
        tier. All blocks are free, and keep their known generations.
        """
        self._adopt(self._made(num_blocks))

    def begin_build(self) -> None:
        """Begin to build the native cores from the reports of all shards."""
        self.is_building = True
        for group, rebuild in enumerate(self.shards.reports.rebuilds):
            rebuild.begin(self.now_s, **self._settings(group))

    def end_build(self) -> None:
        """Replace the native cores by those that were built from reports."""
        self._adopt(self.shards.reports.take())
        self.is_building, self.built = False, True

    def _made(self, num_blocks: Sequence[dict[tpb.Tier, int]]) -> list[LayerGroup]:
        size = self.block_size
        return [
            LayerGroup(size, of_group[_DEVICE], of_group[_HOST], **self._settings(group))
            for group, of_group in enumerate(num_blocks)
        ]

    @property
    def lease_s(self) -> float:
        """How long a session's lease runs, and a pin of it."""
        return self._config.lease_s

    def _settings(self, group: int) -> dict[str, Any]:
        """Return the settings of a core that continues the generations of the present one,
        including those of blocks that a smaller shard lacks: a shard that kept running must never
        see a generation again.
        """
        config, present = self._config, self.groups[group : group + 1]
        device, host = (b"".join(core.generations(tier) for core in present) for tier in TIERS)
        return {
            "device_generations": device,
            "host_generations": host,
            "eviction_policy": config.eviction_policy,
            "window_tokens": self.layout.groups[group].sliding_window_tokens,
            "holds_states": group == self.layout.state_group,
            "max_sequences": config.max_sequences,
            "max_table_entries": config.max_table_entries,
            "max_pinned_blocks": config.max_pinned_blocks,
            "max_owner_blocks": config.max_tenant_blocks,
        }

    def _adopt(self, groups: list[LayerGroup]) -> None:
        self._earlier_counters = self._count()
        self._earlier_times = self._block_times()
        self._earlier_revision += self.primary.revision
        self.releasing.clear()
        self.shards.ended = {ended.ref.session_id: ended for ended in self.shards.unfenced()}
        for ended in self.shards.ended.values():
            ended.handle, ended.is_released, ended.lacks_receipt = None, True, False
        self.is_forgetting = False
        self._use(groups)
        self._roots.clear()
        for root in self.roots():
            self._roots.setdefault(owner_of(root)[0], set()).add(root)
        self._keeps_changes = False
        if self.watchers:
            self.keep_changes()
        self.set_time(self.now_s)

    def _use(self, groups: list[LayerGroup]) -> None:
        self.groups = groups
        self.native = NativePool(groups)
        self.primary = groups[self.layout.whole_group]
        self._counted.clear()
        self._usage = [
            tpb.TierUsage(tier=tier, group=group) for group in range(len(groups)) for tier in TIERS
        ]

    def _count(self) -> list[int]:
        """Return the sums of all cores' counters. Tokens are counted in the first layer group
        alone.
        """
        counted = list(self._earlier_counters)
        for group, core in enumerate(self.groups):
            for i, value in enumerate(core.counters()):
                if i == _MAXIMUM:
                    counted[i] = max(counted[i], value)
                elif group == 0 or i not in _OF_TOKENS:
                    counted[i] += value
        return counted

    def roots(self) -> list[bytes]:
        """Return the roots (tenant and namespace) that have cached blocks or open sessions."""
        if len(self.groups) == 1:
            return self.groups[0].roots()
        return list(dict.fromkeys(root for core in self.groups for root in core.roots()))

    def set_time(self, now_s: float) -> None:
        """Set the clock of the pool and its cores. ``now_s``: monotonic seconds."""
        self.now_s = now_s
        for core in self.groups:
            core.set_time(now_s)

    # Room

    def num_retainable_blocks(self) -> int:
        """Return how many device blocks a tenant may retain, that is protect from eviction."""
        return int(self._config.max_retained_share * self.num_blocks(_DEVICE))

    # Sessions

    def require_can_open(self, tenant: str, root: bytes) -> None:
        """Raise PoolNotReadyError or QuotaExceededError if no session of the root can be opened."""
        most = limits.MAX_UNFENCED_SESSIONS
        if len(self.shards.ended) >= most:
            raise PoolNotReadyError(
                f"data planes of pool {self.id!r} have not stopped {most} sessions that ended",
                retry_delay_s=_RETRY_DELAY_S,
            )
        most = limits.MAX_TENANT_NAMESPACES
        roots = self._roots.setdefault(tenant, set())
        if root not in roots and len(roots) >= most:
            roots.intersection_update(self.roots())
        if root not in roots and len(roots) >= most:
            raise QuotaExceededError(
                f"{most} namespaces are in use: end the sessions of one and forget its contents",
                field="namespace",
            )
        roots.add(root)

    def require_built(self) -> None:
        """Raise PoolNotReadyError while shards have blocks that they have not reported."""
        if not self.built:
            raise PoolNotReadyError(
                f"not all data planes of pool {self.id!r} have reported their blocks",
                retry_delay_s=_RETRY_DELAY_S,
            )

    def owner(self, tenant: str) -> int:
        """Return the number by which the cores know the tenant. Raises QuotaExceededError."""
        owner = self._owners.setdefault(tenant, len(self._owners))
        if owner >= _MAX_TENANTS:
            del self._owners[tenant]
            raise QuotaExceededError(f"{_MAX_TENANTS} tenants have used the pool: restart it")
        return owner

    def num_owned(self, tenant: str) -> int:
        """Return how many device blocks tables of the tenant's sessions refer to, of all groups."""
        return sum(group.num_owned(self.owner(tenant)) for group in self.groups)

    # Publications

    def announce(self) -> None:
        """Queue publications and withdrawals for the shards, for a few milliseconds at most."""
        for group, core in enumerate(self.groups):
            if published := core.take_publications(MAX_PUBLICATIONS):
                self.shards.send([publish_message(run, group) for run in published])
            if core.has_withdrawn:
                indices, generations = core.take_withdrawn(_MAX_WITHDRAWN)
                self.shards.send([withdraw_message(indices, generations, group)])
        self._has_forgotten = False
        if not self.is_forgetting and not any(core.has_withdrawn for core in self.groups):
            self.shards.withdrawn()

    def forget_some(self) -> None:
        """Free index entries of forgotten prefixes, for a few milliseconds at most."""
        self._has_forgotten = True
        self.is_forgetting = any(core.forget_some(_SLICE_ENTRIES) for core in self.groups)
        if not self.is_forgetting:  # they may wait for it
            for watcher in self.watchers:
                watcher.wake()

    def missed(self, group: int, first_block: int) -> tuple[list[rpb.RegisterResponse], int]:
        """Return messages that a resumed shard may have missed about the group's device blocks from
        ``first_block`` on: publications and withdrawals, of a megabyte at most. Also returns the
        first block of the rest, 0 when there are none left.
        """
        core = self.groups[group]
        published, indices, generations, end = core.publications_in(
            first_block, first_block + MAX_PUBLICATIONS
        )
        messages = [publish_message(run, group) for run in published]
        if indices:
            messages.append(withdraw_message(indices, generations, group))
        return messages, end if end < core.usage(_DEVICE)[0] else 0

    # Descriptions

    def revision(self) -> int:
        """Return the revision of the prefix index: the number of changes to it so far, plus 1."""
        return self._earlier_revision + self.primary.revision

    def revision_of(self, native_revision: int) -> int:
        """Convert a revision of the present native core to the pool's."""
        return self._earlier_revision + native_revision

    def native_revision_of(self, revision: int) -> int:
        """Convert a pool's revision to the present core's; negative for one of an earlier core."""
        return revision - self._earlier_revision

    def add_watcher(self, watcher: Watcher) -> None:
        """Register a watcher, which takes the present contents itself; later changes wake it."""
        if not self.watchers:
            self._followed_revision = self.revision()
        self.watchers.add(watcher)
        self.keep_changes()

    def keep_changes(self) -> None:
        """Start to log the changes of the index, which watchers read."""
        if not self._keeps_changes:
            self.primary.watch_enable(limits.NUM_KEPT_CHANGES)
            self._keeps_changes = True

    def wake_watchers(self) -> None:
        """Wake all watchers if the index has changed since the last call."""
        revision = self.revision()
        if revision != self._followed_revision:
            self._followed_revision = revision
            for watcher in self.watchers:
                watcher.wake()

    def usage(self) -> list[tpb.TierUsage]:
        """Return how many blocks of each tier and group are in each state; messages are reused."""
        for i, message in enumerate(self._usage):
            counted = self.groups[message.group].usage(message.tier)
            if self._counted.get(i) != counted:
                self._counted[i] = counted
                (
                    message.num_blocks,
                    message.num_free_blocks,
                    message.num_cached_blocks,
                    message.num_held_blocks,
                    message.num_retired_blocks,
                ) = counted
        return self._usage

    def counters(self) -> PoolCounters:
        """Return the counters of what the pool has done since it registered."""
        return PoolCounters(*self._count())

    def block_times(self) -> dict[tpb.Tier, BlockTimes]:
        """Return, by tier, how long blocks were cached and waited since the pool registered."""
        return read_block_times(self._block_times())

    def _block_times(self) -> list[float]:
        times = [group.block_times() for group in self.groups]
        if self._earlier_times:
            times.append(self._earlier_times)
        return [sum(values) for values in zip(*times, strict=True)]

    def info(self) -> ppb.GetPoolResponse:
        """Return the pool's description for GetPool."""
        return ppb.GetPoolResponse(
            layout=self.layout.to_proto(),
            shards=self.shards.infos(),
            ready=self.ready,
            usage=self.usage(),
        )
