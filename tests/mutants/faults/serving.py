"""Faults of the engine's thread behind the HTTP server."""

from __future__ import annotations

from tests.mutants.fault import Fault

WORKER, TESTS = "engine/serving/worker.py", "tests/unit/engine/test_engine_worker.py"

FAULTS = tuple(
    Fault(name, WORKER, old, new, f"{TESTS}::{test}", timeout_s=60)
    for name, old, new, test in (
        (  # No step comes between prompts that take long to read.
            "prompts_are_read_all_at_once",
            "_READ_S: Final = 0.01",
            "_READ_S: Final = 3600.0",
            "test_prompts_that_take_long_to_read_come_between_steps",
        ),
        (  # A request is not aborted when its stream is closed.
            "a_closed_stream_goes_on",
            "self._engine.abort(submission.request_id)",
            "pass",
            "test_a_stream_that_is_closed_aborts_its_request",
        ),
        (
            "any_number_is_accepted",
            "self._max_requests = max_requests",
            "self._max_requests = 100 * max_requests",
            "test_too_many_requests_are_refused",
        ),
        (  # What a prompt's reading raises is not caught.
            "a_bad_prompt_ends_the_thread",
            "except Exception as error:  # a tokenizer",
            "except ArithmeticError as error:  # a tokenizer",
            "test_a_prompt_that_is_refused_leaves_the_others_alone",
        ),
        (  # The requests that a step failed are forgotten.
            "a_failure_is_told_to_nobody",
            "            self._fail_all(error)\n",
            "            self._open.clear()\n",
            "test_a_failure_that_does_not_pass_fails_what_is_open_alone",
        ),
        (  # The thread ends and leaves its requests waiting.
            "stopping_is_told_to_nobody",
            "            self._end(has_failed)\n",
            "            pass\n",
            "test_stopping_fails_what_is_open_and_what_comes",
        ),
        (  # What a step adds goes to whoever came first.
            "answers_are_mixed_up",
            "        of_requests: dict[str, list[Event]] = {}\n",
            "        if len(self._open) > 1:\n"
            "            first = next(iter(self._open.values()))\n"
            "            self._open = dict.fromkeys(self._open, first)\n"
            "        of_requests: dict[str, list[Event]] = {}\n",
            "test_requests_come_and_go_while_others_run",
        ),
    )
)
