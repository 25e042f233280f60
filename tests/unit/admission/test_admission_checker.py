"""In small pools no session that keeps asking is starved, in any state that they can reach.

Time runs in ticks of one grace period. Honest sessions step once between two ticks, in any order:
receipts come, each sequence grows by a block or ends at its length, and one admission is asked for.
One kind of them frees a sequence when asked to yield it, the other waits to be cut. A hostile one
does anything, at any time, or nothing: it withholds receipts, frees, grows, continues without
growth, asks with and without waiting, and withdraws.

A session is starved if things can go on for ever, with ticks, without it ending a sequence: there
is a cycle of states through a tick in which it ends none. That covers a deadlock, where only ticks
happen, and a livelock, where sequences are cut and begin again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import networkx
import pytest

from control_plane.admission.decisions import AdmissionConfig, Pressure
from control_plane.admission.queue import AdmissionQueue
from control_plane.admission.turns import Claim, Claimant, Turns
from control_plane.admission.victims import QueueEntry
from tests.helpers.planning.admission_rig import Rig

HONEST, YIELDING, HOSTILE = "h", "y", "x"
ASKED = 99  # the id of a sequence that is to be admitted; live ones are numbered from 0
CONFIG = AdmissionConfig(
    turn_s=2.0, max_doublings=2, idle_s=1.0, grace_s=1.0, receipt_deadline_s=1.0, headroom=0.0
)
MAX_STATES = 1_000_000

# The index of the next state, words for the move, and the session that ended a sequence.
Edge = tuple[int, str, int | None]


@dataclass(frozen=True)
class Case:
    """A pool, and for each session its kind, the blocks of a prompt and of a whole sequence, and
    how many sequences it keeps.
    """

    num_blocks: int
    kinds: str
    prompt: tuple[int, ...]
    length: tuple[int, ...]
    many: tuple[int, ...]


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
    "honest and hostile": 2,
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
QUICK = tuple(name for name in CASES if name not in SLOW)


class State(NamedTuple):
    """All state that matters, in a form that is equal whenever the future is."""

    sessions: tuple[Any, ...]
    queue: tuple[tuple[int, int, float, bool], ...]
    stepped: int  # a bit for each honest session that has stepped since the last tick


class World(Rig):
    """The rig of a case. The sequence that a session asks for is ``ASKED`` until it is live."""

    def __init__(self, case: Case, config: AdmissionConfig = CONFIG) -> None:
        super().__init__(case.num_blocks, len(case.kinds), config)
        self.case, self.config = case, config
        self.stepped = 0

    def honest_step(self, session: int) -> bool:
        """Take a step; return whether the session ended a sequence."""
        self.receipt(session)
        self.serve()
        ended = self._grow_all(session)
        self.serve()
        while len(self.held[session]) < self.case.many[session] and self._ask(session):
            pass
        self.stepped |= 1 << session
        return ended

    def hostile_moves(self, session: int) -> list[str]:
        held = self.held[session]
        moves = ["receipt"] if self.retired[session] else []
        moves += ["free", "grow", "go on"] if held else []
        if len(held) < self.case.many[session]:
            moves += ["ask", "poll"]
        elif held:
            moves += ["free+ask"]
        return moves + (["withdraw"] if session in self.queue._entries else [])

    def hostile_move(self, session: int, move: str) -> None:
        if move == "receipt":
            self.receipt(session)
        elif move == "free":
            self.end(session, max(self.held[session]))
        elif move == "grow":
            self._grow_all(session)
        elif move == "go on":
            for sequence in self.held[session]:
                self.go_on(session, sequence)
        elif move == "withdraw":
            self.queue.withdraw(session, ASKED)
        else:
            if move == "free+ask":
                self.end(session, min(self.held[session]))
            self._ask(session, wait=move != "poll")
        self.serve()

    def time_passes(self) -> str:
        """Take a tick; return words for it."""
        self.now_s += 1.0
        self.stepped = 0
        words = ["tick"]
        for decision in self.tick():
            asked = isinstance(decision, Pressure)
            if asked and self.case.kinds[decision.session] == YIELDING:
                self.end(decision.session, decision.sequence)
                words.append(f"{decision.session} yields")
            elif not asked:
                words.append(f"{type(decision).__name__} of {decision.session}")
        self.serve()
        self._saturate()
        return ", ".join(words)

    def _ask(self, session: int, *, wait: bool = True) -> bool:
        return self.ask(session, ASKED, self.case.prompt[session], wait=wait) is None

    def _admit(self, session: int, sequence: int, num_blocks: int) -> None:
        super()._admit(session, sequence, num_blocks)
        sequences, held = self.queue._turns.sessions[session].sequences, self.held[session]
        number = max((i for i in held if i != ASKED), default=-1) + 1
        held[number] = held.pop(ASKED)
        self.progress_s[session][number] = self.progress_s[session].pop(ASKED)
        sequences[number] = sequences.pop(ASKED)
        sequences[number].id = number  # type: ignore[misc]

    def _grow_all(self, session: int) -> bool:
        """Grow all; return whether one of the sequences was at its length, and ended."""
        ended = False
        for sequence, num_held in list(self.held[session].items()):
            if num_held == self.case.length[session]:
                self.end(session, sequence)
                ended = True
            else:
                self.grow(session, sequence)
        return ended

    # States

    def _saturate(self) -> None:
        """Let no time lie further back than matters, or there would be states without end."""
        now_s = self.now_s
        for session in self.queue._turns.sessions.values():
            session.penalty_until_s = max(session.penalty_until_s, now_s)
            self.retired_s[session.id] = max(self.retired_s[session.id], now_s - 2.0)
            progress_s = self.progress_s[session.id]
            for sequence in session.sequences.values():
                if sequence.num_blocked:
                    aged_s = max(now_s - 1.0 - sequence.blocked_s, 0.0)
                    sequence.blocked_s += aged_s
                    sequence.ends_s += aged_s
                sequence.ends_s = max(sequence.ends_s, self._clock_s(sequence) - 2.0)
                if sequence.deadline_s is not None:
                    sequence.deadline_s = max(sequence.deadline_s, now_s - 2.0)
                least_s = now_s - self.config.idle_s - 1.0
                progress_s[sequence.id] = max(progress_s[sequence.id], least_s)
                sequence.idles_s = 0.0
        for entry in self.queue._entries.values():
            entry.since_s = max(entry.since_s, now_s - 1.0)

    def _clock_s(self, sequence: Claim) -> float:
        """Return the time of a sequence's turn, which stands while it is blocked."""
        return sequence.blocked_s if sequence.num_blocked else self.now_s

    def state(self) -> State:
        turns, now_s = self.queue._turns, self.now_s
        everyone = [turns.sessions[i] for i in range(len(self.case.kinds))]
        ranks = _ranks(s.rank for session in everyone for s in session.sequences.values())
        seniority = _ranks(session.seniority for session in everyone)
        sessions = tuple(
            (
                seniority[session.seniority],
                session.num_doublings,
                round(max(session.penalty_until_s - now_s, 0.0), 6),
                (num := self.retired[session.id]),
                now_s - self.retired_s[session.id] if num else 0.0,
                tuple(
                    self._sequence_state(sequence, ranks[sequence.rank])
                    for sequence in session.sequences.values()
                ),
            )
            for session in everyone
        )
        line = tuple(
            (entry.session.id, entry.num_needed, now_s - entry.since_s, entry.is_chosen)
            for entry in self.queue._entries.values()
        )
        return State(sessions, line, self.stepped)

    def _sequence_state(self, sequence: Claim, rank: int) -> tuple[Any, ...]:
        id_, now_s = sequence.session.id, self.now_s
        return (
            self.held[id_][sequence.id],
            rank,
            sequence.ends_s - self._clock_s(sequence),
            sequence.num_doublings,
            sequence.num_blocked,
            now_s - sequence.blocked_s if sequence.num_blocked else 0.0,
            None if sequence.deadline_s is None else sequence.deadline_s - now_s,
            sequence.reason,
            sequence.penalty_s if sequence.reason else 0.0,
            now_s - self.progress_s[id_][sequence.id],
        )


def _ranks(values: Any) -> dict[int, int]:
    return {value: rank for rank, value in enumerate(sorted(values))}


def moves(world: World) -> Iterator[tuple[World, str, int | None]]:
    """Yield each possible move: the world after it, words for it, and the session that ended a
    sequence. The tick is the last.
    """
    stored = pickle.dumps(world)

    def after(move: Callable[[World], Any]) -> tuple[World, Any]:
        copied = pickle.loads(stored)
        return copied, move(copied)

    kinds = world.case.kinds
    everyone = sum(1 << i for i, kind in enumerate(kinds) if kind != HOSTILE)
    for session, kind in enumerate(kinds):
        if kind == HOSTILE:
            for move in world.hostile_moves(session):
                moved, _ = after(lambda w, s=session, m=move: w.hostile_move(s, m))
                yield moved, f"{session}: {move}", None
        elif not world.stepped >> session & 1:
            moved, ended = after(lambda w, s=session: w.honest_step(s))
            yield moved, f"{session} steps" + ", ends one" * ended, session if ended else None
    if world.stepped == everyone:
        yield *after(World.time_passes), None


@functools.cache
def explore(case: Case, config: AdmissionConfig = CONFIG) -> tuple[list[State], list[list[Edge]]]:
    """Return all states, and for each the moves from it."""
    start = World(case, config)
    numbers, states, frontier = {start.state(): 0}, [start.state()], deque([pickle.dumps(start)])
    edges: list[list[Edge]] = []
    while frontier:
        row = []
        for world, words, ended in moves(pickle.loads(frontier.popleft())):
            state = world.state()
            number = numbers.setdefault(state, len(states))
            if number == len(states):
                states.append(state)
                frontier.append(pickle.dumps(world))
            row.append((number, words, ended))
        edges.append(row)
        assert len(states) <= MAX_STATES, f"more than {MAX_STATES} states"
    return states, edges


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
        if kind != HOSTILE and (cycle := _cycle_without_an_end(edges, session)):
            found.append(Starved(session, [f"{words}: {states[v]}" for v, words in cycle]))
    return found, len(states)


def _cycle_without_an_end(edges: list[list[Edge]], session: int) -> list[tuple[int, str]]:
    """Return a cycle through a tick in which the session ends no sequence, if there is one."""
    kept = [[(to, words) for to, words, who in row if who != session] for row in edges]
    graph = networkx.DiGraph()
    graph.add_edges_from((v, to) for v, row in enumerate(kept) for to, _ in row)
    components = networkx.strongly_connected_components(graph)
    number = {v: i for i, component in enumerate(components) for v in component}
    for v, row in enumerate(kept):
        for to, words in row:
            if words.startswith("tick") and number[v] == number[to]:
                way = [v, *networkx.shortest_path(graph, to, v)]
                return [(b, dict(kept[a])[b]) for a, b in itertools.pairwise(way)]
    return []


# Nobody is starved


@pytest.mark.parametrize("name", QUICK)
def test_nobody_is_starved(name: str) -> None:
    found, num_states = starved(CASES[name])
    assert found == []
    assert num_states > 10


def test_nobody_is_starved_by_headroom() -> None:
    config = dataclasses.replace(CONFIG, headroom=0.25)
    assert starved(CASES["two, of the whole pool"], config)[0] == []


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SLOW)
def test_nobody_is_starved_in_a_larger_case(name: str) -> None:
    config = dataclasses.replace(CONFIG, max_doublings=SLOW[name])
    assert starved(CASES[name], config)[0] == []


def test_the_states_have_all_that_the_queue_remembers() -> None:
    """A field that is added has to be added to the states of the checker."""
    world = World(CASES["two that yield"])
    assert set(vars(world.queue)) == {"_pool", "_config", "_turns", "_entries", "_next_ticket"}
    assert set(vars(world.queue._turns)) == {
        *("sessions", "num_live", "num_blocked", "asked", "_turn_s", "_max_doublings", "_heap"),
        *("_next_rank", "_next_seniority"),
    }
    assert {type(world.queue), type(world.queue._turns)} == {AdmissionQueue, Turns}
    assert set(Claimant.__slots__) == {
        *("id", "num_doublings", "penalty_until_s", "seniority", "sequences"),
        # Never where the checker looks: what was due while it was, is done when it is no more.
        "is_busy",
    }
    assert set(Claim.__slots__) == {
        *("id", "session", "rank", "ends_s", "num_doublings", "num_blocked", "blocked_s"),
        *("in_heap", "deadline_s", "reason", "penalty_s", "idles_s"),
    }
    assert set(QueueEntry.__slots__) == {
        *("session", "sequence", "num_needed", "since_s", "ticket", "is_chosen"),
    }
