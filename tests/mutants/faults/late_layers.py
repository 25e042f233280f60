"""The tests of late layers notice a planted fault, in each way in which a layer comes."""

from __future__ import annotations

from tests.mutants.fault import Fault

LATE = "tests/rpc/test_late_layers.py"
SDK = "tests/rpc/sdk/test_sdk_execution.py"
EXECUTOR = "tests/unit/executor/test_passes.py"
PLANS = "data_plane/execution/plan_runner.py"
SESSIONS = "data_plane/plans/sessions.py"
CHECKED = "data_plane/plans/write_checks.py"
STREAM = "data_plane/server/execute_stream.py"
SERVER = "data_plane/server/local/layer_server.py"
EXECUTION = "kvplane/execution/shard_execution.py"

LAYERS = "tests/unit/executor/test_layers.py"

WAYS = ("gRPC", "shared", "bound")
CHECKS = {
    "any_plan_is_the_present_one": (
        PLANS,
        "if plan_number is not None and run.number != plan_number:",
        "if False:",
        "of_another_plan",
    ),
    "any_pass_is_the_present_one": (
        SESSIONS,
        "if index != self.pass_index:",
        "if False:",
        "of_another_pass",
    ),
    "layers_come_in_any_order": (
        PLANS,
        "elif index and not run.progress.is_written(index - 1):",
        "elif False:",
        "order",
    ),
    "published_blocks_are_written": (
        CHECKED,
        "self.check_still_writable(run)",
        "pass",
        "published_since",
    ),
    "taken_blocks_are_written": (
        CHECKED,
        "self.check_still_current(session, run)\n        self.check_still_writable",
        "self.check_still_writable",
        "another_session",
    ),
    "ended_sessions_write": (
        SESSIONS,
        "session = self._open.pop(session_id, None)",
        "session = self._open.get(session_id)",
        "has_ended",
    ),
}
# Where the embedded engine's case has another name.
EMBEDDED = {
    "published_since": "refused_for and published",
    "another_session": "refused_for and taken",
    "has_ended": "refused_for and ended",
}

FAULTS = (
    *(
        Fault(f"{name}, {way}", file, old, new, LATE, f"{test} and {way}")
        for name, (file, old, new, test) in CHECKS.items()
        for way in WAYS
    ),
    *(
        Fault(f"{name}, embedded", file, old, new, LAYERS, EMBEDDED.get(test, test))
        for name, (file, old, new, test) in CHECKS.items()
    ),
    *(
        Fault(
            f"a_stream_forgets_what_its_layers_name, {way}",
            STREAM,
            "self.run(layer, *_named_by(request.layer))",
            "self.run(layer, *(self.begun or ()))",
            LATE,
            f"{test} and {way}",
        )
        for test, way in (("another_plan", "gRPC"), ("another_pass", "shared"))
    ),
    Fault(
        "a_bound_layer_is_of_the_plan_that_was_begun",
        SERVER,
        "self._stream.run(layer, *packets.read_named(named))",
        "self._stream.run(layer, *(self._stream.begun or ()))",
        LATE,
        "another_pass and bound",
    ),
    Fault(
        "native_code_serves_a_plan_that_others_have_ended",
        "data_plane/execution/layer_runner.py",
        "run, may_write = plans.check_may_run(named, index, writes=True, attends=True)",
        "may_write, run = True, plans.latest(named.session_id, None)[1]",
        "tests/rpc/test_plan_passes.py",
        "earlier_pass",
    ),
    Fault(
        "what_a_packet_names_is_absent",
        STREAM,
        'return request.pass_index if request.HasField("pass_index") else None',
        "return request.pass_index or None",
        LATE,
        "in_no_pass and gRPC",
    ),
    Fault(
        "an_embedded_engine_forgets_its_plan",
        "data_plane/server/embedded_execution.py",
        "plan_number=self._plan_number,\n            pass_index",
        "plan_number=self._executor._sessions.get(1).latest.number,\n            pass_index",
        EXECUTOR,
        "it_started",
    ),
    Fault(
        "the_sdk_names_no_plan", EXECUTION, "plan_number=plan.number,\n", "", SDK, "names_the_plan"
    ),
    Fault(
        "the_sdk_names_no_pass",
        EXECUTION,
        "pass_index=plan.pass_index,",
        "",
        SDK,
        "presents_the_pass",
    ),
    Fault(
        "the_sdk_takes_any_plan_for_its_own",
        EXECUTION,
        "if started.plan_number != number:",
        "if False:",
        SDK,
        "answered_wrongly",
    ),
)
