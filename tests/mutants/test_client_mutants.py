"""The tests of the client, of what errors say and of the page notice a planted fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.source_faults import Fault, assert_noticed

MISTAKES = "tests/rpc/test_common_mistakes.py::test_a_mistake_is_answered_with_what_to_do"
ARRAYS = "tests/unit/client/test_tensor_arrays.py"
ERRORS = "tests/rpc/test_sdk_errors.py"
LOOP = "tests/unit/client/test_caller_loop.py"
CALLER_LOOP = "kvplane/sync/caller_loop.py"
NUMBERING = "kvplane/session/step_numbering.py"
NUMBERS = "tests/unit/client/test_step_numbering.py"
PAGE = "tests/rpc/test_page.py"
PAGE_SERVER = "control_plane/server/page/page_server.py"
SESSION = "kvplane/session/session.py"
TRACING = "tests/unit/client/test_tracing.py"

FAULTS = {
    "an_absent_plan_is_empty": Fault(
        "kvplane/results.py",
        'return self._message.plan if self._message.HasField("plan") else None',
        "return self._message.plan",
        "tests/unit/client/test_sdk_results.py",
    ),
    "rows_are_read_as_columns": Fault(
        "kvplane/tensor.py", "if tensor.strides and", "if False and", ARRAYS
    ),
    "anybody_may_look": Fault(
        PAGE_SERVER,
        'if ROLES["operator"] not in caller.roles:',
        "if False:",
        f"{PAGE}::test_a_listed_operator_is_let_in_by_its_token",
    ),
    "a_caller_loses_the_loop_to_another": Fault(
        CALLER_LOOP,
        "if threading.current_thread() is self._thread:",
        "if True:",
        LOOP,
        "several_threads",
    ),
    "a_loop_waits_long_for_its_caller": Fault(
        CALLER_LOOP, "_IDLE_S: Final = 0.3", "_IDLE_S: Final = 3.0", LOOP, "by_itself"
    ),
    "a_request_leaves_with_its_answer": Fault(
        CALLER_LOOP, "self._loop.run_until_complete(_two_turns())", "pass", LOOP, "sent_at_once"
    ),
    "a_loop_runs_inside_its_callers": Fault(
        CALLER_LOOP,
        "return asyncio._get_running_loop() is not None",
        "return False",
        LOOP,
        "loop_of_its_own",
    ),
    "an_interrupted_wait_goes_on": Fault(
        CALLER_LOOP, "task.cancel()\n            raise", "raise", LOOP, "interrupt"
    ),
    "a_data_plane_makes_its_pools_where_it_serves": Fault(
        "data_plane/server/server.py",
        "self.executor = call_in_short_thread(",
        "self.executor = (lambda function: function())(",
        "tests/rpc/test_data_registration.py",
        "torchs_helpers",
    ),
    "a_receipt_may_be_none": Fault(
        SESSION,
        "if receipt is None:",
        "if False:",
        f"{MISTAKES}[a_receipt_before_the_plan_has_run]",
    ),
    "a_session_forgets_why_it_ended": Fault(
        SESSION,
        'if over and error.field.startswith("session.")',
        'if False and error.field.startswith("session.")',
        "tests/rpc/operations/test_client_over_a_bad_network.py"
        "::test_a_lease_is_kept_by_the_client_and_lost_without_it",
    ),
    "swapped_addresses_are_not_told": Fault(
        "kvplane/serving/plane_server.py",
        "if handler is not None or not wanted.startswith(_OURS):",
        "if True:",
        f"{MISTAKES}[control_client_for_a_data_plane]",
    ),
    "the_text_has_no_field": Fault(
        "kvplane/wire/error_codec.py",
        'text = f"{wire.field}: {wire.message}" if wire.field else wire.message',
        "text = wire.message",
        ERRORS,
    ),
    "a_call_has_no_name": Fault(
        "kvplane/serving/interceptor.py",
        "REQUEST_ID.set(_request_id(context))",
        "pass",
        ERRORS,
    ),
    "a_loop_is_touched_by_other_threads": Fault(
        "kvplane/sync/clients.py",
        "self._wrapped = loop().call(make)",
        "self._wrapped = make()",
        "tests/rpc/test_sync.py::test_a_thread_admits_attends_and_finds_its_prompt_cached",
    ),
    "any_name_is_answered": Fault(
        PAGE_SERVER,
        'if not _is_ours(headers.get("host", ""))',
        "if False",
        f"{PAGE}::test_a_name_that_points_here_is_not_answered",
    ),
    "a_browser_that_left_stays": Fault(
        PAGE_SERVER,
        "if not await asyncio.wait_for(reader.read(1), INTERVAL_S):",
        "if await asyncio.sleep(INTERVAL_S):",
        f"{PAGE}::test_a_browser_that_left_takes_up_no_place",
    ),
    "sessions_of_other_tenants_are_shown": Fault(
        "control_plane/views.py",
        "own = [session for session in sessions if session.tenant == tenant]",
        "own = [*sessions]",
        f"{PAGE}::test_a_tenant_sees_no_session_of_another",
    ),
    "an_adapter_computes_what_is_cached": Fault(
        "examples/engine_adapter.py",
        "sequence.num_computed = result.admit.num_cached_tokens",
        "sequence.num_computed = 0",
        "tests/rpc/test_examples.py"
        "::test_an_engine_with_the_adapter_answers_as_without_pages[with_room]",
    ),
    "a_plan_forgets_its_trace": Fault(
        "control_plane/steps/plans.py",
        "if tracing.checked(traceparent):",
        "if False:",
        f"{TRACING}::test_a_plan_takes_its_steps_trace_on_if_it_is_one",
    ),
    "a_plan_takes_any_trace_on": Fault(
        "control_plane/steps/plans.py",
        "if tracing.checked(traceparent):",
        "if traceparent:",
        f"{TRACING}::test_a_plan_takes_its_steps_trace_on_if_it_is_one",
    ),
    "another_trace_is_another_step": Fault(
        NUMBERING,
        "bare.traceparent = content.traceparent",
        "pass",
        f"{TRACING}::test_a_step_that_is_called_again_in_another_trace_is_the_same_step",
    ),
    "an_unknown_outcome_is_taken_as_settled": Fault(
        NUMBERING,
        "is_unknown = was_in_doubt or isinstance(error, _UNKNOWN_OUTCOME)",
        "is_unknown = isinstance(error, _UNKNOWN_OUTCOME)",
        NUMBERS,
        "in_doubt",
    ),
    "a_refused_call_uses_its_number": Fault(
        NUMBERING,
        "self._settled(pending, error.next_number)",
        "self._settled(pending, request.number + 1)",
        NUMBERS,
        "late_copy",
    ),
    "a_forgotten_answer_is_taken_for_none": Fault(
        NUMBERING, "(is_out_of_order and not was_in_doubt)", "is_out_of_order", NUMBERS
    ),
    "a_number_that_was_taken_is_given_again": Fault(
        NUMBERING,
        "request.number = self._next_number = error.next_number",
        "request.number = error.next_number",
        NUMBERS,
        "keeps_its_new_number",
    ),
    "a_status_does_not_say_the_next_number": Fault(
        "kvplane/wire/error_codec.py",
        'info.metadata["next_number"] = str(wire.next_number)',
        "pass",
        "tests/unit/client/test_errors.py",
    ),
    "unary_calls_carry_no_trace": Fault(
        "kvplane/transport/connection.py",
        "metadata = tracing.to_metadata()",
        "metadata = None",
        "tests/e2e/test_traces.py",
    ),
    "a_data_plane_begins_traces_anew": Fault(
        "data_plane/execution/plan_runner.py",
        "plan.traceparent,",
        '"",',
        "tests/e2e/test_traces.py",
    ),
    "a_session_that_ends_leaves_a_trace_open": Fault(
        "data_plane/plans/sessions.py",
        "if session.running is not None:",
        "if False:",
        "tests/unit/executor/test_plan_traces.py::test_a_plan_whose_session_ends",
    ),
    "a_view_is_never_made_again": Fault(
        PAGE_SERVER,
        "if now_s - made_s >= INTERVAL_S:",
        "if not text:",
        f"{PAGE}::test_an_event_follows_each_change_and_no_other",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_test_of_the_client_notices(name: str, tmp_path: Path) -> None:
    assert_noticed(FAULTS[name], tmp_path)
