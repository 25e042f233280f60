"""Whoever asks for many files to be loaded keeps only its own loads waiting."""

from __future__ import annotations

import asyncio

from data_plane.server.file_tier import LoadSlots


async def test_one_callers_loads_wait_for_its_own() -> None:
    slots, go_on = LoadSlots(4), asyncio.Event()
    num_running = 0

    async def load(caller: str) -> None:
        nonlocal num_running
        async with slots.taken(caller):
            num_running += 1
            await go_on.wait()
            num_running -= 1

    greedy = [asyncio.create_task(load("greedy")) for _ in range(50)]
    await asyncio.sleep(0)
    assert num_running == 3
    honest = asyncio.create_task(load("honest"))
    async with asyncio.timeout(10):
        while num_running < 4:
            await asyncio.sleep(0.01)
    go_on.set()
    await asyncio.gather(*greedy, honest)
    assert (num_running, slots._own, slots._num_here.total()) == (0, {}, 0)


async def test_a_load_that_is_given_up_leaves_its_place() -> None:
    slots, never = LoadSlots(1), asyncio.Event()

    async def load() -> None:
        async with slots.taken("one"):
            await never.wait()

    tasks = [asyncio.create_task(load()) for _ in range(3)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(10), slots.taken("other"):
        assert list(slots._own) == ["other"]
