"""A pool is built from what its shards report: generations go on, and a prefix is restored only
where every shard holds it, in the very blocks that it names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import pytest

from control_plane.config import CoreConfig
from control_plane.pools.pool import Pool
from control_plane.pools.publications import root_of
from control_plane.registration.registration import Registration
from control_plane.sessions.sessions import Sessions
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.pool_writer import NativeSession, found, generations
from tests.helpers.planning.registration_messages import (
    LAYOUT,
    Prefix,
    blocks,
    chain,
    half,
    hello,
    publications,
    report,
)

DEVICE = tpb.TIER_DEVICE
A, C = range(24), range(200, 208)


class Pools:
    """A control plane's pool of one or two shards, restarted at will."""

    def __init__(self) -> None:
        self.pools: dict[str, Pool] = {}
        self.epochs = itertools.count(1)
        config = CoreConfig(watermark=0.0)
        self.sessions = Sessions(config, incarnation=1, clock=lambda: 0.0)
        self.registration = Registration(
            self.pools, self.sessions, config=config, new_key=lambda: bytes(32)
        )

    @property
    def pool(self) -> Pool:
        return self.pools["pool"]

    def start(
        self, index: int = 0, num_shards: int = 1, *, num_blocks: int = 16
    ) -> tuple[int, int]:
        """A new process of a shard registers. Returns its index and epoch."""
        shard = tpb.Shard(num_shards=1, num_layers=2, num_kv_heads=2)
        said = hello(
            shard=shard if num_shards == 1 else half(index),
            epoch=next(self.epochs),
            num_device_blocks=num_blocks,
        )
        self.registration.register(said)
        return index, said.epoch

    def report(self, process: tuple[int, int], *parts: rpb.BlockReport) -> None:
        for part in parts:
            self.registration.report("pool", *process, part)

    def cached(
        self, tokens: Iterable[int], tenant: str = "default", namespace: str = ""
    ) -> list[int]:
        """The blocks that a prompt finds."""
        root = root_of(LAYOUT.fingerprint, tenant, namespace)
        self.pool.primary.check_integrity()
        return found(self.pool, root, tokens)

    def generations(self) -> list[int]:
        """Of the device blocks."""
        return generations(self.pool)

    def fill(self, num_blocks: int) -> list[int]:
        """Allocate so many blocks, one after the other."""
        session = NativeSession(self.sessions.open(self.pool, cpb.OpenSessionRequest(), "filler"))
        return [session.write([900 + i])[0] for i in range(num_blocks)]


def built_from(*parts: rpb.BlockReport, num_blocks: int = 16) -> Pools:
    """A pool of one shard that reports these parts."""
    pools = Pools()
    pools.report(pools.start(num_blocks=num_blocks), *parts)
    assert pools.pool.ready
    return pools


def test_prefixes_are_found_again_in_the_blocks_and_generations_reported() -> None:
    prefixes = chain(A, [(7, 3), (2, 9), (5, 1)])
    pools = built_from(report({7: 3, 2: 9, 5: 1, 6: 4}, *prefixes))
    assert pools.cached(A) == [7, 2, 5]
    assert pools.cached(A, tenant="other") == pools.cached(A, namespace="lora") == []
    assert [pools.generations()[i] for i in (7, 2, 5, 6, 0)] == [3, 9, 1, 4, 0]


def test_parts_may_come_in_any_order_and_children_before_their_parents() -> None:
    prefixes = chain(A, [(7, 3), (2, 9), (5, 1)])
    first = rpb.BlockReport(publications=[publications(prefixes[::-1])])
    pools = built_from(first, report({7: 3, 2: 9, 5: 1}))
    assert pools.cached(A) == [7, 2, 5]


def test_tenants_and_namespaces_are_restored_apart() -> None:
    owners = [("ann", ""), ("bob", ""), ("bob", "x"), ("a", "nn"), ("an", "n")]
    told = [
        publications(
            chain(C, [(i, 1)], tenant=tenant, namespace=namespace),
            tenant=tenant,
            namespace=namespace,
        )
        for i, (tenant, namespace) in enumerate(owners)
    ]
    everything = rpb.BlockReport(
        blocks=[blocks(dict.fromkeys(range(len(owners)), 1))], publications=told, last=True
    )
    pools = built_from(everything)
    assert [pools.cached(C, *owner) for owner in owners] == [[i] for i in range(len(owners))]


def test_a_child_of_another_tenants_block_is_not_restored() -> None:
    parent, child = chain(A, [(1, 1), (2, 1)])
    told = [publications([parent]), publications([child], tenant="other")]
    pools = built_from(rpb.BlockReport(blocks=[blocks({1: 1, 2: 1})], publications=told, last=True))
    assert pools.cached(A) == [1]
    assert pools.cached(A, tenant="other") == []


@pytest.mark.parametrize(
    "generations",
    [{1: 5, 2: 6, 3: 5}, {1: 6, 2: 5, 3: 5}, {1: 5, 3: 5}],
    ids=["a child's", "a parent's", "not reported"],
)
def test_only_publications_of_the_present_generation_are_restored(
    generations: Mapping[int, int],
) -> None:
    prefixes = chain(A, [(1, 5), (2, 5), (3, 5)])
    pools = built_from(report(generations, *prefixes))
    assert pools.cached(A) == ([1] if generations[1] == 5 else [])


def test_a_parent_is_the_very_block_named_and_of_its_present_generation() -> None:
    first, second = chain(A, [(1, 5), (2, 5)])
    assert built_from(report({1: 5, 2: 5}, first, second._replace(parent=(1, 4)))).cached(A) == [1]
    assert built_from(report({1: 5, 2: 5}, first, second._replace(parent=(3, 5)))).cached(A) == [1]
    assert built_from(report({1: 5, 2: 5}, first, second._replace(parent=(-1, 0)))).cached(A) == [1]
    looped = second._replace(parent=(2, 5))
    assert built_from(report({1: 5, 2: 5}, first, looped)).cached(A) == [1]


def test_a_hash_that_does_not_follow_from_the_tokens_is_not_believed() -> None:
    first, second = chain(A, [(1, 5), (2, 5)])
    assert built_from(report({1: 5, 2: 5}, first, second._replace(hash=bytes(16)))).cached(A) == [1]
    assert built_from(report({1: 5, 2: 5}, first._replace(hash=bytes(16)), second)).cached(A) == []


@pytest.mark.parametrize("change", ["absent", "generation", "parent", "tokens", "tenant"])
def test_a_prefix_is_restored_only_where_all_shards_report_the_same(change: str) -> None:
    prefixes = chain(A, [(1, 5), (2, 5), (3, 5)])
    known = {1: 5, 2: 5, 3: 5}
    changed: list[Prefix] = list(prefixes)
    told = {"tenant": "default"}
    if change == "absent":
        del changed[1]
    elif change == "generation":
        known[2] = 6
    elif change == "parent":
        changed[1] = prefixes[1]._replace(parent=(3, 5))
    elif change == "tokens":
        changed[1] = prefixes[1]._replace(tokens=bytes(32))
    else:
        told["tenant"] = "other"
    pools = Pools()
    processes = [pools.start(i, 2) for i in range(2)]
    pools.report(processes[0], report(dict.fromkeys((1, 2, 3), 5), *prefixes))
    other = rpb.BlockReport(
        blocks=[blocks(known)], publications=[publications(changed, **told)], last=True
    )
    pools.report(processes[1], other)
    assert pools.pool.ready
    assert pools.cached(A) == ([] if change == "tenant" else [1])
    assert pools.generations()[2] == max(known[2], 5)


def test_shards_that_report_the_same_in_another_order_agree() -> None:
    prefixes = chain(A, [(1, 5), (2, 5), (3, 5)])
    pools = Pools()
    for i, order in enumerate((prefixes, prefixes[::-1])):
        process = pools.start(i, 2)
        pools.report(process, report({1: 5, 2: 5, 3: 5}, *order))
    assert pools.cached(A) == [1, 2, 3]


def test_a_shard_that_comes_back_smaller_and_then_larger_loses_no_generation() -> None:
    pools = Pools()
    stays, goes = pools.start(0, 2), pools.start(1, 2)
    held = dict.fromkeys(range(16), 3)
    pools.report(stays, report(held))
    pools.report(goes, report(held))
    for num_blocks in (8, 16):
        process = pools.start(1, 2, num_blocks=num_blocks)
        pools.registration.take_outgoing("pool", 0)
        pools.report(process, report())
        pools.report(stays, report(held if num_blocks == 8 else None))
        assert pools.pool.ready
        assert pools.pool.num_blocks(DEVICE) == num_blocks
    assert pools.generations() == [3] * 16


def test_generations_of_a_process_that_came_in_between_are_final() -> None:
    """The first process holds publications of generations that another has used since."""
    pools = Pools()
    prefixes = chain(A, [(1, 1), (2, 1), (3, 1)])
    pools.report(pools.start(), report({1: 1, 2: 1, 3: 1}, *prefixes))
    pools.report(pools.start(), report())
    assert sorted(pools.fill(16)) == list(range(16))
    pools.report(pools.start(), report({1: 1, 2: 1, 3: 1}, *prefixes))
    assert pools.cached(A) == []
    assert pools.generations()[1:4] == [2, 2, 2]


def test_a_publication_of_a_block_that_the_smallest_shard_lacks_is_left_out() -> None:
    prefixes = chain(A, [(1, 5), (9, 5), (3, 5)])
    pools = Pools()
    large, small = pools.start(0, 2), pools.start(1, 2, num_blocks=8)
    pools.report(large, report({1: 5, 9: 5, 3: 5}, *prefixes))
    pools.report(small, report({1: 5}, prefixes[0]))
    assert pools.cached(A) == [1]


def test_prompts_that_part_are_restored_with_all_their_branches() -> None:
    trunk = [*range(16)]
    first = chain([*trunk, *range(100, 116)], [(1, 1), (2, 1), (3, 1), (4, 1)])
    second = chain([*trunk, *range(200, 216)], [(1, 1), (2, 1), (5, 1), (6, 1)])
    pools = built_from(report(dict.fromkeys(range(1, 7), 1), *first, *second[2:]))
    assert pools.cached([*trunk, *range(100, 116)]) == [1, 2, 3, 4]
    assert pools.cached([*trunk, *range(200, 216)]) == [1, 2, 5, 6]


def test_of_two_blocks_that_claim_one_prefix_one_is_restored_and_no_child_of_the_other() -> None:
    first = chain(A, [(1, 1), (2, 1), (3, 1)])
    second = chain(A, [(4, 1), (5, 1), (6, 1)])
    pools = built_from(report(dict.fromkeys(range(1, 7), 1), *first, *second))
    assert pools.cached(A) in ([1, 2, 3], [4, 5, 6])
    assert pools.pool.usage()[0].num_cached_blocks == 3


def test_restored_prefixes_are_evicted_children_first() -> None:
    prefixes = chain(A, [(0, 1), (1, 1), (2, 1)])
    pools = built_from(report({0: 1, 1: 1, 2: 1}, *prefixes), num_blocks=3)
    assert pools.fill(3) == [2, 1, 0]
