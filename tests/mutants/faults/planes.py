"""Faults of both planes, each one thing that was wrong once or easily could be."""

from __future__ import annotations

from dataclasses import replace

from tests.mutants.fault import Fault, first
from tests.mutants.faults.core import ANYWHERE, APPEND
from tests.mutants.faults.data import END_ALL, KEEPS, NAMED

CORE, REGISTRATION = "control_plane/core.py", "control_plane/registration/registration.py"
SHARDS, DEFERRED = "control_plane/pools/shards.py", "control_plane/steps/deferred_tokens.py"
SESSIONS, VERIFIER = "data_plane/plans/sessions.py", "data_plane/plans/verifier.py"
BLOCK_TABLES = "data_plane/plans/tables/block_tables.py"
OPENED = "control_plane/sessions/sessions.py"
WALK = "tests/mutants/walks.py::test_planes"

TAKES = "    given = message\n"
# Deferred tokens are taken by whatever sequence has the id now.
TAKES_BY_ID = f"""\
    from control_plane import queries
    from kvplane.results import SequenceState

    live = {{s.sequence_id: s for s in SequenceState.all_from_proto(queries.states(session))}}
    ids = columns.read(INT64, message.sequence_ids, "")
    steps = [live[i].admitted_by if i in live else 0 for i in ids]
    message.admitted_by = columns.pack(INT64, steps)
{TAKES}"""
ABORTS = "        return cast(cpb.AbortPlansResponse, run_to_end(self.run(request, tenant)))\n"
ABORTS_AT_ONCE = f"""\
        from control_plane.steps.abort import abort_plans

        session = self.sessions.by_id.get(request.session.session_id)
        if session is not None and request.number <= session.numbers.last:
            run_to_end(abort_plans(session, request))
{ABORTS}"""
INSTALL = "    def install(self, incarnation: int, key: bytes) -> None:\n"
FINDS_KEY = f"""\
    def _right_key(self, signed):
        for key in getattr(self, "_former", ()):
            digest = signing.digest(signed.payload)
            if signing.sign_digest(key, signed.type, digest) == signed.signature:
                return key
        return self._key

{INSTALL}"""

REPEATS_NOT_RECOGNISED = Fault(  # The last step runs again when it arrives again.
    "repeats_not_recognised",
    "control_plane/sessions/numbering.py",
    "        number = request.number\n        if number < 1:",
    "        number = request.number\n        if number == self.last > 0:\n"
    "            self.last -= 1\n        if number < 1:",
    WALK,
)
SESSION_IDS_REUSED = Fault(  # Every control plane counts its sessions from 1.
    "session_ids_reused",
    OPENED,
    "session_id = self._new_session_id()",
    "session_id = self._num_made = getattr(self, '_num_made', 0) + 1",
    WALK,
)
SESSIONS_OUTLIVE_A_SHARD = Fault(  # A shard restarts, and the pool's sessions go on.
    "sessions_outlive_a_shard",
    OPENED,
    *first("    def end_all(self, pool: Pool) -> None:", "return"),
    WALK,
)
FENCE_FORGOTTEN = Fault(  # A data plane ends a session, but takes its grant again.
    "fence_forgotten", SESSIONS, "self._ended.add(ordinal)", "pass", WALK
)

FAULTS = (
    REPEATS_NOT_RECOGNISED,
    SESSION_IDS_REUSED,
    SESSIONS_OUTLIVE_A_SHARD,
    FENCE_FORGOTTEN,
    *(
        replace(fault, name=f"{fault.name}, all orders", killed_by=test)
        for fault, test in (
            (REPEATS_NOT_RECOGNISED, "tests/mutants/walks.py::test_all_orders[order-2]"),
            (SESSIONS_OUTLIVE_A_SHARD, "tests/mutants/walks.py::test_all_orders[restarts-3]"),
            (FENCE_FORGOTTEN, "tests/mutants/walks.py::test_all_orders[fences-5]"),
        )
    ),
    Fault(  # An earlier process of a shard takes it back.
        "epoch_order_ignored",
        REGISTRATION,
        "if hello.epoch < registered.epoch:",
        "if False:",
        WALK,
    ),
    Fault(  # Sessions of an earlier control plane go on.
        "tables_kept_on_install",
        SESSIONS,
        *first(END_ALL, "return"),
        WALK,
        also=((BLOCK_TABLES, *first("    def drop_all(self) -> None:", "return")),),
    ),
    Fault(  # A block that goes to another tenant keeps what it held.
        "tenants_not_cleared",
        "data_plane/plans/contents/last_tenants.py",
        "        if not allocated:\n            return before, after\n",
        "        if True:\n            return before, after\n",
        WALK,
    ),
    Fault("append_position_unchecked", "control_plane/steps/operations.py", APPEND, ANYWHERE, WALK),
    Fault(  # A pool is ready when all of its shards have come, whatever they hold.
        "shards_may_overlap",
        SHARDS,
        "if i != shard.index and self._overlap(",
        "if False and self._overlap(",
        WALK,
        also=(
            (
                SHARDS,
                "        if len(self.states) < self.num_shards:\n            return False\n",
                "        return len(self.states) == self.num_shards\n",
            ),
        ),
    ),
    Fault(  # A data plane goes on accepting what a former key signs.
        "former_keys_accepted",
        VERIFIER,
        INSTALL,
        FINDS_KEY,
        WALK,
        also=(
            (
                VERIFIER,
                "        self.incarnation, self._key = incarnation, key",
                "        self._former = [*getattr(self, '_former', ()), key]\n"
                "        self.incarnation, self._key = incarnation, key",
            ),
            (
                VERIFIER,
                "self._key, want_type, signed.type, signed.payload",
                "self._right_key(signed), want_type, signed.type, signed.payload",
            ),
        ),
    ),
    Fault(  # A control plane that was replaced is served again.
        "lower_incarnation_installed",
        VERIFIER,
        "if incarnation < max(1, self.incarnation):",
        "if False:",
        WALK,
        also=(
            (
                REGISTRATION,
                "        if hello.incarnation > self._sessions.incarnation:\n",
                "        hello.incarnation = min(hello.incarnation, self._sessions.incarnation)\n"
                "        if hello.incarnation > self._sessions.incarnation:\n",
            ),
        ),
    ),
    Fault(  # An abort takes effect whenever it arrives.
        "abort_not_numbered", CORE, ABORTS, ABORTS_AT_ONCE, WALK
    ),
    replace(  # Sessions are known by their id alone.
        SESSION_IDS_REUSED,
        name="incarnation_of_requests_ignored",
        also=((OPENED, "if ref.incarnation != self.incarnation:", "if False:"),),
    ),
    Fault(  # A data plane is resumed whatever key it holds.
        "key_ignored_on_resume",
        REGISTRATION,
        "            and _holds(hello, pool)\n            and _is_same_run(",
        "            and _is_same_run(",
        WALK,
    ),
    Fault("tokens_taken_by_sequence_id", DEFERRED, TAKES, TAKES_BY_ID, WALK),
    Fault(  # A data plane keeps a publication of a generation that its block no longer has.
        "stale_publication_kept", BLOCK_TABLES, KEEPS, f"{NAMED}{KEEPS}", WALK
    ),
)
