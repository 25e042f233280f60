"""The tests of the engine's plans, in passes and after failures, notice a planted fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.source_faults import Fault, assert_noticed

EXECUTOR = "tests/unit/executor/test_passes.py"
RPC = "tests/rpc/test_plan_passes.py"
STEPS = "tests/kernels/test_fixed_steps.py"
ENGINE = "tests/unit/engine/test_plans_in_passes.py"
SESSIONS = "data_plane/plans/sessions.py"
BATCH = "data_plane/plans/batches/attention_batch.py"
CORE = "engine/running/core.py"
SCHEDULER = "engine/scheduling/scheduler.py"
SEQUENCE = "engine/scheduling/sequence.py"

FAULTS = {
    "the_first_pass_is_the_last": Fault(
        SESSIONS, "self.pass_index in (None, self.num_passes - 1)", "True", EXECUTOR, "no_receipt"
    ),
    "a_pass_attends_to_what_comes_after_it": Fault(
        BATCH, "lens = first + 1", "lens = first + 2", EXECUTOR, "as_the_whole_plan"
    ),
    "a_stream_that_broke_forgets_the_pass": Fault(
        "kvplane/execution/shard_execution.py",
        "_presented(request, started.plan_number, started.num_tokens)",
        "_presented(_request(plan, None), started.plan_number, started.num_tokens)",
        "tests/rpc/test_sdk_execution.py",
        "breaks_in_a_pass",
    ),
    "a_layer_of_another_pass_runs": Fault(
        SESSIONS,
        "if index != self.pass_index:",
        "if False:",
        EXECUTOR,
        "of_another_pass",
    ),
    "tokens_of_a_pass_are_all_that_is_due": Fault(
        SCHEDULER, "sequence.num_due = num_tokens * is_live", "sequence.num_due = 1", ENGINE
    ),
    "a_single_call_writes_to_any_pass": Fault(
        "data_plane/server/execute_stream.py",
        'self.run(layer, number or started.plan_number, pass_index, "")',
        'self.run(layer, number or started.plan_number, self.begun.pass_index, "")',
        RPC,
        "single_call",
    ),
    "an_embedded_engine_forgets_its_pass": Fault(
        "data_plane/server/embedded_execution.py",
        "pass_index=self._pass_index,",
        "",
        EXECUTOR,
        "embedded_engine",
    ),
    "a_captured_step_runs_in_any_pass": Fault(
        "data_plane/execution/fixed_step.py",
        "self.session_id, plan_number, pass_index, 0, writes=True, attends=True",
        "self.session_id,\n                plan_number,\n"
        "                self._plans.latest(self.session_id, plan_number)[1].pass_index,\n"
        "                0,\n                writes=True,\n                attends=True,",
        STEPS,
        "another_pass",
    ),
    "passes_begin_before_the_one_before_is_written": Fault(
        SESSIONS,
        "coming, may_begin = self.pass_index + 1, self.progress.is_complete",
        "coming, may_begin = self.pass_index + 1, True",
        EXECUTOR,
        "come_in_order",
    ),
    "a_plan_begun_whole_goes_on_in_passes": Fault(
        SESSIONS,
        "coming, may_begin = 0, not self.progress.has_begun",
        "coming, may_begin = 0, True",
        EXECUTOR,
        "begun_whole",
    ),
    "a_span_without_tokens_left_has_a_row": Fault(
        BATCH, "is_there = places < starts[1:]", "is_there = places < starts[-1]", EXECUTOR
    ),
    "what_a_pass_will_write_can_be_read": Fault(
        SESSIONS, "index + is_written)", "index + 1)", EXECUTOR, "can_be_read"
    ),
    "blocks_are_written_to_a_plan_in_passes": Fault(
        "data_plane/execution/table_blocks.py",
        "if run.pass_index is not None:",
        "if False:",
        EXECUTOR,
        "not_sent",
    ),
    "a_failed_device_ends_a_pass_well": Fault(
        SESSIONS,
        "return self.transferred and self.progress.is_complete",
        "return self.transferred and self.progress.is_complete and not self.pass_index == 0",
        EXECUTOR,
        "fails_in_a_pass",
    ),
    "the_server_passes_over_the_pass": Fault(
        "data_plane/server/execute_stream.py",
        "if of_pass is not None:",
        "if False:",
        RPC,
        "pass_by_pass",
    ),
    "a_failed_pass_is_gone_on_with": Fault(
        CORE, "spans, self._pass = present.spans, None", "spans = present.spans", ENGINE
    ),
    "each_pass_asks_for_another_plan": Fault(
        CORE, "if is_last and self._plans_ahead", "if self._plans_ahead", ENGINE, "asked_once"
    ),
    "a_plan_goes_on_when_all_have_ended": Fault(
        CORE,
        "if spans and all(span.sequence.finish_reason for span in spans):",
        "if False:",
        ENGINE,
        "nobody_wants",
    ),
    "plans_are_long_while_others_wait": Fault(
        SCHEDULER,
        "return bool(can_admit or self.swapped",
        "return bool(self.swapped",
        "tests/unit/engine/test_planning_ahead.py",
        "changes_no_token",
    ),
    "rows_that_ended_are_computed_for_long": Fault(
        SEQUENCE, "is_certain = all(", "is_certain = True or all(", ENGINE, "asked_once"
    ),
    "one_sequence_has_short_plans": Fault(
        SEQUENCE,
        "return MAX_PASSES if is_certain or len(running) == 1",
        "return MAX_PASSES if is_certain",
        ENGINE,
        "runs_alone",
    ),
    "stop_strings_end_nothing": Fault(
        SEQUENCE,
        "return not (self.request.end_token_ids or self.params.stop)",
        "return not self.request.end_token_ids",
        ENGINE,
        "asked_once",
    ),
    "who_arrives_waits_for_a_long_plan": Fault(
        CORE, "if most_s and not self.may_arrive:", "if most_s:", ENGINE, "nobody_can_arrive"
    ),
    "a_batch_is_asked_for_often": Fault(
        CORE, "if most_s and not self.may_arrive:", "if False:", ENGINE, "nobody_can_arrive"
    ),
    "a_batch_may_be_joined": Fault(
        "engine/llm.py",
        "may_arrive, self._core.may_arrive = self._core.may_arrive, False",
        "may_arrive = self._core.may_arrive",
        "tests/e2e/test_engine_llm.py",
        "may_arrive",
    ),
    "nobody_arrives_after_a_batch": Fault(
        "engine/llm.py",
        "self._core.may_arrive = may_arrive",
        "pass",
        "tests/e2e/test_engine_llm.py",
        "may_arrive",
    ),
    "long_plans_are_asked_for_that_do_not_fit": Fault(
        SCHEDULER,
        "in_passes = self._room.fits(sum(",
        "in_passes = True or self._room.fits(sum(",
        ENGINE,
        "does_not_fit",
    ),
    "a_plan_after_an_abort_has_passes": Fault(
        SCHEDULER,
        "self.max_passes = 1  # the next",
        "pass  # the next",
        ENGINE,
        "after_an_abort",
    ),
    "an_engine_that_has_raised_gives_up": Fault(
        CORE,
        "            self._num_failures, self._failing_since_s = 0, None\n            raise error",
        "            raise error",
        "tests/unit/engine/test_engine_core.py",
        "has_raised",
    ),
    "beams_go_on_in_passes": Fault(
        SEQUENCE,
        "return is_one and self.num_uncomputed <= 1",
        "return True",
        ENGINE,
        "plans_are_short",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_test_of_passes_notices(name: str, tmp_path: Path) -> None:
    assert_noticed(FAULTS[name], tmp_path)
