"""The tests of the client, of what errors say and of the page notice a planted fault."""

from __future__ import annotations

from tests.mutants.fault import Fault

MISTAKES = "tests/rpc/test_common_mistakes.py::test_a_mistake_is_answered_with_what_to_do"
ARRAYS = "tests/unit/client/test_tensor_arrays.py"
ERRORS = "tests/rpc/sdk/test_sdk_errors.py"
LOOP = "tests/unit/client/test_caller_loop.py"
CALLER_LOOP = "kvplane/sync/caller_loop.py"
NUMBERING = "kvplane/session/step_numbering.py"
NUMBERS = "tests/unit/client/test_step_numbering.py"
PAGE = "tests/rpc/test_page.py"
PAGE_SERVER = "control_plane/server/page/page_server.py"
SESSION = "kvplane/session/session.py"
TRACING = "tests/unit/client/test_tracing.py"

FAULTS = (
    Fault(
        "an_absent_plan_is_empty",
        "kvplane/results.py",
        'return self._message.plan if self._message.HasField("plan") else None',
        "return self._message.plan",
        "tests/unit/client/test_sdk_results.py",
    ),
    Fault(
        "rows_are_read_as_columns",
        "kvplane/tensor.py",
        "if tensor.strides and",
        "if False and",
        ARRAYS,
    ),
    Fault(
        "anybody_may_look",
        PAGE_SERVER,
        'if ROLES["operator"] not in caller.roles:',
        "if False:",
        f"{PAGE}::test_a_listed_operator_is_let_in_by_its_token",
    ),
    Fault(
        "a_caller_loses_the_loop_to_another",
        CALLER_LOOP,
        "if threading.current_thread() is self._thread:",
        "if True:",
        LOOP,
        "several_threads",
    ),
    Fault(
        "a_loop_waits_long_for_its_caller",
        CALLER_LOOP,
        "_IDLE_S: Final = 0.3",
        "_IDLE_S: Final = 3.0",
        LOOP,
        "by_itself",
    ),
    Fault(
        "a_request_leaves_with_its_answer",
        CALLER_LOOP,
        "self._loop.run_until_complete(_two_turns())",
        "pass",
        LOOP,
        "sent_at_once",
    ),
    Fault(
        "a_loop_runs_inside_its_callers",
        CALLER_LOOP,
        "return asyncio._get_running_loop() is not None",
        "return False",
        LOOP,
        "loop_of_its_own",
    ),
    Fault(
        "an_interrupted_wait_goes_on",
        CALLER_LOOP,
        "task.cancel()\n            raise",
        "raise",
        LOOP,
        "interrupt",
    ),
    Fault(
        "a_data_plane_makes_its_pools_where_it_serves",
        "data_plane/server/server.py",
        "self.executor = call_in_short_thread(",
        "self.executor = (lambda function: function())(",
        "tests/rpc/test_data_registration.py",
        "torchs_helpers",
    ),
    Fault(
        "a_receipt_may_be_none",
        SESSION,
        "if receipt is None:",
        "if False:",
        f"{MISTAKES}[a_receipt_before_the_plan_has_run]",
    ),
    Fault(
        "a_session_forgets_why_it_ended",
        SESSION,
        'if over and error.field.startswith("session.")',
        'if False and error.field.startswith("session.")',
        "tests/rpc/operations/test_client_over_a_bad_network.py"
        "::test_a_lease_is_kept_by_the_client_and_lost_without_it",
    ),
    Fault(
        "swapped_addresses_are_not_told",
        "kvplane/serving/plane_server.py",
        "if handler is not None or not wanted.startswith(_OURS):",
        "if True:",
        f"{MISTAKES}[control_client_for_a_data_plane]",
    ),
    Fault(
        "the_text_has_no_field",
        "kvplane/wire/error_codec.py",
        'text = f"{wire.field}: {wire.message}" if wire.field else wire.message',
        "text = wire.message",
        ERRORS,
    ),
    Fault(
        "a_call_has_no_name",
        "kvplane/serving/interceptor.py",
        "REQUEST_ID.set(_request_id(context))",
        "pass",
        ERRORS,
    ),
    Fault(
        "a_loop_is_touched_by_other_threads",
        "kvplane/sync/clients.py",
        "self._wrapped = loop().call(make)",
        "self._wrapped = make()",
        "tests/rpc/test_sync.py::test_a_thread_admits_attends_and_finds_its_prompt_cached",
    ),
    Fault(
        "any_name_is_answered",
        PAGE_SERVER,
        'if not _is_ours(headers.get("host", ""))',
        "if False",
        f"{PAGE}::test_a_name_that_points_here_is_not_answered",
    ),
    Fault(
        "a_browser_that_left_stays",
        PAGE_SERVER,
        "if not await asyncio.wait_for(reader.read(1), INTERVAL_S):",
        "if await asyncio.sleep(INTERVAL_S):",
        f"{PAGE}::test_a_browser_that_left_takes_up_no_place",
    ),
    Fault(
        "sessions_of_other_tenants_are_shown",
        "control_plane/views.py",
        "own = [session for session in sessions if session.tenant == tenant]",
        "own = [*sessions]",
        f"{PAGE}::test_a_tenant_sees_no_session_of_another",
    ),
    Fault(
        "a_plan_forgets_its_trace",
        "control_plane/steps/plans.py",
        "if tracing.checked(traceparent):",
        "if False:",
        f"{TRACING}::test_a_plan_takes_its_steps_trace_on_if_it_is_one",
    ),
    Fault(
        "a_plan_takes_any_trace_on",
        "control_plane/steps/plans.py",
        "if tracing.checked(traceparent):",
        "if traceparent:",
        f"{TRACING}::test_a_plan_takes_its_steps_trace_on_if_it_is_one",
    ),
    Fault(
        "another_trace_is_another_step",
        NUMBERING,
        "bare.traceparent = content.traceparent",
        "pass",
        f"{TRACING}::test_a_step_that_is_called_again_in_another_trace_is_the_same_step",
    ),
    Fault(
        "an_unknown_outcome_is_taken_as_settled",
        NUMBERING,
        "is_unknown = was_in_doubt or isinstance(error, _UNKNOWN_OUTCOME)",
        "is_unknown = isinstance(error, _UNKNOWN_OUTCOME)",
        NUMBERS,
        "in_doubt",
    ),
    Fault(
        "a_refused_call_uses_its_number",
        NUMBERING,
        "self._settled(pending, error.next_number)",
        "self._settled(pending, request.number + 1)",
        NUMBERS,
        "late_copy",
    ),
    Fault(
        "a_forgotten_answer_is_taken_for_none",
        NUMBERING,
        "(is_out_of_order and not was_in_doubt)",
        "is_out_of_order",
        NUMBERS,
    ),
    Fault(
        "a_number_that_was_taken_is_given_again",
        NUMBERING,
        "request.number = self._next_number = error.next_number",
        "request.number = error.next_number",
        NUMBERS,
        "keeps_its_new_number",
    ),
    Fault(
        "a_status_does_not_say_the_next_number",
        "kvplane/wire/error_codec.py",
        'info.metadata["next_number"] = str(wire.next_number)',
        "pass",
        "tests/unit/client/test_errors.py",
    ),
    Fault(
        "unary_calls_carry_no_trace",
        "kvplane/transport/connection.py",
        "metadata = tracing.to_metadata()",
        "metadata = None",
        "tests/e2e/test_traces.py",
    ),
    Fault(
        "a_data_plane_begins_traces_anew",
        "data_plane/execution/plan_runner.py",
        "plan.traceparent,",
        '"",',
        "tests/e2e/test_traces.py",
    ),
    Fault(
        "a_session_that_ends_leaves_a_trace_open",
        "data_plane/plans/sessions.py",
        "if session.running is not None:",
        "if False:",
        "tests/unit/executor/test_plan_traces.py::test_a_plan_whose_session_ends",
    ),
    Fault(
        "a_view_is_never_made_again",
        PAGE_SERVER,
        "if now_s - made_s >= INTERVAL_S:",
        "if not text:",
        f"{PAGE}::test_an_event_follows_each_change_and_no_other",
    ),
)
