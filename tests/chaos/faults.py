"""What can be broken in a fleet, each for a while: by name, a coroutine that returns when it is
broken no longer, or breaks it for good and leaves the rest to ``Fleet.heal``.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Awaitable, Callable
from random import Random

from kvplane import ControlClient, ops
from kvplane.errors import KvplaneError
from tests.chaos.fleet import LEASE_S, NUM_DEVICE_BLOCKS, Fleet, Program

CLOCK_JUMP_S = 3600

Fault = Callable[[Fleet, Random], Awaitable[None]]


def _engine(fleet: Fleet, random: Random) -> Program:
    return random.choice(fleet.engines).program


def _data_plane(fleet: Fleet, random: Random) -> Program:
    return fleet.planes[random.choice(fleet.data_planes)]


async def _restart(plane: Program, random: Random) -> None:
    await plane.kill()
    await asyncio.sleep(random.choice((0.0, 0.2, LEASE_S * 1.2)))
    await plane.start()


async def _stop(program: Program, random: Random) -> None:
    program.signal(signal.SIGSTOP)
    await asyncio.sleep(random.choice((0.1, 1.0, LEASE_S * 1.5)))
    program.signal(signal.SIGCONT)


async def kill_control(fleet: Fleet, random: Random) -> None:
    await _restart(fleet.planes["control"], random)


async def kill_data(fleet: Fleet, random: Random) -> None:
    await _restart(_data_plane(fleet, random), random)


async def kill_planes(fleet: Fleet, random: Random) -> None:
    """All of them at once."""
    await asyncio.gather(*(_restart(plane, random) for plane in fleet.planes.values()))


async def kill_engine(fleet: Fleet, random: Random) -> None:
    await _engine(fleet, random).kill()


async def stop_control(fleet: Fleet, random: Random) -> None:
    await _stop(fleet.planes["control"], random)


async def stop_data(fleet: Fleet, random: Random) -> None:
    await _stop(_data_plane(fleet, random), random)


async def stop_engine(fleet: Fleet, random: Random) -> None:
    await _stop(_engine(fleet, random), random)


async def cut(fleet: Fleet, random: Random) -> None:
    """A few times, so that what is repeated is lost as well."""
    link = random.choice(list(fleet.links.values()))
    for _ in range(random.randint(1, 4)):
        link.cut()
        await asyncio.sleep(random.random() * 0.3)


async def lose_requests(fleet: Fleet, random: Random) -> None:
    await _hold(fleet, random, "requests")


async def lose_answers(fleet: Fleet, random: Random) -> None:
    """What was asked is done, and its caller asks again: every request comes twice."""
    await _hold(fleet, random, "answers")


async def _hold(fleet: Fleet, random: Random, direction: str) -> None:
    link = random.choice(list(fleet.links.values()))
    link.hold(direction)
    await asyncio.sleep(random.choice((0.2, 1.0, LEASE_S * 1.5)))
    link.cut()


async def delay(fleet: Fleet, random: Random) -> None:
    link = random.choice(list(fleet.links.values()))
    link.delay(random.choice((0.02, 0.2)))
    await asyncio.sleep(2.0)
    link.heal()


async def half_close(fleet: Fleet, random: Random) -> None:
    random.choice(list(fleet.links.values())).half_close()


async def jump_clock(fleet: Fleet, random: Random) -> None:
    """The control plane comes back with a clock that is an hour off."""
    control = fleet.planes["control"]
    control.clock_offset_s = random.choice((-CLOCK_JUMP_S, 0, CLOCK_JUMP_S))
    await _restart(control, random)


async def fill_pool(fleet: Fleet, random: Random) -> None:
    """Another tenant's session takes every block that it is given, and holds them for a while."""
    try:
        async with ControlClient(fleet.links["control"].address, timeout_s=2.0) as control:
            layout = (await control.get_pool("one")).layout
            async with await control.open_session("one", layout, "hog") as session:
                hog = [ops.admit(i + 1, [7 + i] * 40) for i in range(NUM_DEVICE_BLOCKS // 3)]
                await session.step(hog)
                await asyncio.sleep(random.choice((0.5, LEASE_S * 1.5)))
    except KvplaneError:
        pass  # another fault was in its way


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        kill_control, kill_data, kill_planes, kill_engine, stop_control, stop_data, stop_engine,
        cut, lose_requests, lose_answers, delay, half_close, fill_pool,
        *((jump_clock,) if shutil.which("faketime") else ()),
    )
}  # fmt: skip
