"""A small pool with a few sessions under the real queue, as a state that is stored and restored.

Time runs in ticks of one grace period. Honest sessions step once between two ticks, in any order:
receipts come, each sequence grows by a block or ends at its length, and one admission is asked for.
One kind of them frees a sequence when asked to yield it, the other waits to be cut. A hostile one
does anything, at any time, or nothing: it withholds receipts, frees, grows, continues without
growth, asks with and without waiting, and withdraws.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from control_plane.admission.decisions import AdmissionConfig, Pressure
from control_plane.admission.turns import Claim
from control_plane.admission.victims import QueueEntry
from tests.helpers.planning.admission_rig import Rig

HONEST, YIELDING, HOSTILE = "h", "y", "x"
ASKED = 99  # the id of a sequence that is to be admitted; live ones are numbered from 0
CONFIG = AdmissionConfig(
    turn_s=2.0, max_doublings=2, idle_s=1.0, grace_s=1.0, receipt_deadline_s=1.0, headroom=0.0
)


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

    def state(self) -> State:
        turns, now_s = self.queue._turns, self.now_s
        everyone = [turns.sessions[i] for i in range(len(self.case.kinds))]
        ranks = _ranks(s.rank for session in everyone for s in session.sequences.values())
        seniority = _ranks(session.seniority for session in everyone)
        sessions = tuple(
            (
                seniority[session.seniority],
                session.num_doublings,
                max(session.penalty_until_s - now_s, 0.0),
                self.retired[session.id],
                min(now_s - self.retired_s[session.id], 2.0) if self.retired[session.id] else 0.0,
                tuple(
                    self._sequence_state(sequence, ranks[sequence.rank])
                    for sequence in session.sequences.values()
                ),
            )
            for session in everyone
        )
        line = tuple(
            (
                waiting.session.id,
                waiting.num_needed,
                min(now_s - waiting.since_s, 1.0),
                waiting.is_chosen,
            )
            for waiting in self.queue._entries.values()
        )
        return State(sessions, line, self.stepped)

    def _sequence_state(self, sequence: Claim, rank: int) -> tuple[Any, ...]:
        session, now_s = sequence.session, self.now_s
        until_s = sequence.blocked_s if sequence.num_blocked else now_s
        due_s = sequence.deadline_s
        return (
            self.held[session.id][sequence.id],
            rank,
            max(sequence.ends_s - until_s, -2.0),
            sequence.num_doublings,
            sequence.num_blocked,
            min(now_s - sequence.blocked_s, 1.0) if sequence.num_blocked else 0.0,
            None if due_s is None else max(due_s - now_s, -2.0),
            sequence.reason,
            sequence.penalty_s if sequence.reason else 0.0,
            min(now_s - self.progress_s[session.id][sequence.id], self.config.idle_s + 1.0),
        )

    @classmethod
    def restored(cls, case: Case, config: AdmissionConfig, state: State) -> World:
        """Return a world in that state, at second 0."""
        world = cls(case, config)
        world.stepped = state.stepped
        turns = world.queue._turns
        blocked = []
        for id_, stored in enumerate(state.sessions):
            session = turns.sessions[id_]
            session.seniority, session.num_doublings, session.penalty_until_s = stored[:3]
            world.retired[id_], retired_s, sequences = stored[3:]
            world.retired_s[id_] = -retired_s
            for number, (
                held,
                rank,
                left_s,
                doublings,
                num,
                blocked_s,
                due_s,
                reason,
                penalty_s,
                idle_s,
            ) in enumerate(sequences):
                sequence = Claim(session, number, rank)
                sequence.ends_s, sequence.penalty_s = left_s - blocked_s, penalty_s
                sequence.num_doublings = doublings
                sequence.num_blocked, sequence.blocked_s = num, -blocked_s
                sequence.deadline_s, sequence.reason = due_s, reason
                if due_s is not None:
                    turns.asked.add(sequence)
                if num:
                    sequence.in_heap = True
                    blocked.append((rank, sequence))
                session.sequences[number] = sequence
                world.held[id_][number] = held
                world.progress_s[id_][number] = -idle_s
                turns.num_live += 1
                turns.num_blocked += num
        turns._heap = sorted(blocked)
        turns._next_rank = turns.num_live
        for ticket, (id_, num_needed, since_s, is_chosen) in enumerate(state.queue):
            waiting = QueueEntry(turns.sessions[id_], ASKED, num_needed, -since_s, ticket)
            waiting.is_chosen = is_chosen
            world.queue._entries[id_] = waiting
        world.queue._next_ticket = len(state.queue)
        return world


def moves(world_state: State, case: Case, config: AdmissionConfig) -> Iterator[tuple[Any, ...]]:
    """Yield each possible move: the next state, words for it, and the session that ended one."""
    world = World.restored(case, config, world_state)
    options = [world.hostile_moves(i) if k == HOSTILE else [] for i, k in enumerate(case.kinds)]
    everyone = sum(1 << i for i, kind in enumerate(case.kinds) if kind != HOSTILE)
    for session, kind in enumerate(case.kinds):
        if kind != HOSTILE and not world_state.stepped >> session & 1:
            world = World.restored(case, config, world_state)
            ended = world.honest_step(session)
            words = f"{session} steps" + (", ends one" if ended else "")
            yield world.state(), words, session if ended else None
        for move in options[session]:
            world = World.restored(case, config, world_state)
            world.hostile_move(session, move)
            yield world.state(), f"{session}: {move}", None
    if world_state.stepped == everyone:
        world = World.restored(case, config, world_state)
        words = world.time_passes()
        yield world.state(), words, None


def _ranks(values: Any) -> dict[int, int]:
    return {value: rank for rank, value in enumerate(sorted(values))}
