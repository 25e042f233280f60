"""A pool that is built from what shards report: of another pool's blocks, in part changed."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from kvplane_blocks import LayerGroup, Pool, Rebuild

from tests.fuzz.pool_world import (
    DEVICE,
    HOST,
    MANY_BLOCKS,
    NUM_BLOCKS,
    OWNERS,
    POLICIES,
    REFUSALS,
    column,
    ints,
    new_core,
    number,
)

if TYPE_CHECKING:
    from atheris import FuzzedDataProvider

Columns = tuple[bytes, bytes, bytes, bytes, bytes, bytes]
MOST_STEPS = 100_000


class Reported(NamedTuple):
    """What a data plane holds: how many blocks of each tier, generations, published blocks."""

    num_blocks: tuple[int, int]
    generations: tuple[bytes, bytes]
    published: list[tuple[bytes, Columns]]


def filled(data: FuzzedDataProvider, block_tokens: int, same: dict[str, Any]) -> LayerGroup:
    """A layer group in which some prompts are cached."""
    group = new_core(data, block_tokens, same)
    pool = Pool([group])
    for i in range(data.ConsumeIntInRange(0, 4)):
        root = data.PickValueInList([*OWNERS])
        handle = pool.open_session(root, OWNERS[root])
        pool.begin(handle, 1)
        begun = column(data, 4, 1, 2) * data.ConsumeIntInRange(1, 16)
        ended = column(data, 4, 1, 2) * data.ConsumeIntInRange(0, 16)
        with suppress(*REFUSALS):
            pool.admit(handle, 1 + i, begun + ended, b"", -1, 0, False, 0)
        pool.finish(handle, b"")
        pool.receipted(handle, pool.last_plan(handle))
        pool.end_session(handle)
        pool.session_fenced(handle)
    return group


def reported(pool: LayerGroup) -> Reported:
    return Reported(
        (pool.usage(DEVICE)[0], pool.usage(HOST)[0]),
        (pool.generations(DEVICE), pool.generations(HOST)),
        [(root, columns) for root, *columns in pool.publications_in(0, 1 << 32)[0]],
    )


class Reports:
    """Shards that report, each what the same pool holds, and more."""

    def __init__(self, data: FuzzedDataProvider, found: Reported, block_tokens: int) -> None:
        self.data, self.found = data, found
        self.num_shards = data.ConsumeIntInRange(1, 3)
        self.rebuild = Rebuild(block_tokens, self.num_shards)

    def changed(self, packed: bytes, width: int) -> bytes:
        """The column; now and then with another element, or with any bytes after it."""
        data = self.data
        kind = data.ConsumeIntInRange(0, 15)
        if kind == 14:
            at = data.ConsumeIntInRange(0, len(packed) // width) * width
            return packed[:at] + column(data, width, 1, 12) + packed[at + width :]
        return packed + data.ConsumeBytes(width) if kind == 15 else packed

    def shard(self) -> int:
        """Nearly always there is such a one."""
        return self.data.ConsumeIntInRange(0, self.num_shards)

    def tell_all(self) -> None:
        for shard in range(self.num_shards):
            self.rebuild.start_shard(shard, *self.found.num_blocks)
            for tier in (DEVICE, HOST):
                self.tell_blocks(shard, tier)
            for root, columns in self.found.published:
                self.tell_published(shard, root, columns)

    def tell_blocks(self, shard: int, tier: int) -> None:
        generations = ints(self.found.generations[tier - 1], 8)
        known = [(i, each) for i, each in enumerate(generations) if each]
        indices = b"".join(i.to_bytes(4, "little") for i, _ in known)
        told = b"".join(each.to_bytes(8, "little") for _, each in known)
        self.rebuild.add_blocks(shard, tier, self.changed(indices, 4), self.changed(told, 8))

    def tell_published(self, shard: int, root: bytes, columns: Columns) -> None:
        widths = (4, 8, 4, 8, 16, 4)
        told = [self.changed(each, width) for each, width in zip(columns, widths, strict=True)]
        self.rebuild.add_publications(shard, root, *told)
        assert self.rebuild.num_roots > 0

    # Calls

    def tell_some(self) -> None:
        if self.found.published:
            root, columns = self.data.PickValueInList(self.found.published)
            self.tell_published(self.shard(), root, columns)

    def tell_tier(self) -> None:
        self.tell_blocks(self.shard(), self.data.ConsumeIntInRange(0, 2) or DEVICE)

    def start_again(self) -> None:
        sizes = [0, 3, NUM_BLOCKS, MANY_BLOCKS, 2**31]
        num_device, num_host = (self.data.PickValueInList(sizes) for _ in range(2))
        self.rebuild.start_shard(self.shard(), num_device, num_host)

    def step_early(self) -> None:
        assert not self.rebuild.step(number(self.data, 3))
        self.rebuild.take()

    CALLS = (tell_some, tell_tier, start_again, step_early)

    def build(self, known: tuple[bytes, bytes], same: dict[str, Any]) -> LayerGroup:
        """The layer group, if all shards have begun."""
        data, rebuild = self.data, self.rebuild
        policy = data.PickValueInList([*POLICIES, *POLICIES, "no such policy"])
        window, now_s = data.PickValueInList([0, 0, 3]), data.PickValueInList([0.0, 7.0])
        rest = {**same, "eviction_policy": policy, "window_tokens": window, "now_s": now_s}
        generations = dict(zip(("device_generations", "host_generations"), known, strict=True))
        rebuild.begin(**generations, **rest)
        most_blocks = data.PickValueInList([1, 2, 1000, 2**63 - 1])
        for _ in range(MOST_STEPS):
            if rebuild.step(most_blocks):
                break
        num_restored = rebuild.num_restored
        pool = rebuild.take()
        assert pool.usage(DEVICE)[2] == num_restored
        return pool


def rebuilt(data: FuzzedDataProvider, block_tokens: int, same: dict[str, Any]) -> LayerGroup | None:
    """One layer group of a pool; None if the shards have not reported all."""
    pool = filled(data, block_tokens, same)
    found = reported(pool)
    known = found.generations
    if data.ConsumeBool():  # the control plane lived on
        pool.outdate(data.ConsumeBool())
        known = pool.generations(DEVICE), pool.generations(HOST)
    reports = Reports(data, found, block_tokens)
    with suppress(*REFUSALS):
        reports.tell_all()
    for _ in range(data.ConsumeIntInRange(0, 6)):
        call = Reports.CALLS[data.ConsumeIntInRange(0, len(Reports.CALLS) - 1)]
        with suppress(*REFUSALS):
            call(reports)
    with suppress(*REFUSALS):
        return reports.build(known, same)
    return None
