"""The lane of requests that take long: one at a time, in slices, each to its end."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from control_plane.server.service import LongRequests
from kvplane.errors import QuotaExceededError
from kvplane.slices import Slices


class Log:
    """What ran, in order."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.num_ended = 0

    def lane(self) -> LongRequests:
        """Counts the requests that end."""

        def ended() -> None:
            self.num_ended += 1

        return LongRequests(ended)

    async def has_begun(self) -> None:
        while not self.entries:
            await asyncio.sleep(0)

    def slices(self, name: str, num: int = 3) -> Slices[str]:
        for _ in range(num):
            self.entries.append(name)
            yield
        return name

    async def others(self, num: int) -> None:
        for _ in range(num):
            self.entries.append("other")
            await asyncio.sleep(0)


async def test_others_run_between_the_slices() -> None:
    log = Log()
    task = asyncio.create_task(log.others(8))
    assert await log.lane().run(1, log.slices("long", 4), has_begun=False) == "long"
    await task
    places = [i for i, entry in enumerate(log.entries) if entry == "long"]
    assert len(places) == 4
    assert all(b - a > 1 for a, b in itertools.pairwise(places))


async def test_two_take_turns_in_the_order_in_which_they_came() -> None:
    log = Log()
    lane = log.lane()
    both = [asyncio.create_task(lane.run(i, log.slices(str(i)), has_begun=False)) for i in (1, 2)]
    assert await asyncio.gather(*both) == ["1", "2"]
    assert log.entries == ["1"] * 3 + ["2"] * 3


async def test_a_session_waits_for_its_own_and_for_no_other() -> None:
    log = Log()
    lane = log.lane()
    task = asyncio.create_task(lane.run(1, log.slices("long"), has_begun=False))
    await asyncio.sleep(0)
    await lane.wait(2)
    assert not task.done()
    await lane.wait(1)
    assert log.entries == ["long"] * 3
    await task


async def test_it_goes_on_when_its_caller_goes() -> None:
    log = Log()
    lane = log.lane()
    task = asyncio.create_task(lane.run(1, log.slices("long"), has_begun=False))
    await log.has_begun()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert log.num_ended == 0
    await lane.wait(1)
    assert log.entries == ["long"] * 3
    assert log.num_ended == 1, "what it changed is told to others"


async def test_what_has_not_begun_goes_with_its_caller() -> None:
    log = Log()
    lane = log.lane()
    first = asyncio.create_task(lane.run(1, log.slices("first", 99), has_begun=False))
    await log.has_begun()
    for num_turns in (1, 2, 3):  # the last of them in the lane
        task = asyncio.create_task(lane.run(2, log.slices("second"), has_begun=False))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await lane.wait(2)
    assert not first.done()
    assert await first == "first"
    assert await lane.run(2, log.slices("again", 1), has_begun=False) == "again"
    assert log.entries == ["first"] * 99 + ["again"]
    assert log.num_ended == 2


async def test_what_fails_is_told_and_lets_the_next_run() -> None:
    def failing() -> Slices[None]:
        yield
        raise QuotaExceededError("enough")

    log = Log()
    lane = log.lane()
    with pytest.raises(QuotaExceededError):
        await lane.run(1, failing(), has_begun=False)
    assert await lane.run(1, log.slices("long"), has_begun=False) == "long"
