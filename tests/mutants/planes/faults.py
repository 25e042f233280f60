"""Planted faults of both planes, each one thing that was wrong once or easily could be.

Each takes pytest's monkeypatch and plants itself for one test.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import Any

import pytest

from control_plane import core, queries
from control_plane.pools import shards
from control_plane.pools.pool import Pool
from control_plane.registration import registration
from control_plane.sessions import sessions
from control_plane.sessions.numbering import Answer, Numbering
from control_plane.sessions.session import Session
from control_plane.steps import requests
from control_plane.steps.abort import abort_plans
from control_plane.steps.operations import Append, Step
from data_plane.plans.contents.last_tenants import LastTenants
from data_plane.plans.sessions import Sessions
from data_plane.plans.tables.block_tables import BlockTables, Publications
from data_plane.plans.verifier import Verifier
from kvplane.errors import BadSignatureError
from kvplane.results import sequence_states
from kvplane.slices import run_to_end
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT32, INT64


def repeats_not_recognised(patch: pytest.MonkeyPatch) -> None:
    """The last step runs again when it arrives again."""
    original = Numbering.repeated

    def repeated(self: Numbering, request: Any) -> Answer | None:
        if request.number == self.last > 0:
            self.last -= 1
        return original(self, request)

    patch.setattr(Numbering, "repeated", repeated)


def abort_not_numbered(patch: pytest.MonkeyPatch) -> None:
    """An abort takes effect whenever it arrives."""
    original = core.ControlPlane.abort_plans

    def abort_plans_at_once(self: core.ControlPlane, request: Any, tenant: str) -> Any:
        session = self.sessions.by_id.get(request.session.session_id)
        if session is not None and request.number <= session.numbers.last:
            run_to_end(abort_plans(session, request))
        return original(self, request, tenant)

    patch.setattr(core.ControlPlane, "abort_plans", abort_plans_at_once)


def session_ids_reused(patch: pytest.MonkeyPatch) -> None:
    """Every control plane counts its sessions from 1."""
    num: dict[int, int] = defaultdict(int)

    def unused(self: sessions.Sessions) -> int:
        num[id(self)] += 1
        return num[id(self)]

    patch.setattr(sessions.Sessions, "_unused_id", unused)


def incarnation_of_requests_ignored(patch: pytest.MonkeyPatch) -> None:
    """Sessions are known by their id alone, which every control plane counts from 1."""
    session_ids_reused(patch)
    patch.setattr(sessions.Sessions, "check_incarnation", lambda self, ref: None)


def epoch_order_ignored(patch: pytest.MonkeyPatch) -> None:
    """An earlier process of a shard takes it back."""
    patch.setattr(registration, "_check_epoch", lambda hello, registered: None)


def key_ignored_on_resume(patch: pytest.MonkeyPatch) -> None:
    """A data plane is resumed whatever key it holds."""
    original = registration.Registration._can_resume

    def can_resume(self: Any, pool: Pool, hello: Any) -> bool:
        hello.key_id = signing.key_id(pool.key)
        return original(self, pool, hello)

    patch.setattr(registration.Registration, "_can_resume", can_resume)


def fence_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A data plane ends a session, but takes its grant again."""

    def fence(self: Sessions, session_id: int, ordinal: int) -> None:
        self._open.pop(session_id, None)

    patch.setattr(Sessions, "fence", fence)


def tables_kept_on_install(patch: pytest.MonkeyPatch) -> None:
    """Sessions of an earlier control plane go on."""
    patch.setattr(Sessions, "end_all", lambda self, key_id: None)
    patch.setattr(BlockTables, "drop_all", lambda self: None)


def lower_incarnation_installed(patch: pytest.MonkeyPatch) -> None:
    """A control plane that was replaced is served again."""
    original = Verifier.install

    def install(self: Verifier, incarnation: int, key: bytes) -> None:
        self.incarnation = 0
        original(self, incarnation, key)

    patch.setattr(Verifier, "install", install)
    check = registration.Registration.register

    def register(self: Any, hello: Any) -> Any:
        hello.incarnation = min(hello.incarnation, self._sessions.incarnation)
        return check(self, hello)

    patch.setattr(registration.Registration, "register", register)


def tenants_not_cleared(patch: pytest.MonkeyPatch) -> None:
    """A block that goes to another tenant keeps what it held."""
    patch.setattr(LastTenants, "to_clear", lambda self, tenant, allocated, transfers: ({}, {}))


def tokens_taken_by_sequence_id(patch: pytest.MonkeyPatch) -> None:
    """Deferred tokens are taken by whatever sequence has the id now."""
    original = requests.take_deferred_tokens

    def take(session: Session, message: Any, max_items: int) -> None:
        ids = columns.read(INT64, message.sequence_ids, "")
        states = {s.sequence_id: s for s in sequence_states(queries.states(session))}
        steps = [states[i].admitted_by if i in states else 0 for i in ids]
        message.admitted_by = columns.pack(INT64, steps)
        original(session, message, max_items)

    patch.setattr(requests, "take_deferred_tokens", take)


def append_position_unchecked(patch: pytest.MonkeyPatch) -> None:
    """An append goes where the sequence is, wherever its engine took it to be."""
    original = Append.run

    def run(self: Any, step: Step, message: Any, result: Any) -> Any:
        ids = columns.read(INT64, message.sequence_ids, "")
        live = {s.sequence_id: s for s in sequence_states(queries.states(step.session))}
        firsts = [live[i].num_scheduled_tokens if i in live else 0 for i in ids]
        message.first_positions = columns.pack(INT32, firsts)
        return original(self, step, message, result)

    patch.setattr(Append, "run", run)


def stale_publication_kept(patch: pytest.MonkeyPatch) -> None:
    """A data plane keeps a publication of a generation that its block no longer has."""
    original = Publications.keep

    def keep(self: Publications, message: Any, generations: Any, field: str) -> int:
        own = message.generations
        message.generations = (
            generations[list(columns.read("i", message.indices, ""))].astype("<i8").tobytes()
        )
        num = original(self, message, generations, field)
        message.generations = own
        return num

    patch.setattr(Publications, "keep", keep)


def sessions_outlive_a_shard(patch: pytest.MonkeyPatch) -> None:
    """A shard restarts, and the pool's sessions go on."""
    patch.setattr(sessions.Sessions, "end_all", lambda self, pool: None)


def shards_may_overlap(patch: pytest.MonkeyPatch) -> None:
    """A pool is ready when all of its shards have come, whatever they hold."""
    patch.setattr(shards.PoolShards, "overlapping", lambda self, shard: [])
    patch.setattr(
        shards.PoolShards,
        "_hold_everything",
        lambda self: len(self.states) == self.num_shards,
    )


def former_keys_accepted(patch: pytest.MonkeyPatch) -> None:
    """A data plane takes another key, and goes on accepting what the former one signs."""
    original = signing.verify
    known: list[bytes] = []
    install = Verifier.install

    def install_another(self: Verifier, incarnation: int, key: bytes) -> None:
        install(self, incarnation, key)
        known.append(key)

    def verify(key: bytes, *args: Any, **kwargs: Any) -> bytes:
        for former in known:
            with suppress(BadSignatureError):
                return original(former, *args, **kwargs)
        return original(key, *args, **kwargs)

    patch.setattr(Verifier, "install", install_another)
    patch.setattr(signing, "verify", verify)


FAULTS = (
    repeats_not_recognised,
    session_ids_reused,
    epoch_order_ignored,
    tables_kept_on_install,
    tenants_not_cleared,
    append_position_unchecked,
    sessions_outlive_a_shard,
    shards_may_overlap,
    former_keys_accepted,
    fence_forgotten,
    lower_incarnation_installed,
    abort_not_numbered,
    incarnation_of_requests_ignored,
    key_ignored_on_resume,
    tokens_taken_by_sequence_id,
    stale_publication_kept,
)
