"""SGLang's storage backend over real planes: pages come back as they were, or are a miss."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from integrations.sglang.tests.stand_ins import HostPool
from kvplane.errors import LayoutMismatchError
from kvplane.integrations.sglang.hicache import KvplaneHiCache, PoolHitPolicy, PoolName
from tests.e2e.engine_planes import Pair, opaque_pair
from tests.helpers.waiting import stopped, wait_until

KINDS = ("tp", "pp", "attn_cp", "dcp")
KEYS = [f"{i:064x}" for i in range(6)]
MODEL_ID = "sglang/qwen/rev-1/bfloat16/layer_first/page4/tp2pp1cp1dcp1"
ALL, TRAILING, GROUPS = PoolHitPolicy
KV, MAMBA, SWA = PoolName.KV, PoolName.MAMBA, PoolName.SWA


@pytest.fixture(scope="module")
def planes() -> Iterator[Pair]:
    with (
        tempfile.TemporaryDirectory() as folder,
        opaque_pair(Path(folder), 192, MODEL_ID, num_device_blocks=256) as planes,
    ):
        yield planes


def backend(
    planes: Pair | None = None, *, settings: dict[str, Any] | None = None, **config: Any
) -> KvplaneHiCache:
    """Make a backend as SGLang's factory does; it is opened when its host pools are registered."""
    given: dict[str, Any] = {"weights": "rev-1", "lookup_s": 20.0, "transfer_s": 20.0}
    if planes is not None:
        given["control_plane"] = planes.control.address
    given |= settings or {}
    usual: dict[str, Any] = {f"{kind}_rank": 0 for kind in KINDS}
    usual |= {f"{kind}_size": 1 for kind in KINDS} | {"tp_size": 2}
    usual |= {"is_mla_model": False, "model_name": "qwen"}
    extra = {"backend_name": "kvplane", "interface_v1": 1, "kvplane": given}
    return KvplaneHiCache(SimpleNamespace(**{**usual, "extra_config": extra, **config}), {})


@contextmanager
def opened(planes: Pair, pools: dict[str, HostPool], **given: Any) -> Iterator[KvplaneHiCache]:
    hicache = backend(planes, **given)
    try:
        hicache.register_mem_pool_host(pools[KV])
        for name, pool in pools.items():
            hicache.register_mem_host_pool_v2(pool, name)
        hicache.on_host_pools_registered()
        yield hicache
    finally:
        hicache.close()


def test_pages_come_back_in_another_process_s_memory_up_to_the_first_that_is_missing(
    planes: Pair,
) -> None:
    ours, theirs = HostPool(), HostPool()
    with opened(planes, {KV: ours}) as hicache:
        assert hicache.batch_exists(KEYS) == 0
        assert hicache.batch_set_v1(KEYS[:3], ours.rows(5, 0, 2)) == [True] * 3
        assert hicache.batch_set_v1([KEYS[4]], ours.rows(7)) == [True]
    with opened(planes, {KV: theirs}) as hicache:
        before = theirs.page(0)
        assert [hicache.batch_exists(KEYS[i:]) for i in range(6)] == [3, 2, 1, 0, 1, 0]
        loaded = hicache.batch_get_v1(KEYS[:5], theirs.rows(1, 2, 3, 0, 4))
        assert loaded == [True, True, True, False, False]
        assert [theirs.page(i) for i in (1, 2, 3)] == [ours.page(i) for i in (5, 0, 2)]
        assert theirs.page(0) == before
        assert hicache.batch_get_v1(KEYS[:2], theirs.rows(1)) == [False, False]
    with opened(planes, {KV: theirs}, tp_rank=1) as other_rank:
        assert other_rank.batch_exists(KEYS) == 0


def test_the_calls_of_a_layer_first_memory(planes: Pair) -> None:
    pool, keys = HostPool(), [f"old-{i}" for i in range(300)]
    with opened(planes, {KV: pool}) as hicache:
        page, other = pool.get_data_page(0), pool.get_data_page(4)
        assert hicache.batch_set(keys[:200], [page] * 200) and hicache.set(keys[1], other)
        before = hicache._cache.counters
        assert hicache.batch_exists(keys) == 200
        asked = [hicache._cache.counters[name] - before[name] for name in ("hits", "misses")]
        assert asked == [200, 56], "nothing is asked for after a look-up with a miss"
        assert not hicache.exists(keys[200])
        rooms = [pool.get_dummy_flat_data_page() for _ in range(2)]
        found = hicache.batch_get([keys[199], keys[200]], rooms)
        assert found[0] is rooms[0] and found[0].tolist() == page.tolist()
        assert found[1] is None and hicache.get(keys[201], rooms[1]) is None


def test_prefixes_of_a_hybrid_model_end_where_each_pool_has_what_it_needs(planes: Pair) -> None:
    pools = {KV: HostPool(), MAMBA: HostPool(page_size=1, head_dim=9), SWA: HostPool(head_dim=3)}
    keys = [f"hybrid-{key}" for key in KEYS]

    def transfer(name: Any, policy: Any, *pages: int) -> Any:
        rows = pools[name].rows(*pages)
        given = [keys[i] for i in pages]
        return SimpleNamespace(name=name, host_indices=rows, keys=given, hit_policy=policy)

    with opened(planes, pools) as hicache:
        given = [transfer(KV, ALL, 0, 1, 2, 3, 4), transfer(SWA, ALL, 0, 1, 2, 4)]
        stored = hicache.batch_set_v2([*given, transfer(MAMBA, TRAILING, 1, 2, 4)])
        assert stored == {KV: [True] * 5, SWA: [True] * 4, MAMBA: [True] * 3}
        for policy, width, (pages, num_swa) in (
            (ALL, 1, ([1, 2, 3], 3)),
            (TRAILING, 1, ([1, 2, 3, 5], 5)),
            (TRAILING, 2, ([1, 2, 3], 3)),
            (GROUPS, 1, ([1, 2, 3, 4, 5], None)),
        ):
            result = hicache.batch_exists_v2(keys, [transfer(SWA, policy, *range(width))])
            assert (result.kv_hit_pages, result.restorable_prefix_pages) == (pages[-1], pages)
            hits = {KV: 5} | ({} if num_swa is None else {SWA: num_swa})
            assert result.extra_pool_hit_pages == hits
        both = [transfer(SWA, TRAILING, 0), transfer(MAMBA, TRAILING, 0)]
        assert hicache.batch_exists_v2(keys, both).restorable_prefix_pages == [2, 3, 5]
        assert hicache.batch_exists_v2(keys).kv_hit_pages == 5
        want = pools[MAMBA].page(4)
        pools[MAMBA].kv.zero_()
        loaded = hicache.batch_get_v2([transfer(MAMBA, TRAILING, 4), transfer(SWA, ALL, 3, 4)])
        assert loaded == {MAMBA: [True], SWA: [False, False]}
        assert pools[MAMBA].page(4) == want


@pytest.mark.parametrize(
    "other",
    [
        *({f"{kind}_{what}": 3} for kind in KINDS for what in ("rank", "size")),
        *({"model_name": "llama"}, {"is_mla_model": True}, {"settings": {"weights": "rev-2"}}),
        *({"dtype": "float16"}, {"layout": "page_first"}, {"page_size": 2}, {"head_dim": 6}),
    ],
    ids=str,
)
def test_pages_of_other_bytes_have_other_names(other: dict[str, Any]) -> None:
    in_pool = {name: other[name] for name in ("dtype", "layout") if name in other}
    made = {name: other[name] for name in ("page_size", "head_dim") if name in other}
    config = {name: value for name, value in other.items() if name not in in_pool | made}
    pool = HostPool(**made)
    for name, value in in_pool.items():
        setattr(pool, name, value)
    ours, theirs = backend(), backend(**config)
    ours.register_mem_pool_host(HostPool())
    theirs.register_mem_pool_host(pool)
    assert ours._names(KV, KEYS) != theirs._names(KV, KEYS)


def test_ranks_share_latents_but_not_a_model_s_state() -> None:
    pool, latents = HostPool(), {"is_mla_model": True}
    ranks = [backend(**latents), backend(**latents, tp_rank=1)]
    for hicache in ranks:
        hicache.register_mem_pool_host(pool)
        hicache.register_mem_host_pool_v2(pool, MAMBA)
    assert len({hicache._names(KV, KEYS)[0] for hicache in ranks}) == 1
    assert len({hicache._names(MAMBA, KEYS)[0] for hicache in ranks}) == 2


def test_what_cannot_be_right_is_refused_at_the_start(planes: Pair) -> None:
    with (
        pytest.raises(LayoutMismatchError, match="model_id"),
        opened(planes, {KV: HostPool()}, settings={"weights": "rev-2"}),
    ):
        pass
    for settings in ({"weights": ""}, {"weight": "rev-1"}):
        with pytest.raises(ValueError, match="weight"):
            backend(settings=settings)
    with opened(planes, {KV: HostPool()}) as hicache:
        with pytest.raises(ValueError, match="swa: pages must have at most 192 bytes"):
            hicache.register_mem_host_pool_v2(HostPool(head_dim=7), SWA)
        with pytest.raises(ValueError, match="swa: has no pages"):
            hicache.register_mem_host_pool_v2(object(), SWA)
        with pytest.raises(NotImplementedError, match="forget"):
            hicache.clear()


def test_a_data_plane_that_hangs_is_a_miss_in_time(planes: Pair) -> None:
    pool = HostPool()
    with opened(planes, {KV: pool}, settings={"lookup_s": 0.3, "transfer_s": 0.3}) as hicache:
        wait_until(lambda: all(hicache.batch_set_v1(["hung"], pool.rows(0))))
        with stopped(planes.data.pid):
            began_s = time.monotonic()
            assert hicache.batch_get_v1(["hung"], pool.rows(1)) == [False]
            assert hicache.batch_exists(["hung"]) == 0, "the breaker is open"
            assert time.monotonic() - began_s < 2
