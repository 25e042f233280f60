"""Faults of requests in slices, and of the lane in which long ones run."""

from __future__ import annotations

from tests.mutants.fault import Fault

CORE, SERVICE = "control_plane/core.py", "control_plane/server/service.py"
SHARING, SESSIONS = "control_plane/sessions/pool_admission.py", "control_plane/sessions/sessions.py"
OPERATIONS = "control_plane/steps/operations.py"
SLICES, LANE = "tests/unit/core/test_slices.py", "tests/unit/core/test_request_lane.py"
IN_ONE = f"{SLICES}::test_a_request_in_slices_is_answered_as_in_one"
RELEASED = f"{SLICES}::test_a_session_that_ends_is_released_between_requests"
GOES_ON = f"{LANE}::test_it_goes_on_when_its_caller_goes"
MOVES = "        while step.native.swap_some(step.handle, SLICE_BLOCKS):\n            yield\n"
ANSWERED = "    return StepAnswer(\n        encoded, step_at, operations,"

FAULTS = (
    Fault(
        "what_was_due_waits_for_the_timer",
        SHARING,
        "            if not is_busy:\n                self.tick()",
        "            if False:\n                self.tick()",
        f"{SLICES}::test_a_busy_session_is_cut_at_the_end_of_its_request",
    ),
    Fault(
        "the_queue_decides_between_slices",
        SHARING,
        "if session_id in self.sessions:  # it may have ended",
        "if False:",
        f"{SLICES}::test_nobody_is_granted_blocks_between_the_slices",
    ),
    Fault(
        "an_end_is_not_noticed_between_slices",
        SESSIONS,
        "if self.by_id.get(session.id) is not session:",
        "if False:",
        f"{SLICES}::test_a_session_may_end_between_the_slices",
    ),
    Fault(
        "each_part_counts_items_from_its_own_first",
        OPERATIONS,
        "for first, part in parts_of(message, token_ids):",
        "for first, part in ((0, part) for _, part in parts_of(message, token_ids)):",
        IN_ONE,
    ),
    Fault(
        "each_part_of_many_frees_counts_items_from_its_own_first",
        OPERATIONS,
        "failures += [(first + failure[0], *failure[1:]) for failure in refused or ()]\n"
        "            first += size",
        "failures += refused or ()\n            first += size",
        IN_ONE,
    ),
    Fault(
        "long_frees_run_in_one_slice",
        OPERATIONS,
        "if step.check_as or num_held <= SLICE_TOKENS or not",
        "if True or not",
        f"{SLICES}::test_a_long_free_lets_others_run",
    ),
    Fault(
        "fenced_before_all_is_released",
        SESSIONS,
        "if ended.unfenced_shards or not ended.is_released:",
        "if ended.unfenced_shards:",
        RELEASED,
    ),
    Fault(
        "a_fence_is_forgotten_while_it_releases",
        SESSIONS,
        "            if ended is not None:\n",
        "            if ended is not None and ended.is_released:\n",
        RELEASED,
    ),
    Fault(
        "an_answer_is_repeated_without_its_plan",
        "control_plane/steps/requests.py",
        "numbers.remember(request, StepAnswer(answer.encoded, answer.step_at))",
        "step = cpb.StepResponse.FromString(answer.step)\n"
        '        step.ClearField("plan")\n'
        "        numbers.remember(request, StepAnswer(step.SerializeToString(), 0))",
        IN_ONE,
    ),
    Fault(
        "an_answer_begins_with_its_plan",
        "control_plane/steps/answers.py",
        ANSWERED,
        "    rest = cpb.StepResponse.FromString(StepAnswer(encoded, step_at).step)\n"
        "    head = cpb.StepResponse(plan=rest.plan).SerializeToString()\n"
        '    rest.ClearField("plan")\n'
        f"    encoded, step_at = head + rest.SerializeToString(), 0\n{ANSWERED}",
        IN_ONE,
    ),
    Fault(
        "a_large_swap_is_not_moved",
        OPERATIONS,
        MOVES,
        "        step.native.swap_some(step.handle, SLICE_BLOCKS)\n",
        IN_ONE,
    ),
    Fault(
        "a_swap_is_one_slice",
        OPERATIONS,
        f"        if num_blocks > SLICE_BLOCKS:\n            yield\n{MOVES}",
        "        yield from ()\n        step.native.swap_some(step.handle, 1 << 40)\n",
        f"{SLICES}::test_a_session_may_end_between_the_slices[swap]",
    ),
    Fault(
        "operations_are_checked_at_once",
        CORE,
        "            if begin:\n                yield\n",
        "            if False:\n                yield\n",
        f"{SLICES}::test_operations_are_checked_a_few_at_a_time",
    ),
    Fault(
        "it_is_one_slice",
        CORE,
        "return self._requests.run(self._session(request.session, tenant), request)",
        "yield from ()\n        session = self._session(request.session, tenant)\n"
        "        return run_to_end(self._requests.run(session, request))",
        f"{SLICES}::test_others_step_between_the_slices",
    ),
    Fault(
        "slices_run_without_a_turn",
        SERVICE,
        "TURNS_OF_A_CALL: Final = 2",
        "TURNS_OF_A_CALL: Final = 0",
        f"{LANE}::test_others_run_between_the_slices",
        timeout_s=10,
    ),
    Fault(
        "two_run_at_a_time",
        SERVICE,
        "async with self._lane:",
        "async with asyncio.Lock():",
        f"{LANE}::test_two_take_turns_in_the_order_in_which_they_came",
        timeout_s=10,
    ),
    Fault(
        "a_session_does_not_wait_for_its_own",
        SERVICE,
        "while (task := self._running.get(session_id)) is not None:",
        "while False:",
        f"{LANE}::test_a_session_waits_for_its_own_and_for_no_other",
        timeout_s=10,
    ),
    Fault(
        "a_caller_that_goes_ends_it",
        SERVICE,
        "return await asyncio.shield(task)",
        "return await task",
        GOES_ON,
        timeout_s=10,
    ),
    Fault(
        "its_end_is_not_told_once_its_caller_has_gone",
        SERVICE,
        "            self._ended()\n",
        "            pass\n",
        GOES_ON,
        timeout_s=10,
    ),
    Fault(
        "what_has_not_begun_stays_in_the_lane",
        SERVICE,
        "if not has_begun and self._begun != session_id:",
        "if False:",
        f"{LANE}::test_what_has_not_begun_goes_with_its_caller",
        timeout_s=10,
    ),
)
