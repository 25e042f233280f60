"""Consumers of vLLM's KV events know what a pool holds, whatever restarts."""

from __future__ import annotations

import asyncio
import signal
import socket
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from bridged import BLOCK, Consumer, Pool, bridged_pool, prompt, replay

from kvplane.integrations.events import program
from kvplane.integrations.events.config import EventsSettings
from kvplane.integrations.events.program import Bridge, Publisher
from kvplane.integrations.events.wire import (
    CLEARED,
    Event,
    number_of,
    parents_first,
    removed,
    stored,
)
from kvplane.prefixes import (
    BlocksRemoved,
    BlocksStored,
    CaughtUp,
    IndexCleared,
    PrefixEvent,
    StoredBlock,
)
from tests.e2e.engine_planes import free_port
from tests.helpers.programs import run as run_program

MEDIA = {1: "GPU", 2: "CPU"}
PROMPTS = [prompt(seed) for seed in range(6)]


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with bridged_pool(tmp_path) as pool:
        pool.start_bridge()
        yield pool


@pytest.mark.parametrize("format", ["map", "array"])
async def test_what_is_stored_and_evicted_is_told(tmp_path: Path, format: str) -> None:
    async with bridged_pool(tmp_path) as pool:
        pool.start_bridge("--format", format, "--topic", "kv@pod@m", "--device-medium", "HBM")
        async with Consumer(pool.port, b"kv@pod@m", is_array=format == "array") as consumer:
            await pool.cache(PROMPTS[0])
            await consumer.until([4 * BLOCK, 0], *PROMPTS[:2])
            await pool.cache(*PROMPTS[1:5])
            found = await pool.num_cached(*PROMPTS)
            await consumer.until(found, *PROMPTS)
            assert (found[0], found[4]) == (0, 4 * BLOCK)
            assert "BlockRemoved" in consumer.kinds
            assert consumer.media == {"HBM"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_after_a_restart_all_is_cleared_and_told_again(
    pool: Pool, number: signal.Signals
) -> None:
    await pool.cache(*PROMPTS[:2])
    await pool.logged("follows pool=default")
    await pool.planes.control.stop()
    await pool.logged("pool=default is not followed")
    async with Consumer(pool.port) as consumer:
        await pool.planes.start_control(pool.planes.address)
        await consumer.until([32, 32], *PROMPTS[:2])
        assert consumer.kinds[0] == "AllBlocksCleared"
        await pool.logged("follows pool=default", 2)
        await pool.planes.restart()
        await pool.cache(PROMPTS[2])
        await consumer.until([0, 0, 32], *PROMPTS[:3])
    pool.bridge.send_signal(number)
    assert await asyncio.to_thread(pool.bridge.wait, 10) == 0
    assert "Traceback" not in pool.log.read_text()


async def test_a_bridge_that_was_killed_leaves_no_ghost(pool: Pool) -> None:
    """The consumer comes back when the new bridge has published all for the first time."""
    async with Consumer(pool.port) as consumer:
        await pool.cache(PROMPTS[0])
        await consumer.until([32], PROMPTS[0])
        pool.kill_bridge()
        await pool.cache(*PROMPTS[1:5])
        pool.start_bridge()
        await consumer.until(await pool.num_cached(*PROMPTS), *PROMPTS)
        assert consumer.num_cached(PROMPTS[0]) == 0


async def test_batches_are_sent_again(pool: Pool) -> None:
    for each in PROMPTS[:3]:
        await pool.cache(each)
    async with Consumer(free_port()) as consumer:  # a subscriber would have all published again
        batches: list[tuple[int, bytes]] = []
        while consumer.num_cached(PROMPTS[2]) < 32:
            batches = await replay(pool.replay_port, 0)
            for _, payload in batches:
                consumer.apply(payload)
        assert consumer.kinds[0] == "AllBlocksCleared"
    first, last = batches[0][0], batches[-1][0]
    assert [number for number, _ in batches] == [*range(first, last + 1)]
    for number in (first + 1, last, last + 1):
        wanted = [batch for batch in batches if batch[0] >= number]
        assert await replay(pool.replay_port, number) == wanted


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--format", "json"), 2, "'--format'"),
        (("--bind", "127.0.0.1:5557"), 2, "bind: must be tcp://HOST:PORT"),
        (("--replay", "tcp://nowhere"), 2, "replay: must be host:port"),
        (("--bind", "tcp://*:5557"), 2, "bind: *:5557 can be reached from other machines"),
        (("--replay", "tcp://127.0.0.1:{}"), 1, "--replay tcp://127.0.0.1:"),
    ],
)
def test_what_is_wrong_with_a_setting_is_said(flags: tuple[str, str], code: int, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = ("--bind", f"tcp://127.0.0.1:{free_port()}", flags[0], flags[1])
        port = taken.getsockname()[1]
        command = [each.format(port) for each in ("--pool", "p", *given)]
        done = run_program("kvplane.integrations.events", *command)
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr


def block(name: int, parent: int, tier: int = 1) -> StoredBlock:
    return StoredBlock(bytes([name] * 16), bytes([parent] * 16), array("i", [name] * 2), tier)


def test_a_snapshot_in_any_order_is_told_parents_first() -> None:
    blocks = [block(i, i - 1, tier) for i in range(1, 50) for tier in (1, 2)]
    blocks += [block(100 + i, i) for i in range(1, 50)]
    Random(5).shuffle(blocks)
    known = {bytes(16)}
    for each in (ordered := parents_first(blocks)):
        assert each.parent_hash in known
        known.add(each.block_hash)
    assert sorted(map(repr, ordered)) == sorted(map(repr, blocks))


def test_events_are_of_one_tier_and_name_it() -> None:
    one, two, three = (number_of(bytes([i] * 16)) for i in (1, 2, 3))
    told = stored([block(1, 0), block(2, 1), block(3, 2, 2), block(3, 1, 2)], MEDIA)
    assert [(e["block_hashes"], e["parent_block_hash"], e["medium"]) for e in told] == [
        ([one, two], None, "GPU"),
        ([three], two, "CPU"),
        ([three], one, "CPU"),
    ]
    assert [e["token_ids"] for e in told] == [[1, 1, 2, 2], [3, 3], [3, 3]]
    gone = removed([(bytes([i] * 16), tier) for i, tier in ((1, 1), (2, 1), (3, 2))], MEDIA)
    named = [(e["block_hashes"], e["medium"]) for e in gone]
    assert named == [([one, two], "GPU"), ([three], "CPU")]


async def test_what_is_removed_while_the_snapshot_comes_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "_MOST_BLOCKS", 1)
    told: list[Any] = []

    async def feed(*_: object, **__: object) -> AsyncIterator[PrefixEvent]:
        yield IndexCleared()
        yield BlocksStored((block(3, 1), block(1, 0), block(2, 1)))
        yield BlocksRemoved(((bytes([2] * 16), 1), (bytes([9] * 16), 1)))
        yield CaughtUp(5)
        yield BlocksRemoved(((bytes([1] * 16), 1),))

    async def publish(events: list[Event]) -> None:
        told.append(events)

    control, publisher = SimpleNamespace(watch_prefixes=feed), SimpleNamespace(publish=publish)
    bridge: Any = Bridge(EventsSettings(pool="p"), control, publisher)  # type: ignore[arg-type]
    async with asyncio.timeout(None) as whole:
        await bridge._publish(whole)
    assert told == [[CLEARED], *(stored([each], MEDIA) for each in (block(1, 0), block(3, 1)))]


@pytest.mark.parametrize(("name", "most"), [("NUM_KEPT", 2), ("KEPT_BYTES", 140)])
async def test_who_asks_for_what_is_no_longer_kept_gets_a_snapshot(
    monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(program, name, most)
    ports = {"bind": free_port(), "replay": free_port()}
    endpoints = {option: f"tcp://127.0.0.1:{port}" for option, port in ports.items()}
    publisher = Publisher(EventsSettings(pool="p", **endpoints))
    serving = asyncio.create_task(publisher.serve_replays())
    told: list[tuple[int, bool]] = []
    for events in [[CLEARED], *4 * [removed([(bytes(16), 1)], MEDIA)], [CLEARED]]:
        await publisher.publish(events)
        batches = await replay(ports["replay"], 0)
        told.append((len(batches), publisher.wants_snapshot.is_set()))
    assert told == [(1, False), (2, False), (2, True), (2, True), (2, True), (1, False)]
    serving.cancel()
    publisher._context.destroy(linger=0)
