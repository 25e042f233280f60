"""Faults of the control plane's core, each of which breaks one thing that always holds.

Those of the native core are in ``blocks``.
"""

from __future__ import annotations

from tests.mutants.fault import Fault

NUMBERING = "control_plane/sessions/numbering.py"
POOL = "control_plane/pools/pool.py"
SESSIONS = "control_plane/sessions/sessions.py"
NUMBERS = "tests/unit/core/test_numbering.py"
FAILING = f"{NUMBERS}::test_a_request_that_fails_uses_its_number_and_keeps_its_error"
ENDS = "tests/unit/core/test_sessions.py"
OPERATIONS = "tests/unit/core/test_operations.py"
APPEND = "        num_tokens = len(token_ids) // _TOKEN_BYTES\n        if step.check_as or"
# An append goes where the sequence is, wherever its engine took it to be.
ANYWHERE = f"""\
        from control_plane import queries
        from kvplane.results import sequence_states
        from kvplane.wire import columns

        live = {{s.sequence_id: s for s in sequence_states(queries.states(step.session))}}
        ids = columns.read(columns.INT64, message.sequence_ids, "sequence_ids")
        ends = [live[i].num_scheduled_tokens if i in live else 0 for i in ids]
        message.first_positions = columns.pack(columns.INT32, ends)
{APPEND}"""
FENCED = "        pool.shards.send([ended.fence()])\n"
# An ended session's blocks are free before its data planes have fenced it.
FENCED_AT_ONCE = f"""\
{FENCED}        for shard in [*pool.shards.states]:
            self.fenced(pool, shard, [session.id])
"""

FAULTS = (
    Fault(
        "duplicates_run_again",
        NUMBERING,
        "if number == self.last + 1:",
        "if True:",
        f"{NUMBERS}::test_each_number_is_answered_as_by_a_dict",
    ),
    Fault(
        "positions_ignored",
        "control_plane/steps/operations.py",
        APPEND,
        ANYWHERE,
        f"{OPERATIONS}::test_a_wrong_operation_fails_alone_and_names_its_field",
    ),
    Fault(
        "headroom_in_an_empty_pool",
        "control_plane/admission/queue.py",
        "return int(self._config.headroom * self._pool.num_blocks) if self._turns.num_live else 0",
        "return int(self._config.headroom * self._pool.num_blocks)",
        "tests/unit/admission/test_admission_queue.py"
        "::test_admissions_leave_headroom_unless_the_pool_is_empty",
    ),
    Fault(
        "leases_never_end",
        SESSIONS,
        "[s for s in self.by_id.values() if s.expires_at_s <= now_s]",
        "[]",
        f"{ENDS}::test_a_lease_is_renewed_by_messages",
    ),
    Fault(
        "refused_numbers_stay_free",
        NUMBERING,
        "        self.settle()\n        self._latest = self._answers",
        "        if error is not None:\n            self.last -= 1\n            return\n"
        "        self.settle()\n        self._latest = self._answers",
        FAILING,
    ),
    Fault(
        "errors_do_not_say_the_next_number",
        "kvplane/errors.py",
        "    next_number = 0\n",
        "    next_number = property(lambda error: 0, lambda error, number: None)\n",
        FAILING,
    ),
    Fault(
        "fence_ignored",
        SESSIONS,
        FENCED,
        FENCED_AT_ONCE,
        f"{ENDS}::test_blocks_of_an_ended_session_wait_for_every_shard",
    ),
    Fault(
        "publications_kept_quiet",
        POOL,
        "self.shards.send([publish_message(run, group) for run in published])",
        "pass",
        "tests/unit/core/test_prefixes.py"
        "::test_a_control_plane_that_restarts_does_not_learn_what_was_forgotten",
    ),
    Fault(
        "namespaces_shared",
        SESSIONS,
        "root = root_of(pool.layout.fingerprint, tenant, request.namespace)",
        'root = root_of(pool.layout.fingerprint, tenant, "")',
        "tests/unit/core/test_followers.py::test_it_sees_its_own_tenant_and_namespace_alone",
    ),
    Fault(
        "receipts_of_one_shard_suffice",
        "control_plane/steps/receipts.py",
        "    done = min(highest)\n",
        "    done = max(highest)\n",
        "tests/unit/registration/test_silent_shards.py"
        "::test_a_plan_has_run_when_all_shards_have_receipted_it",
    ),
)
