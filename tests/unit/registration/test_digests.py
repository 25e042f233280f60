"""What a data plane reports again is what it did not report before, by digests of ranges of blocks:
compared with a naive model, which keeps all that was said of each block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest
from registration_messages import LAYOUT, chain, hello, publications

from control_plane.planning.pools.ahead import ReportsAhead
from control_plane.planning.pools.reports import Reports
from control_plane.planning.pools.shards import total_blocks
from data_plane.block_digests import BlockDigests
from data_plane.commands import Commands
from data_plane.counters import ExecutorCounters
from data_plane.kernels.device.cuda_streams import HostStreams
from data_plane.kernels.device.device_watch import DeviceWatch
from data_plane.plans.tables.block_report import block_report
from data_plane.plans.tables.block_tables import BlockTables
from kvplane.errors import InvalidRequestError, QuotaExceededError, StaleEpochError
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import block_digests as wire
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64

DEVICE, HOST = tpb.TIER_DEVICE, tpb.TIER_HOST
# Of three ranges and of two; the last ones are shorter.
NUM_BLOCKS = {DEVICE: 130, HOST: 65}
# On both sides of the ranges' ends.
DEVICE_BLOCKS = [0, 1, 62, 63, 64, 65, 127, 128, 129]
HOST_BLOCKS = [0, 63, 64]


class Plane:
    """A data plane's metadata. ``state``: by the naive model, what a report says of each block."""

    def __init__(self, epoch: int = 11) -> None:
        self.hello = hello(
            epoch=epoch, num_device_blocks=NUM_BLOCKS[DEVICE], num_host_blocks=NUM_BLOCKS[HOST]
        )
        self.tables = BlockTables(NUM_BLOCKS, LAYOUT.block_size_tokens)
        commands = Commands(ExecutorCounters(), DeviceWatch(HostStreams()), None)
        self.digests = BlockDigests(self.tables, commands)
        self.state: dict[tuple[tpb.Tier, int], tuple[Any, ...]] = {}
        self._prompts = count(1)
        self.since = 0

    def allocate(self, tier: tpb.Tier, block: int) -> None:
        generation = self.generation(tier, block) + 1
        self.tables.allocate(tier, np.array([block]), np.array([generation]))
        self.state[tier, block] = (generation,)

    def generation(self, tier: tpb.Tier, block: int) -> int:
        return self.state.get((tier, block), (0,))[0]

    def publish(self, blocks: list[int], tenant: str = "ann", namespace: str = "") -> None:
        """A prompt of its own in these blocks, which have been allocated."""
        size, number = LAYOUT.block_size_tokens, next(self._prompts)
        tokens = range(number * 1000, number * 1000 + size * len(blocks))
        placed = [(block, self.generation(DEVICE, block)) for block in blocks]
        owner = {"tenant": tenant, "namespace": namespace}
        prefixes = chain(tokens, placed, **owner)
        message = publications(prefixes, **owner)
        generations = self.tables.generations[DEVICE]
        assert self.tables.publications[0].keep(message, generations, "it") == len(blocks)
        for prefix in prefixes:
            block, generation = prefix.block
            self.state[DEVICE, block] = (generation, tenant, namespace, *prefix)

    def withdraw(self, block: int) -> None:
        message = pb.WithdrawBlocks(
            indices=columns.pack(INT32, [block]),
            generations=columns.pack(INT64, [self.generation(DEVICE, block)]),
        )
        self.tables.publications[0].withdraw(message, self.tables.generations[DEVICE], "it")
        self.state[DEVICE, block] = self.state[DEVICE, block][:1]

    def change(self, rng: Random) -> None:
        """Anything that plans and control planes do to a block."""
        if rng.random() < 0.2:
            return self.allocate(HOST, rng.choice(HOST_BLOCKS))
        block = rng.choice(DEVICE_BLOCKS)
        held = self.state.get((DEVICE, block), ())
        if len(held) > 1 and rng.random() < 0.5:
            return self.withdraw(block)
        if len(held) == 1 and rng.random() < 0.7:
            return self.publish([block], *rng.choice([("ann", ""), ("bob", ""), ("bob", "x")]))
        return self.allocate(DEVICE, block)

    def exchange(
        self, ahead: ReportsAhead, *, since: int = 0, meanwhile: Callable[[], None] = lambda: None
    ) -> set[tuple[tpb.Tier, int]]:
        """Report what differs. Returns the ranges that were asked for."""
        while self.digests.refresh(1):
            pass
        self.since, parts = self.digests.messages(since)
        asked = None
        for part in parts:
            asked = ahead.compare(self.hello, pb.BlockDigests.FromString(part.SerializeToString()))
        assert asked is not None
        meanwhile()
        for part in block_report(self.tables, 3, asked.ranges):
            ahead.report(self.hello, part)
        return {
            (of.tier, number)
            for of in asked.ranges
            for number in columns.read(INT32, of.ranges, "ranges")
        }


def standing_by(plane: Plane) -> ReportsAhead:
    ahead = ReportsAhead(4, 1000)
    ahead.register(plane.hello, LAYOUT)
    return ahead


def differing(
    one: dict[tuple[tpb.Tier, int], tuple[Any, ...]],
    other: dict[tuple[tpb.Tier, int], tuple[Any, ...]],
) -> set[tuple[tpb.Tier, int]]:
    """The ranges of which the naive model says something else."""
    keys = one.keys() | other.keys()
    return {
        (tier, block // 64)
        for tier, block in keys
        if one.get((tier, block)) != other.get((tier, block))
    }


def built(reports: Reports) -> tuple[list[bytes], list[Any]]:
    """Generations of all blocks, and all that is published, of the pool that is built."""
    (rebuild,) = reports.rebuilds
    rebuild.begin(b"", b"", "lru")
    while not rebuild.step(100):
        pass
    (pool,) = reports.take()
    pool.check_integrity()
    published = sorted(row for run in pool.all_publications(10_000) for row in rows(run))
    return [pool.generations(tier) for tier in NUM_BLOCKS], published


def rows(run: tuple[bytes, ...]) -> list[tuple[bytes, ...]]:
    root, *told = run
    sizes = (4, 8, 4, 8, 16, 4 * LAYOUT.block_size_tokens)
    split = [columns.fixed(column, size) for column, size in zip(told, sizes, strict=True)]
    return [(root, *row) for row in zip(*split, strict=True)]


def from_a_whole_report(plane: Plane) -> Reports:
    reports = Reports(LAYOUT, 1)
    sizes = [NUM_BLOCKS]
    reports.start(0, sizes)
    for part in block_report(plane.tables, 3):
        reports.add(0, sizes, part)
    return reports


@pytest.mark.parametrize("seed", range(8))
def test_what_differs_is_reported_and_nothing_else(seed: int) -> None:
    rng = Random(seed)
    plane = Plane()
    ahead = standing_by(plane)
    told: dict[tuple[tpb.Tier, int], tuple[Any, ...]] = {}
    for _ in range(60):
        for _ in range(rng.randrange(4)):
            plane.change(rng)
        since = plane.since if rng.random() < 0.5 else 0
        assert plane.exchange(ahead, since=since) == differing(plane.state, told)
        told = dict(plane.state)
        plane.tables.check_integrity()
    reports = ahead.take("pool", 1, LAYOUT)
    assert reports is not None
    assert built(reports) == built(from_a_whole_report(plane))


def test_what_changes_before_its_report_is_asked_for_next_time() -> None:
    plane = Plane()
    ahead = standing_by(plane)
    plane.allocate(DEVICE, 5)
    plane.allocate(DEVICE, 70)
    plane.publish([70])

    def change() -> None:
        plane.allocate(DEVICE, 70)
        plane.publish([5])

    assert plane.exchange(ahead, meanwhile=change) == {(DEVICE, 0), (DEVICE, 1)}
    assert plane.exchange(ahead) == set(), "the report said it already"
    plane.withdraw(5)
    assert plane.exchange(ahead, since=plane.since) == {(DEVICE, 0)}
    reports = ahead.take("pool", 1, LAYOUT)
    assert reports is not None
    assert built(reports)[1] == []


@pytest.mark.parametrize("block", DEVICE_BLOCKS)
def test_each_change_of_each_block_is_found(block: int) -> None:
    """Also of the first and the last block of a range."""
    plane = Plane()
    ahead = standing_by(plane)
    plane.exchange(ahead)
    parent = 20
    plane.allocate(DEVICE, parent)
    for change in (
        lambda: plane.allocate(DEVICE, block),
        lambda: plane.publish([block]),
        lambda: plane.withdraw(block),
        lambda: plane.publish([block], "bob"),
        lambda: plane.publish([block], "bob", "x"),
        lambda: plane.publish([parent, block], "bob", "x"),
        lambda: plane.allocate(DEVICE, block),
    ):
        plane.exchange(ahead)
        change()
        assert (DEVICE, block // 64) in plane.exchange(ahead), plane.state[DEVICE, block]


def digest_of(*, generation: int = 2, **changes: Any) -> bytes:
    """Of a range with a publication that is the same but for these fields of its message."""
    plane = Plane()
    plane.digests._salt = bytes(16)
    generations = plane.tables.generations[DEVICE]
    generations[3] = generation
    (prefix,) = chain(range(8), [(3, generation)])
    message = publications([prefix._replace(parent=(5, 1))], **changes)
    assert plane.tables.publications[0].keep(message, generations, "it") == 1
    while plane.digests.refresh(100):
        pass
    digest: bytes = plane.digests.messages(0)[1][0].digests[:16]
    return digest


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": 3},
        {"tenant": "other"},
        {"namespace": "other"},
        {"parent_indices": columns.pack(INT32, [6])},
        {"parent_generations": columns.pack(INT64, [2])},
        {"hashes": bytes(16)},
        {"token_ids": bytes(4 * LAYOUT.block_size_tokens)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_each_part_of_a_publication_counts_by_itself(changes: dict[str, Any]) -> None:
    """Tokens too: their own hash is a fast one, for which a tenant can find equal ones."""
    assert digest_of(**changes) != digest_of() == digest_of()


def test_processes_have_salts_of_their_own() -> None:
    salts = {Plane().digests.messages(0)[1][0].salt for _ in range(4)}
    assert len(salts) == 4


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"salt": bytes(15)}, "salt"),
        ({"tier": 0}, "tier"),
        ({"group": 1}, "tier"),
        ({"first_range": -1}, "first_range"),
        ({"first_range": 1}, "first_range"),
        ({"digests": bytes(16 * 4)}, "first_range"),
        ({"digests": bytes(15)}, "digests"),
        ({"digests": bytes(16 * 257)}, "digests"),
    ],
)
def test_digests_are_refused_when(fields: dict[str, Any], field: str) -> None:
    plane = Plane()
    ahead = standing_by(plane)
    whole = {"salt": bytes(16), "tier": DEVICE, "digests": bytes(16 * 3), "last": True}
    with pytest.raises(InvalidRequestError) as refused:
        ahead.compare(plane.hello, pb.BlockDigests(**{**whole, **fields}))
    assert refused.value.field == f"digests.{field}"


def test_a_later_process_takes_the_place_of_what_an_earlier_one_said() -> None:
    earlier, later = Plane(epoch=11), Plane(epoch=12)
    ahead = standing_by(earlier)
    earlier.allocate(DEVICE, 5)
    earlier.exchange(ahead)
    ahead.register(later.hello, LAYOUT)
    assert later.exchange(ahead) == set(), "neither has anything been said, nor is anything held"
    with pytest.raises(StaleEpochError):
        earlier.exchange(ahead)
    with pytest.raises(StaleEpochError):
        ahead.register(earlier.hello, LAYOUT)
    assert ahead.num_blocks == sum(NUM_BLOCKS.values())


def test_what_is_kept_is_bounded() -> None:
    ahead = ReportsAhead(max_pools=2, max_blocks=400)
    ahead.register(Plane().hello, LAYOUT)
    ahead.register(Plane(epoch=12).hello, LAYOUT)
    other = Plane().hello
    other.pool_id, other.num_device_blocks = "other", 400
    with pytest.raises(QuotaExceededError):
        ahead.register(other, LAYOUT)
    other.num_device_blocks = 1
    ahead.register(other, LAYOUT)
    other.pool_id = "third"
    with pytest.raises(QuotaExceededError):
        ahead.register(other, LAYOUT)


def test_a_pool_of_another_shape_takes_the_place_of_the_one_before() -> None:
    one = Plane().hello
    ahead = ReportsAhead(max_pools=1, max_blocks=total_blocks(one))
    ahead.register(one, LAYOUT)
    ahead.register(Plane(epoch=12).hello, replace(LAYOUT, model_id="another"))
    assert ahead.num_blocks == total_blocks(one)


def test_a_pool_that_is_silent_for_long_is_forgotten() -> None:
    gone, here = Plane().hello, Plane().hello
    here.pool_id = "here"
    ahead = ReportsAhead(max_pools=2, max_blocks=2 * total_blocks(gone))
    for each in (gone, here):
        ahead.register(each, LAYOUT)
        ahead.start(each)
    for now_s in (0.0, 60.0, 99.0):
        ahead.forget_silent(now_s, 100.0)
        ahead.heard(here)
        assert ahead.num_blocks == 2 * total_blocks(gone)
    ahead.forget_silent(100.0, 100.0)
    assert ahead.num_blocks == total_blocks(here)
    with pytest.raises(StaleEpochError):
        ahead.start(gone)
    ahead.start(here)
    ahead.register(gone, LAYOUT)


def test_records_are_those_of_the_native_core() -> None:
    """Byte for byte, as both sides' digests are made of them."""
    plane = Plane()
    for block in (3, 64, 129):
        plane.allocate(DEVICE, block)
    plane.allocate(HOST, 64)
    plane.publish([3, 129], "bob", "x")
    (rebuild,) = from_a_whole_report(plane).rebuilds
    for tier, num in NUM_BLOCKS.items():
        own = plane.digests._records(tier, 0, num)
        assert rebuild.records(0, tier, 0, num) == own
        size = wire.record_bytes(LAYOUT.block_size_tokens, is_device=tier == DEVICE)
        assert len(own) == num * size
    with pytest.raises(IndexError):
        rebuild.records(0, DEVICE, 0, 131)
    with pytest.raises(IndexError):
        rebuild.take_changed(0, DEVICE, 0, 4)
    with pytest.raises(IndexError):
        rebuild.forget(0, HOST, 64, 63)


def test_what_is_forgotten_is_neither_published_nor_known() -> None:
    plane = Plane()
    for block in (3, 64):
        plane.allocate(DEVICE, block)
    plane.publish([3])
    plane.publish([64])
    reports = from_a_whole_report(plane)
    reports.rebuilds[0].forget(0, DEVICE, 0, 64)
    (generations, _), published = built(reports)
    assert columns.read(INT64, generations, "generations")[3] == 0
    assert [columns.read(INT32, row[1], "index")[0] for row in published] == [64]
