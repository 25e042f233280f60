"""LMCache's L2 adapter over real planes: locked objects come back as they were, or are a miss."""

from __future__ import annotations

import os
import select
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from integrations.lmcache.tests.stand_ins import MemoryObj, Meta, ObjectKey
from kvplane.errors import LayoutMismatchError
from kvplane.integrations.lmcache.l2_adapter import KvplaneL2
from tests.e2e.engine_planes import Pair, opaque_pair
from tests.helpers.waiting import stopped, wait_until

PAGE_BYTES, NUM_BLOCKS = 192, 16
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def planes() -> Iterator[Pair]:
    with (
        tempfile.TemporaryDirectory() as folder,
        opaque_pair(
            Path(folder), PAGE_BYTES, "lmcache/rev-1", num_device_blocks=NUM_BLOCKS
        ) as planes,
    ):
        yield planes


@contextmanager
def adapter_of(planes: Pair, **given: Any) -> Iterator[KvplaneL2]:
    params: dict[str, Any] = {"weights": "rev-1", "page_bytes": PAGE_BYTES}
    params |= {"lookup_s": PATIENCE_S, "transfer_s": PATIENCE_S, "breaker_s": 0.5}
    adapter = KvplaneL2(params | {"control_plane": planes.control.address} | given)
    try:
        yield adapter
    finally:
        adapter.close()


def result_of(event: int, query: Callable[[], Any]) -> Any:
    """Wait for the event, as LMCache's threads do, and take the result."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (result := query()) in (None, {}):
        assert select.select([event], [], [], max(0.0, deadline_s - time.monotonic()))[0]
        os.eventfd_read(event)
    return result


def store(adapter: KvplaneL2, keys: list[ObjectKey], objects: list[MemoryObj]) -> Any:
    task = adapter.submit_store_task(keys, objects)
    done = result_of(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    assert done.keys() == {task} and adapter.pop_completed_store_tasks() == {}
    return done[task]


def lock(adapter: KvplaneL2, keys: list[ObjectKey]) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, {})
    query = adapter.query_lookup_and_lock_result
    hits = result_of(adapter.get_lookup_and_lock_event_fd(), lambda: query(task))
    assert query(task) is None
    return [hits.test(i) for i in range(len(keys))]


def load(adapter: KvplaneL2, keys: list[ObjectKey], objects: list[MemoryObj]) -> list[bool]:
    task = adapter.submit_load_task(keys, objects)
    whole = result_of(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    assert adapter.query_load_result(task) is None
    return [whole.test(i) for i in range(len(keys))]


def objects_of(*sizes: int, fill: int = 0) -> list[MemoryObj]:
    return [MemoryObj(bytearray([fill and fill + i] * size)) for i, size in enumerate(sizes)]


def keys_of(test: str, num: int, **parts: Any) -> list[ObjectKey]:
    return [ObjectKey(f"{test}-{i}".encode(), **parts) for i in range(num)]


def test_objects_of_groups_and_salts_come_back_in_another_process(planes: Pair) -> None:
    keys = [*keys_of("both", 2), *keys_of("both", 1, object_group_id=1, cache_salt="ann")]
    stored = objects_of(PAGE_BYTES, PAGE_BYTES, 100, fill=7)
    with adapter_of(planes) as adapter:
        assert store(adapter, keys, stored).bytes_transferred() == 2 * PAGE_BYTES + 100
    others = [
        ObjectKey(b"both-2"),
        *(ObjectKey(b"both-0", **other) for other in ({"kv_rank": 1}, {"model_name": "llama"})),
        *(ObjectKey(b"both-0", **other) for other in ({"object_group_id": 1}, {"cache_salt": "b"})),
    ]
    with adapter_of(planes) as adapter:
        assert lock(adapter, [*keys, *others]) == [True] * 3 + [False] * 5
        room = objects_of(PAGE_BYTES, PAGE_BYTES, 100, PAGE_BYTES)
        assert load(adapter, [*keys, others[0]], room) == [True] * 3 + [False]
        assert [each.data for each in room[:3]] == [each.data for each in stored]
        adapter.submit_unlock([*keys, others[0]])
        assert not adapter._locks
        assert load(adapter, keys, room) == [False] * 3, "nothing is locked"
        fds = {adapter.get_store_event_fd(), adapter.get_load_event_fd()}
        assert len(fds | {adapter.get_lookup_and_lock_event_fd()}) == 3


def test_another_size_or_format_of_memory_is_not_loaded(planes: Pair) -> None:
    keys = keys_of("format", 1)
    with adapter_of(planes) as adapter:
        assert store(adapter, keys, objects_of(100, fill=1)).is_successful()
        assert lock(adapter, keys) == [True]
        for room in (
            MemoryObj(bytearray(99)),
            MemoryObj(bytearray(PAGE_BYTES)),
            MemoryObj(bytearray(PAGE_BYTES + 1)),
            MemoryObj(bytearray(100), Meta((2, 1), "float16")),
            MemoryObj(bytearray(100), Meta((1, 2))),
            MemoryObj(bytearray(100), Meta((2, 1), fmt="KV_MLA_FMT")),
            MemoryObj(bytearray(100), Meta((2, 1), dtypes=["uint8", "float32"])),
        ):
            assert load(adapter, keys, [room]) == [False]
        assert load(adapter, keys, objects_of(100)) == [True]


def test_a_lock_holds_an_object_until_it_is_undone_as_often_as_it_was_taken(
    planes: Pair,
) -> None:
    keys = keys_of("locked", 2)
    with adapter_of(planes) as adapter:

        def flood(name: str) -> None:
            """Store more objects than fit, so that what nothing holds is evicted."""
            for i in range(2 * NUM_BLOCKS):
                other = keys_of(f"{name}-{i}", 1)
                assert store(adapter, other, objects_of(8, fill=9)).is_successful()

        assert store(adapter, keys, objects_of(100, 100, fill=1)).is_successful()
        assert lock(adapter, keys) == lock(adapter, keys) == [True, True]
        adapter.submit_unlock(keys)
        flood("first")
        room = objects_of(100, 100)
        assert load(adapter, keys, room) == [True, True]
        assert [each.data for each in room] == [bytes([1]) * 100, bytes([2]) * 100]
        adapter.submit_unlock(keys[:1])
        flood("second")
        assert load(adapter, keys[1:], room[1:]) == [True], "one key of the look-up is locked"
        adapter.submit_unlock(keys[1:])
        deadline_s = time.monotonic() + PATIENCE_S
        while any(lock(adapter, keys)):
            adapter.submit_unlock(keys)
            flood("third")
            assert time.monotonic() < deadline_s


def test_a_store_fails_as_a_whole_and_an_object_too_large_is_named_once(
    planes: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of("large", 2, object_group_id=3)
    with adapter_of(planes) as adapter:
        for _ in range(2):
            objects = objects_of(100, PAGE_BYTES + 1, fill=1)
            assert not store(adapter, keys, objects).is_successful()
        assert caplog.text.count(f"group 3 of qwen: {PAGE_BYTES + 1} bytes") == 1
        more = keys_of("more", NUM_BLOCKS + 1)
        assert not store(adapter, more, objects_of(*[8] * len(more), fill=1)).is_successful()
        status = adapter.report_status()
        assert (status["is_healthy"], status["stores_dropped"] > 0) == (True, True)


def test_what_cannot_be_right_is_refused_at_the_start(planes: Pair) -> None:
    with pytest.raises(LayoutMismatchError, match="model_id"), adapter_of(planes, weights="2"):
        pass
    for wrong in ({"weights": None}, {"page_bytes": "1"}, {"page": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))), adapter_of(planes, **wrong):
            pass


def test_a_data_plane_that_hangs_is_a_miss_in_time(planes: Pair) -> None:
    keys = keys_of("hung", 1)
    with adapter_of(planes, lookup_s=0.3, transfer_s=0.3) as adapter:
        wait_until(lambda: store(adapter, keys, objects_of(8, fill=1)).is_successful())
        wait_until(lambda: all(lock(adapter, keys)))
        with stopped(planes.data.pid):
            began_s = time.monotonic()
            assert load(adapter, keys, objects_of(8)) == [False]
            assert lock(adapter, keys) == [False], "the breaker is open"
            assert not store(adapter, keys, objects_of(8)).is_successful()
            assert time.monotonic() - began_s < 2
