"""Finds every state that a small pool under the real queue can reach, and the starved sessions.

A session is starved if things can go on for ever, with ticks, without it ending a sequence: there
is a cycle of states through a tick in which it ends none. That covers a deadlock, where only ticks
happen, and a livelock, where sequences are cut and begin again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from control_plane.admission.decisions import AdmissionConfig
from tests.helpers.planning.admission_world import CONFIG, HOSTILE, Case, State, World, moves

# The index of the next state, words for the move, and the session that ended a sequence.
Edge = tuple[int, str, int | None]

CASES = {
    "two, with two sequences each": Case(4, "hh", (1, 1), (2, 2), (2, 2)),
    "two, of over half the pool": Case(4, "hh", (1, 1), (3, 3), (2, 2)),
    "two, of the whole pool": Case(4, "hh", (1, 1), (4, 4), (1, 1)),
    "one, with two of over half": Case(4, "h", (1,), (3,), (2,)),
    "two that yield": Case(4, "yy", (1, 1), (3, 3), (2, 2)),
    "one of two yields": Case(4, "hy", (1, 1), (4, 3), (1, 2)),
    "three": Case(5, "hhh", (1, 1, 1), (3, 3, 2), (1, 1, 2)),
    "three that yield": Case(5, "yyy", (1, 1, 1), (3, 3, 2), (1, 1, 2)),
    "three long ones": Case(6, "hhh", (2, 2, 2), (6, 6, 5), (1, 1, 1)),
    "honest and hostile": Case(4, "hx", (1, 1), (3, 3), (1, 1)),
    "yielding and hostile": Case(4, "yx", (1, 1), (3, 3), (1, 1)),
    "big honest and hostile": Case(5, "hx", (4, 1), (5, 3), (1, 1)),
    "big honest and hostile with three": Case(5, "hx", (4, 1), (5, 2), (1, 3)),
    "honest and hostile with two": Case(4, "hx", (1, 1), (3, 4), (1, 2)),
    "two honest and hostile": Case(4, "hhx", (1, 1, 1), (3, 3, 4), (1, 1, 1)),
    "honest and two hostile": Case(3, "hxx", (1, 1, 1), (2, 2, 3), (1, 1, 1)),
    "larger pool": Case(8, "hhy", (2, 3, 1), (6, 8, 4), (1, 1, 2)),
}
# How often a turn may double: the fewer, the fewer states, but all sequences must have time to end.
SLOW = {
    "three": 2,
    "three that yield": 2,
    "yielding and hostile": 2,
    "big honest and hostile with three": 2,
    "three long ones": 2,
    "honest and hostile with two": 1,
    "two honest and hostile": 1,
    "honest and two hostile": 0,
    "larger pool": 2,
}
MAX_STATES = 1_000_000
QUICK = tuple(name for name in CASES if name not in SLOW)


@dataclass(frozen=True)
class Starved:
    """A session and a cycle in which it ends no sequence: words and states."""

    session: int
    cycle: list[str]


def starved(case: Case, config: AdmissionConfig = CONFIG) -> tuple[list[Starved], int]:
    """Return the honest sessions that can be starved, and the number of states."""
    states, edges = explore(case, config)
    found = []
    for session, kind in enumerate(case.kinds):
        if kind != HOSTILE:
            cycle = _cycle_without(edges, lambda edge, s=session: edge[2] != s)
            if cycle is not None:
                found.append(Starved(session, [f"{words}: {states[v]}" for v, words in cycle]))
    return found, len(states)


@functools.cache
def explore(case: Case, config: AdmissionConfig) -> tuple[list[State], list[list[Edge]]]:
    """Return all states, and for each the moves from it."""
    start = World(case, config).state()
    numbers, states = {start: 0}, [start]
    edges: list[list[Edge]] = []
    while len(edges) < len(states):
        row = []
        for state, words, ended in moves(states[len(edges)], case, config):
            number = numbers.setdefault(state, len(states))
            if number == len(states):
                states.append(state)
            row.append((number, words, ended))
        edges.append(row)
        assert len(states) <= MAX_STATES, f"more than {MAX_STATES} states"
    return states, edges


def _cycle_without(
    edges: list[list[Edge]], keep: Callable[[Edge], bool]
) -> list[tuple[int, str]] | None:
    component = _components(edges, keep)
    for v, row in enumerate(edges):
        for edge in row:
            if edge[1].startswith("tick") and keep(edge) and component[edge[0]] == component[v]:
                return [(edge[0], edge[1]), *_path(edges, keep, component, edge[0], v)]
    return None


def _path(
    edges: list[list[Edge]],
    keep: Callable[[Edge], bool],
    component: list[int],
    begin: int,
    end: int,
) -> list[tuple[int, str]]:
    """Return a shortest way inside a component."""
    came: dict[int, tuple[int, str]] = {}
    queue = [begin]
    for v in queue:
        if v == end:
            break
        for edge in edges[v]:
            to = edge[0]
            if keep(edge) and component[to] == component[v] and to not in came and to != begin:
                came[to] = (v, edge[1])
                queue.append(to)
    way = []
    while end != begin:
        before, words = came[end]
        way.append((end, words))
        end = before
    return way[::-1]


def _components(edges: list[list[Edge]], keep: Callable[[Edge], bool]) -> list[int]:
    """Number each state's strongly connected component (Tarjan, without recursion)."""
    num = len(edges)
    index, low, component = [-1] * num, [0] * num, [-1] * num
    stack: list[int] = []
    count = 0
    for root in range(num):
        if index[root] >= 0:
            continue
        work: list[tuple[int, Iterator[Any]]] = [(root, iter(edges[root]))]
        while work:
            v, rest = work[-1]
            if index[v] < 0:
                index[v] = low[v] = count
                count += 1
                stack.append(v)
            for edge in rest:
                to = edge[0]
                if not keep(edge):
                    continue
                if index[to] < 0:
                    work.append((to, iter(edges[to])))
                    break
                if component[to] < 0:
                    low[v] = min(low[v], index[to])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[v])
                if low[v] == index[v]:
                    while component[v] < 0:
                        component[stack.pop()] = v
    return component
