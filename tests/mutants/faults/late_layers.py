"""The tests of late layers notice a planted fault, in each way in which a layer comes."""

from __future__ import annotations

from tests.mutants.fault import Fault

LATE = "tests/rpc/test_late_layers.py"
SDK = "tests/rpc/test_sdk_execution.py"
EXECUTOR = "tests/unit/executor/test_passes.py"
PLANS = "data_plane/execution/plan_runner.py"
SESSIONS = "data_plane/plans/sessions.py"
STREAM = "data_plane/server/execute_stream.py"
REPEATED = "data_plane/execution/repeated_layers.py"
EXECUTION = "kvplane/execution/shard_execution.py"

WAYS = ("gRPC", "shared", "known", "embedded", "repeated")

FAULTS = (
    *(
        Fault(
            f"any_plan_is_the_present_one, {way}",
            PLANS,
            "if plan_number is not None and run.number != plan_number:",
            "if False:",
            LATE,
            f"another_plan and {way}",
        )
        for way in WAYS
    ),
    *(
        Fault(
            f"any_pass_is_the_present_one, {way}",
            SESSIONS,
            "if index != self.pass_index:",
            "if False:",
            LATE,
            f"another_pass and {way}",
        )
        for way in WAYS
    ),
    Fault(
        "a_stream_forgets_what_its_layers_name",
        STREAM,
        "self._run(layer, _belongs(request.layer))",
        "self._run(layer, self._begun)",
        LATE,
        "another_plan and gRPC",
    ),
    Fault(
        "a_socket_forgets_what_its_layers_name",
        STREAM,
        "self._read(request.layer, is_local=True), _belongs(request.layer)",
        "self._read(request.layer, is_local=True), self._begun",
        LATE,
        "another_pass and shared",
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
        "packets_are_known_by_any_tail",
        STREAM,
        "if belongs is not None and packet.endswith(self._tail):",
        "if belongs is not None:",
        LATE,
        "another_pass and known",
    ),
    Fault(
        "what_names_a_plan_already_is_known",
        "kvplane/transport/local/packets.py",
        'return head if alone.HasField("layer") and not names_plan else b""',
        "return head",
        LATE,
        "names_twice",
    ),
    Fault(
        "repeated_layers_go_on_under_the_next_plan",
        REPEATED,
        "session.latest is run",
        "True",
        LATE,
        "voided and repeated",
    ),
    Fault(
        "repeated_layers_go_on_in_the_next_pass",
        REPEATED,
        "and run.pass_index == begun.pass_index",
        "",
        LATE,
        "another_pass and repeated",
    ),
    Fault(
        "an_embedded_engine_forgets_its_plan",
        "kvplane/runtime/embedded.py",
        "plan_number=self._plan_number,\n            pass_index",
        "plan_number=executor._sessions.get(1).latest.number,\n            pass_index",
        EXECUTOR,
        "it_started",
    ),
    Fault(
        "the_sdk_names_no_plan", EXECUTION, "plan_number=plan.number,", "", SDK, "names_the_plan"
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
        "as_another_one",
    ),
)
