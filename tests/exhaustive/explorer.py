"""Visits every state of a scenario that so many events can reach, each once."""

from __future__ import annotations

from collections import deque

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


def explore(setting: Setting, num_events: int) -> int:
    """Visit the states of all orders of up to ``num_events`` events, breadth first: a find is as
    short as can be. Return the length of the longest path to a state that no shorter one leads to.

    The cores cannot be copied, so a state is reached again by its events. States that differ only
    in numbers which grow are one. Raises FoundError.
    """
    seen = {replay(setting, ()).state()}
    frontier: deque[Path] = deque([()])
    path: Path = ()
    while frontier:
        path = frontier.popleft()
        scenario = replay(setting, path)
        events = scenario.events() if len(path) < num_events else []
        for event in events:
            after = (*path, event)
            if (state := replay(setting, after).state()) not in seen:
                seen.add(state)
                frontier.append(after)
        if not events:
            try:
                scenario.finish()
            except Exception as error:
                raise FoundError(f"the end of {[*path]}: {error!r}") from error
    return len(path)
