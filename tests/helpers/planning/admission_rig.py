"""A small pool and its queue, and a control plane's work between them."""

from __future__ import annotations

from control_plane.admission.decisions import (
    AdmissionConfig,
    Cut,
    Decision,
    EndSession,
    Grant,
    Growth,
    MustWait,
)
from control_plane.admission.queue import AdmissionQueue


class Rig:
    """A pool that counts blocks, with sessions 0, 1, ... that are open from the beginning.

    ``held``: for each session the blocks of each live sequence, and ``progress_s``: when it last
    progressed. ``retired``: blocks that wait for the session's receipts, since ``retired_s``.
    ``computed``: sequences that a plan in flight computes. The clock, ``now_s``, is the test's to
    move.
    """

    def __init__(
        self,
        num_blocks: int,
        num_sessions: int,
        config: AdmissionConfig,
        *asked: tuple[int, int, int],
    ) -> None:
        """``asked``: admissions to ask for at once, each (session, sequence, blocks)."""
        self.num_blocks = num_blocks
        self.held: list[dict[int, int]] = [{} for _ in range(num_sessions)]
        self.progress_s: list[dict[int, float]] = [{} for _ in range(num_sessions)]
        self.computed: set[tuple[int, int]] = set()
        self.retired = [0] * num_sessions
        self.retired_s = [0.0] * num_sessions
        self.now_s = 0.0
        self.queue = AdmissionQueue(self, config)
        for session in range(num_sessions):
            self.queue.open(session)
        for admission in asked:
            self.ask(*admission)

    # What the queue asks

    def num_free(self) -> int:
        return self.num_blocks - sum(self.retired) - sum(sum(h.values()) for h in self.held)

    def num_obtainable(self, session: int) -> int:
        return self.num_free() + self.retired[session]

    def num_pending(self, session: int) -> int:
        return sum(self.retired) - self.retired[session]

    def num_held(self, session: int, sequence: int) -> int:
        return self.held[session][sequence]

    def num_held_by(self, session: int) -> int:
        return sum(self.held[session].values())

    def last_progress(self, session: int, sequence: int) -> tuple[float, bool]:
        return self.progress_s[session][sequence], (session, sequence) in self.computed

    def retired_since(self, session: int) -> float | None:
        return self.retired_s[session] if self.retired[session] else None

    # What sessions do

    def ask(
        self, session: int, sequence: int, num_blocks: int, *, wait: bool = True
    ) -> MustWait | None:
        """Ask for an admission; return None when it was admitted."""
        must_wait = self.queue.admit(session, sequence, num_blocks, self.now_s, wait=wait)
        if must_wait is None:
            self._admit(session, sequence, num_blocks)
        return must_wait

    def grow(self, session: int, sequence: int, num_blocks: int = 1) -> bool:
        may = self.queue.may_grow(session, sequence, num_blocks, self.now_s)
        if may:
            self._give(session, sequence, num_blocks)
        return may

    def go_on(self, session: int, sequence: int) -> None:
        """Compute something for a session, without more blocks."""
        self.progress_s[session][sequence] = self.now_s

    def end(self, session: int, sequence: int) -> None:
        """End a sequence. Its blocks are retired: call ``receipt`` to get them back."""
        self.queue.ended(session, sequence)
        self._retire(session, sequence)

    def receipt(self, session: int) -> None:
        self.retired[session] = 0

    def leave(self, session: int, sequence: int) -> None:
        """End a sequence whose plans have all run."""
        self.end(session, sequence)
        self.receipt(session)

    # What the control plane does

    def serve(self) -> list[Grant]:
        grants = []
        while (grant := self.queue.next_grant(self.now_s)) is not None:
            if isinstance(grant, Growth):
                self._give(grant.session, grant.sequence, grant.num_blocks)
            else:
                self._admit(grant.session, grant.sequence, grant.num_blocks)
            grants.append(grant)
        return grants

    def tick(self) -> list[Decision]:
        decisions = self.queue.tick(self.now_s)
        for decision in decisions:
            session = decision.session
            if isinstance(decision, Cut):
                self._retire(session, decision.sequence)
            elif isinstance(decision, EndSession):
                self.queue.close(session)
                self.held[session].clear()
                self.progress_s[session].clear()
                self.retired[session] = 0
                self.queue.open(session)
        return decisions

    def _admit(self, session: int, sequence: int, num_blocks: int) -> None:
        self.held[session][sequence] = 0
        self._give(session, sequence, num_blocks)
        self.queue.started(session, sequence, self.now_s)

    def _retire(self, session: int, sequence: int) -> None:
        if not self.retired[session]:
            self.retired_s[session] = self.now_s
        self.retired[session] += self.held[session].pop(sequence)
        del self.progress_s[session][sequence]

    def _give(self, session: int, sequence: int, num_blocks: int) -> None:
        """Allocate free blocks first, then the session's own retired ones."""
        self.retired[session] -= max(0, num_blocks - self.num_free())
        assert self.retired[session] >= 0, "the queue granted blocks that are not there"
        self.held[session][sequence] += num_blocks
        self.go_on(session, sequence)
