"""The client below all plug-ins: right bytes or a miss, in time, whatever the planes do."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvplane import Execution, ops
from kvplane.errors import LayoutMismatchError
from kvplane.integrations.chunks import ChunkCache, ChunkSettings, Found, namespace_of
from kvplane.integrations.chunks import cache as cache_module
from kvplane.prefixes import Loaded, PrefixLoader
from tests.e2e.engine_planes import Pair, opaque_pair
from tests.helpers.waiting import stopped

PAGE_BYTES, BLOCK = 256, 16
MODEL = "engine/tiny"
PATIENCE_S = 20.0
TOKENS = ops.pack_tokens(range(3 * BLOCK))
PAGES = [memoryview(bytes([i]) * PAGE_BYTES) for i in (1, 2, 3)]
KEYS = [b"a", b"b", b"c"]


@pytest.fixture
def planes() -> Iterator[Pair]:
    with running() as planes:
        yield planes


@contextmanager
def running(*flags: str) -> Iterator[Pair]:
    with (
        tempfile.TemporaryDirectory() as folder,
        opaque_pair(Path(folder), PAGE_BYTES, MODEL, *flags, num_device_blocks=16) as planes,
    ):
        yield planes


@contextmanager
def cache_of(planes: Pair, *, model_id: str = MODEL, **settings: Any) -> Iterator[ChunkCache]:
    usual = {"lookup_s": PATIENCE_S, "transfer_s": PATIENCE_S, "breaker_s": 0.5}
    given = ChunkSettings(control_plane=planes.control.address, **{**usual, **settings})
    cache = ChunkCache(given, model_id=model_id, page_bytes=PAGE_BYTES)
    try:
        cache.open()
        yield cache
    finally:
        cache.close()


def look_up(cache: ChunkCache, *prompts: bytes, namespace: str = "") -> Found:
    found = cache.look_up(namespace, prompts).result(PATIENCE_S)
    assert found is not None
    return found


def rooms(num: int) -> list[memoryview]:
    return [memoryview(bytearray(PAGE_BYTES)) for _ in range(num)]


def store(cache: ChunkCache, namespace: str = "") -> list[bool]:
    return cache.store(namespace, TOKENS, 0, PAGES, KEYS).result(PATIENCE_S)


def test_chunks_of_a_prompt_come_back_as_they_were_and_by_their_own_key(planes: Pair) -> None:
    with cache_of(planes) as cache:
        assert look_up(cache, TOKENS).num_blocks == [0]
        assert store(cache) == [True] * 3
        found = look_up(cache, TOKENS, TOKENS[: 4 * BLOCK], ops.pack_tokens(range(1, 17)))
        assert found.num_blocks == [3, 1, 0]
        into = rooms(2)
        sizes = cache.load(found, [(0, 2), (0, 0)], into, [b"c", b"other"]).result(PATIENCE_S)
        assert (sizes, into[0]) == ([PAGE_BYTES, 0], PAGES[2])
        cache.release(found)
        cache.release(found)
        assert store(cache) == [True] * 3, "it is there already"
        more = ops.pack_tokens(range(4 * BLOCK))
        assert cache.store("", more, 3, PAGES[:1], KEYS[:1]).result(PATIENCE_S) == [True]
        gap = ops.pack_tokens(range(50, 50 + 2 * BLOCK))
        assert cache.store("", gap, 1, PAGES[:1], KEYS[:1]).result(PATIENCE_S) == [False]
        assert look_up(cache, more).num_blocks == [4]
        assert cache.counters["hits"] == 3
        assert cache.counters["failures"] == 0


def test_what_an_engine_stored_last_is_found_by_others_soon(planes: Pair) -> None:
    with cache_of(planes) as cache, cache_of(planes) as other:
        assert store(cache) == [True] * 3
        until(lambda: look_up(other, TOKENS).num_blocks == [3])


def test_named_chunks_are_stored_twice_and_found_once_for_each_name(planes: Pair) -> None:
    names = [b"n" * 36, b"m" * 50, b"x"]
    with cache_of(planes) as cache:
        for _ in range(2):
            done = cache.store_named("", names[:2], PAGES[:2]).result(PATIENCE_S)
            assert done == [True, True]
        found = cache.look_up_named("", names).result(PATIENCE_S)
        assert found is not None
        assert found.num_blocks == [1, 1, 0]
        into = rooms(2)
        keys = [names[1][:64], names[0]]
        sizes = cache.load(found, [(1, 0), (0, 0)], into, keys).result(PATIENCE_S)
        assert (sizes, into) == ([PAGE_BYTES] * 2, [PAGES[1], PAGES[0]])


def test_namespaces_share_nothing_and_the_oldest_of_many_is_opened_again(planes: Pair) -> None:
    with cache_of(planes) as cache:
        for i in range(20):
            assert look_up(cache, TOKENS, namespace=f"salt {i}").num_blocks == [0]
            if i % 10 == 0:
                assert store(cache, f"salt {i}") == [True] * 3
        assert look_up(cache, TOKENS, namespace="salt 0").num_blocks == [3]
        assert look_up(cache, TOKENS).num_blocks == [0]
    parts = [(), (None,), ("",), ("a", "b"), ("ab",), ("a/1:b",), (1,), ("1",), ("a" * 200,)]
    spaces = [namespace_of("base", *each) for each in parts]
    assert len({*spaces}) == len(parts) and max(map(len, spaces)) <= 128


def test_a_pool_of_another_engine_is_refused_when_it_is_opened(planes: Pair) -> None:
    with pytest.raises(LayoutMismatchError, match="model_id"), cache_of(planes, model_id="other"):
        pass


def test_a_full_pool_and_a_full_queue_drop_stores_and_nothing_is_shut(planes: Pair) -> None:
    with cache_of(planes, max_queued_bytes=20 * PAGE_BYTES) as cache:
        names = [f"{i}".encode() for i in range(18)]
        pages = [PAGES[0]] * len(names)
        assert sum(cache.store_named("", names, pages).result(PATIENCE_S)) == 16
        found = cache.look_up_named("", names[:16]).result(PATIENCE_S)
        assert found is not None and sum(found.num_blocks) == 16
        assert cache.store_named("", [b"late"], PAGES[:1]).result(PATIENCE_S) == [False]
        cache.release(found)
        deadline_s = time.monotonic() + PATIENCE_S
        while not cache.store_named("", [b"now"], PAGES[:1]).result(PATIENCE_S)[0]:
            assert time.monotonic() < deadline_s
        assert cache.store_named("", names * 2, pages * 2).result(1) == [False] * 36
        assert cache.counters["failures"] == 0


def test_loads_that_are_slower_than_computing_are_declined_and_tried_again_at_times(
    planes: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_PROBE_S", 4.0)
    monkeypatch.setattr(cache_module, "_PROBED_S", 2.0)

    def looked(cache: ChunkCache) -> bool:
        found = cache.look_up("", [TOKENS]).result(PATIENCE_S)
        if found is not None:
            assert found.num_blocks == [3]
            assert cache.load(found, [(0, 0)], rooms(1)).result(PATIENCE_S) == [PAGE_BYTES]
            cache.release(found)
        return found is not None

    with cache_of(planes) as cache:
        assert store(cache) == [True] * 3
        assert all(looked(cache) for _ in range(3))
    with cache_of(planes, break_even_bytes_per_s=1.0) as cache:
        assert all(looked(cache) for _ in range(3))
    with cache_of(planes, break_even_bytes_per_s=1e15) as cache:
        assert looked(cache), "nothing is known of its speed"
        until(lambda: not looked(cache))
        assert cache.counters["misses_slow"] >= 1
        names = [b"name"]
        assert cache.store_named("", names, PAGES[:1]).result(PATIENCE_S) == [True]
        known = cache.look_up_named("", names, to_load=False).result(PATIENCE_S)
        assert known is not None and known.num_blocks == [1], "it is not stored again"
        until(lambda: looked(cache))
        assert looked(cache), "an engine asks whether there is something, and then loads it"
        assert cache.counters["failures"] == 0


def test_a_look_up_s_plan_is_started_before_that_of_a_later_store(
    planes: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Execution.start

    async def start_late(self: Execution, plan: Any, **given: Any) -> None:
        await asyncio.sleep(0.3)
        await start(self, plan, **given)

    monkeypatch.setattr(Execution, "start", start_late)
    with cache_of(planes) as cache:
        assert store(cache) == [True] * 3
        assert store(cache) == [True] * 3, "whose plan is aborted: the next step's says so"
        looking = cache.look_up("", [TOKENS])
        storing = cache.store_named("", [b"name"], PAGES[:1])
        assert (storing.result(PATIENCE_S), cache.counters["failures"]) == ([True], 0)
        assert looking.result(PATIENCE_S) is not None


@pytest.mark.parametrize("plane", ["data", pytest.param("control", marks=pytest.mark.nightly)])
def test_a_plane_that_hangs_is_a_miss_in_time_and_is_used_again(plane: str) -> None:
    with running() as planes, cache_of(planes, lookup_s=0.3, transfer_s=0.3) as cache:
        until(lambda: store(cache) == [True] * 3)
        until(lambda: cache.look_up("", [TOKENS]).result(PATIENCE_S) is not None)
        found = look_up(cache, TOKENS)
        with stopped(getattr(planes, plane).pid):
            began_s = time.monotonic()
            loaded = cache.load(found, [(0, 0)], rooms(1)).result(PATIENCE_S)
            looked = cache.look_up("", [TOKENS]).result(PATIENCE_S)
            assert time.monotonic() - began_s < 1.5
            assert loaded == [0] if plane == "data" else looked is None
            assert cache.look_up("", [TOKENS]).result(0.2) is None, "the breaker is open"
        until(lambda: cache.look_up("", [TOKENS]).result(PATIENCE_S) is not None)
        assert look_up(cache, TOKENS).num_blocks == [3]


def test_an_engine_starts_without_planes_and_finds_them_later() -> None:
    with running() as planes:
        address = planes.control.address
    began_s = time.monotonic()
    settings = ChunkSettings(control_plane=address, connect_s=0.3, breaker_s=0.3)
    cache = ChunkCache(settings, model_id=MODEL, page_bytes=PAGE_BYTES)
    cache.open()
    assert cache.look_up("", [TOKENS]).result(PATIENCE_S) is None
    assert store(cache) == [False] * 3
    assert time.monotonic() - began_s < 3
    cache.close()


@pytest.mark.parametrize(
    ("transfer_s", "num_blocks"),
    [(PATIENCE_S, 3), pytest.param(0.5, 0, marks=pytest.mark.nightly)],
)
def test_missing_blocks_are_read_from_files_and_slow_files_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transfer_s: float, num_blocks: int
) -> None:
    load = PrefixLoader.load

    async def load_slowly(self: PrefixLoader, tokens: bytes) -> Loaded:
        await asyncio.sleep(2)
        return await load(self, tokens)

    files = ("--file-tier-dir", str(tmp_path), "--file-tier-bytes", "1000000")
    files = (*files, "--file-tier-after", "1")
    with running(*files) as planes, cache_of(planes) as cache:
        assert store(cache) == [True] * 3
        until(lambda: sum(each.is_file() for each in tmp_path.rglob("*")) >= 3)
    monkeypatch.setattr(PrefixLoader, "load", load_slowly)
    with running(*files) as planes, cache_of(planes, lookup_s=1.0, transfer_s=transfer_s) as cache:
        assert look_up(cache, TOKENS).num_blocks == [num_blocks]
        assert cache.counters["failures"] == 0


def test_names_are_read_from_files_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("--file-tier-dir", str(tmp_path), "--file-tier-bytes", "1000000")
    files = (*files, "--file-tier-after", "1")
    names = [b"name-%d" % i for i in range(8)]
    with running(*files) as planes, cache_of(planes) as cache:
        assert cache.store_named("", names, PAGES[:1] * 8).result(PATIENCE_S) == [True] * 8
        until(lambda: sum(each.is_file() for each in tmp_path.rglob("*")) > 8)  # and a lock
    monkeypatch.delattr(PrefixLoader, "load")  # one after another
    with running(*files) as planes, cache_of(planes) as cache:
        found = cache.look_up_named("", [*names, b"other"]).result(PATIENCE_S)
        assert found is not None and found.num_blocks == [1] * 8 + [0]


def test_settings_are_read_from_an_engine_s_json() -> None:
    given = ChunkSettings.from_mapping({"pool_id": "p", "lookup_s": 1, "ca": "ca.pem"})
    assert (given.pool_id, given.lookup_s, given.tls is not None) == ("p", 1, True)
    for wrong in ({"pool": "p"}, {"lookup_s": "1"}, {"max_queued_bytes": 0}, {"ca": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ChunkSettings.from_mapping(wrong)


def until(holds: Any) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, "it never holds"
        time.sleep(0.05)
