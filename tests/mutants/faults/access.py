"""The tests of who may do what fail when a check is taken out of a copy of the planes."""

from __future__ import annotations

from tests.mutants.fault import Fault

SOCKETS = "tests/rpc/test_access.py"
LIST = "tests/unit/client/test_access_list.py"
LARGE = "tests/attacks/test_large_requests.py"
FLOODS = "tests/attacks/test_floods.py"
PLANS = "tests/attacks/test_large_plans.py"


FAULTS = (
    Fault(
        "roles_are_not_asked_for",
        "kvplane/serving/callers/identity.py",
        "if roles and not roles & who.roles:",
        "if False:",
        SOCKETS,
    ),
    Fault(
        "grants_open_for_other_tenants",
        "data_plane/execution/executor.py",
        "if tenant is not None and verified.tenant != tenant:",
        "if False:",
        SOCKETS,
        "another_tenants_grant",
    ),
    Fault(
        "any_plane_registers_for_any_pool",
        "control_plane/server/registration_server.py",
        "if not caller.may_register(hello.pool_id):",
        "if False:",
        SOCKETS,
        "pools_key",
    ),
    Fault(
        "shards_that_live_are_taken_over",
        "control_plane/server/registration_server.py",
        "if time.monotonic() - old.heard_s <",
        "if 0 >",
        "tests/rpc/test_control_registration.py",
        "nobody_takes_the_shard",
    ),
    Fault(
        "an_execution_fails_where_others_are_served_first",
        "kvplane/execution/shard_execution.py",
        "attempt, waits_for_quota=True)",
        "attempt)",
        "tests/rpc/sdk/test_sdk_execution.py",
        "waits_where",
    ),
    Fault(
        "what_a_request_holds_is_not_counted",
        "kvplane/serving/requests.py",
        "self._bounds.check(data)",
        "pass",
        LARGE,
    ),
    Fault(
        "what_a_plan_claims_is_believed",
        "data_plane/plans/tables/change_columns.py",
        'column(columns.INT32, "indices", int(counts[sets].sum()))',
        "pass",
        PLANS,
    ),
    Fault(
        "what_does_not_parse_is_an_internal_error",
        "data_plane/plans/verifier.py",
        "except DecodeError as error:",
        "except ZeroDivisionError as error:",
        "tests/fuzz/test_fuzz_rpcs.py",
        "no_changed_request",
    ),
    Fault(
        "trimmed_entries_are_not_counted",
        "data_plane/plans/tables/change_columns.py",
        "if num_trimmed > MAX_TRIMMED_ENTRIES:",
        "if False:",
        PLANS,
    ),
    Fault(
        "tokens_of_spans_are_not_counted",
        "data_plane/plans/batches/attention_batch.py",
        "if (num_tokens := int(counts.sum())) > num_slots:",
        "if False:",
        PLANS,
    ),
    Fault(
        "streams_outlive_their_roles",
        "kvplane/serving/requests.py",
        "if self._admitted_at != num_reloads:",
        "if False:",
        SOCKETS,
    ),
    Fault(
        "silent_streams_outlive_their_roles",
        "kvplane/serving/interceptor.py",
        "lambda task: task.cancelled() or inside.cancel()",
        "lambda task: None",
        SOCKETS,
    ),
    Fault(
        "requests_are_read_before_their_caller_is_known",
        "kvplane/serving/requests.py",
        "self._caller = self._gate.admit(method, context)\n        # An iterator",
        "self._caller = ''\n        # An iterator",
        FLOODS,
    ),
    Fault(
        "what_waits_for_its_answer_is_not_counted",
        "kvplane/serving/limits/receive_budget.py",
        "self._callers[caller] = held + num_bytes",
        "self._callers[caller] = 0",
        FLOODS,
    ),
    Fault(
        "long_layers_run_in_one_slice",
        "data_plane/execution/layer_runner.py",
        "SLICE_S: Final = 0.01",
        "SLICE_S: Final = 1e9",
        "tests/attacks/test_shared_lane.py",
    ),
    Fault(
        "callers_with_many_sessions_get_more",
        "data_plane/server/fair_queue.py",
        "key=lambda each: (self._of_callers[each.caller], self._of_lanes[each])",
        "key=lambda each: self._of_lanes[each]",
        "tests/unit/executor/test_fair_queue.py",
    ),
    Fault(
        "compressed_requests_are_taken",
        "kvplane/serving/server.py",
        '("grpc.compression_enabled_algorithms_bitset", 1),',
        "",
        FLOODS,
    ),
    Fault(
        "any_number_of_connections_is_taken",
        "kvplane/serving/server.py",
        '("grpc.max_allowed_incoming_connections", max_connections),',
        "",
        FLOODS,
    ),
    Fault(
        "elementary_calls_are_anybodys",
        "data_plane/server/calls.py",
        "return caller().tenant if self._knows_callers else None",
        "return None",
        SOCKETS,
    ),
    Fault(
        "a_digest_is_a_token",
        "kvplane/serving/callers/access.py",
        "hashlib.sha256(token.encode()).hexdigest()",
        "token if len(token) == 64 else hashlib.sha256(token.encode()).hexdigest()",
        LIST,
    ),
    Fault(
        "the_list_is_read_once",
        "kvplane/serving/callers/access.py",
        "if stamp == self._stamp:",
        "if True:",
        LIST,
    ),
    Fault(
        "everybody_is_somebody",
        "kvplane/serving/callers/access.py",
        "if caller is None:",
        "if caller is None and name is None and token is None:",
        LIST,
    ),
)
