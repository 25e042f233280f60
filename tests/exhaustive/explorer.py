"""Visits every state of a scenario that so many events can reach, each once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tests.exhaustive.scenario import Scenario, Setting

Path = tuple[tuple[str, int], ...]

SETTINGS = {
    "reuse": Setting(2, 3, ("step", "run", "submit", "close", "deliver")),
    "order": Setting(1, 4, ("step", "advance", "submit", "abort", "repeat", "start again")),
    "fences": Setting(1, 3, ("step", "run", "close", "open", "deliver", "grant again")),
    "restarts": Setting(
        1,
        3,
        ("step", "run", "submit", "deliver", "restart data", "restart control", "start again"),
    ),
}


class FoundError(AssertionError):
    """A path of events that leads to what must not be."""


@dataclass(slots=True)
class Result:
    """What was visited."""

    num_states: int = 0
    num_events: int = 0
    longest: int = 0


def replay(setting: Setting, path: Path) -> Scenario:
    """The scenario after these events. Raises FoundError."""
    scenario = Scenario(setting)
    for i, (kind, index) in enumerate(path):
        try:
            scenario.happen(kind, index)
        except Exception as error:
            raise FoundError(
                f"after {[*path[: i + 1]]}: {type(error).__name__}: {error}"
            ) from error
    return scenario


def explore(setting: Setting, num_events: int) -> Result:
    """All orders of up to ``num_events`` events, breadth first: a find is as short as can be.

    The cores cannot be copied, so a state is reached again by its events. States that differ only
    in numbers which grow are one. Raises FoundError.
    """
    result = Result()
    seen = {replay(setting, ()).state()}
    frontier: deque[Path] = deque([()])
    while frontier:
        path = frontier.popleft()
        result.num_states += 1
        scenario = replay(setting, path)
        events = scenario.events() if len(path) < num_events else []
        for event in events:
            result.num_events += 1
            after = replay(setting, (*path, event)) if event is not events[-1] else scenario
            if after is scenario:  # the last one need not begin anew
                _happen(after, path, event)
            state = after.state()
            if state not in seen:
                seen.add(state)
                frontier.append((*path, event))
                result.longest = max(result.longest, len(path) + 1)
        if not events:
            try:
                scenario.finish()
            except Exception as error:
                raise FoundError(f"the end of {[*path]}: {error!r}") from error
    return result


def _happen(scenario: Scenario, path: Path, event: tuple[str, int]) -> None:
    try:
        scenario.happen(*event)
    except Exception as error:
        raise FoundError(f"after {[*path, event]}: {type(error).__name__}: {error}") from error
