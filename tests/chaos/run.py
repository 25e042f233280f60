"""A run of chaos: phases of a few faults at once, and after each a look at everything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.chaos.engine_worker import QUESTIONS
from tests.chaos.faults import FAULTS
from tests.chaos.fleet import PATIENCE_S, Engine, Fleet

PHASE_S = 6.0
MAX_FAULTS_PER_PHASE = 3


@dataclass
class Result:
    """What a run came to. ``longest_recovery_s``: from the last fault of a phase to the last answer
    that was asked for before it; ``slowest_phase``: the faults of that phase.
    """

    seed: int
    num_phases: int = 0
    num_faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))
    num_answers: int = 0
    num_engine_restarts: int = 0
    longest_recovery_s: float = 0.0
    slowest_phase: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


async def run(
    model: Path,
    logs: Path,
    *,
    seed: int,
    seconds: float,
    data_plane: Sequence[str] = ("data_plane",),
) -> Result:
    """Phases until ``seconds`` have passed. The faults, their order and their times follow from
    the seed; what they meet does not.

    Raises AssertionError, naming the phase's faults, when an engine does not answer any more or a
    block is lost.
    """
    random, fleet, result = Random(seed), Fleet(model, logs, data_plane), Result(seed)
    try:
        await fleet.start()
        end_s = time.monotonic() + seconds
        waiting: list[str] = []
        while time.monotonic() < end_s or not result.num_phases:
            if not waiting:
                waiting = random.sample(sorted(FAULTS), len(FAULTS))
            num = min(len(waiting), random.randint(1, MAX_FAULTS_PER_PHASE))
            names = [waiting.pop() for _ in range(num)]
            try:
                recovery_s = await phase(fleet, random, names)
            except (AssertionError, TimeoutError) as error:
                raise AssertionError(f"seed {seed}, phase {result.num_phases}: {names}") from error
            result.num_phases += 1
            if recovery_s > result.longest_recovery_s:
                result.longest_recovery_s, result.slowest_phase = recovery_s, names
            for name in names:
                result.num_faults[name] += 1
        result.num_answers = sum(engine.num_answers for engine in fleet.engines)
        result.num_engine_restarts = sum(engine.num_starts - 1 for engine in fleet.engines)
        result.wrong = [wrong for engine in fleet.engines for wrong in engine.wrong]
        return result
    finally:
        await fleet.stop()


async def phase(fleet: Fleet, random: Random, names: list[str]) -> float:
    """Break and mend the fleet; return the seconds that recovery took. Raises AssertionError and
    TimeoutError as ``run`` does.
    """
    ended = asyncio.Event()
    asked = [asyncio.create_task(_ask(engine, ended)) for engine in fleet.engines]
    breaking = [_break(fleet, Random(random.random()), name) for name in names]
    await asyncio.gather(*breaking)
    await fleet.heal()
    healed_s = time.monotonic()
    ended.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*asked)
    recovery_s = time.monotonic() - healed_s
    await fleet.check_nothing_is_held()
    return recovery_s


async def _break(fleet: Fleet, random: Random, name: str) -> None:
    await asyncio.sleep(random.random() * PHASE_S)
    await FAULTS[name](fleet, random)


async def _ask(engine: Engine, ended: asyncio.Event) -> None:
    """One set after another until the faults are over, and one more."""
    number = 0
    while not ended.is_set():
        await engine.answer(number % len(QUESTIONS))
        number += 1
    await engine.answer(number % len(QUESTIONS))
