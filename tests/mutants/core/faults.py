"""Faults of the core, each of which breaks one thing that always holds.

Each takes pytest's monkeypatch and plants itself for one test. Faults of the native core are
planted in its sources, see ``tests/mutants/blocks``.
"""

from __future__ import annotations

from typing import Any

import pytest

from control_plane import core, queries
from control_plane.admission.queue import AdmissionQueue
from control_plane.pools.pool import Pool
from control_plane.pools.publications import root_of
from control_plane.sessions import sessions
from control_plane.sessions.numbering import Numbering
from control_plane.sessions.session import Session
from control_plane.sessions.sessions import Sessions
from control_plane.steps import receipts
from control_plane.steps.operations import Append, Step
from kvplane.errors import KvplaneError
from kvplane.results import sequence_states
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64


def receipts_of_one_shard_suffice(patch: pytest.MonkeyPatch) -> None:
    """A plan counts as run when the first shard has run it."""

    def apply(session: Session, highest: list[int]) -> None:
        original(session, [max(highest)] * len(highest))

    original = receipts.apply_receipts
    patch.setattr(receipts, "apply_receipts", apply)


def fence_ignored(patch: pytest.MonkeyPatch) -> None:
    """An ended session's blocks are free before its data planes have fenced it."""

    def end(self: Sessions, session: Session, reason: type[KvplaneError]) -> None:
        shards = set(session.pool.shards.states)
        original(self, session, reason)
        for shard in shards:
            self.fenced(session.pool, shard, [session.id])

    original = Sessions.end
    patch.setattr(Sessions, "end", end)


def publications_kept_quiet(patch: pytest.MonkeyPatch) -> None:
    """Data planes are not told what was published."""
    patch.setattr(Pool, "announce", lambda self: self.native.take_publications(1024))


def duplicates_run_again(patch: pytest.MonkeyPatch) -> None:
    """A request whose number was used runs once more."""
    patch.setattr(Numbering, "repeated", lambda self, request: None)


def refused_numbers_stay_free(patch: pytest.MonkeyPatch) -> None:
    """A request that fails as a whole does not use its number."""

    def remember(self: Numbering, content: bytes, message: Any, error: Any = None) -> None:
        if error is None:
            original(self, content, message)
        else:
            self.last -= 1

    original = Numbering.remember
    patch.setattr(Numbering, "remember", remember)


def errors_do_not_say_the_next_number(patch: pytest.MonkeyPatch) -> None:
    """An error of a numbered request leaves its caller to guess the next number."""
    silent = property(lambda error: 0, lambda error, number: None)
    patch.setattr(KvplaneError, "next_number", silent)


def positions_ignored(patch: pytest.MonkeyPatch) -> None:
    """Tokens are appended where the sequence ends, whatever position the caller gave."""

    def run(self: Any, step: Step, message: Any, result: Any) -> Any:
        live = {s.sequence_id: s for s in sequence_states(queries.states(step.session))}
        ids = columns.read(INT64, message.sequence_ids, "sequence_ids")
        ends = [live[i].num_scheduled_tokens if i in live else 0 for i in ids]
        message.first_positions = columns.pack(INT32, ends)
        return original(self, step, message, result)

    original = Append.run
    patch.setattr(Append, "run", run)


def namespaces_shared(patch: pytest.MonkeyPatch) -> None:
    """A tenant's namespaces share their prefixes."""
    patch.setattr(
        sessions, "root_of", lambda print_, tenant, namespace: root_of(print_, tenant, "")
    )


def leases_never_end(patch: pytest.MonkeyPatch) -> None:
    """A session whose lease ran out goes on."""

    def tick(self: core.ControlPlane) -> float:
        for session in self.sessions.by_id.values():
            session.expires_at_s = self._clock() + self._config.lease_s
        return original(self)

    original = core.ControlPlane.tick
    patch.setattr(core.ControlPlane, "tick", tick)


def headroom_in_an_empty_pool(patch: pytest.MonkeyPatch) -> None:
    """Admissions leave blocks free though nobody else has any."""

    def num_headroom(self: AdmissionQueue) -> int:
        return int(self._config.headroom * self._pool.num_blocks)

    patch.setattr(AdmissionQueue, "num_headroom", num_headroom)


FAULTS = (
    duplicates_run_again,
    positions_ignored,
    headroom_in_an_empty_pool,
    leases_never_end,
    refused_numbers_stay_free,
    errors_do_not_say_the_next_number,
    fence_ignored,
    publications_kept_quiet,
    namespaces_shared,
    receipts_of_one_shard_suffice,
)
