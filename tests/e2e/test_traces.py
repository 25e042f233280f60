"""A step is one trace of three processes, as a collector sees it over OTLP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from tests.e2e.engine_planes import Pair
from tests.helpers.programs import ROOT, run

MODEL = ROOT / "models" / "recall"
# What each process adds to a step's trace, and the span above it.
STEP = {
    ("kvplane-engine", "engine.step", None),
    ("kvplane-engine", "kvplane.StepRequest", "engine.step"),
    ("kvplane-control-plane", "kvplane.control_plane.step", "kvplane.StepRequest"),
    ("kvplane-data-plane", "kvplane.data_plane.plan", "kvplane.StepRequest"),
}
UNARY = "kvplane.v1.SessionService/Step"
UNARY_STEP = {
    ("a-client", "a unary step", None),
    ("kvplane-control-plane", UNARY, "a unary step"),
    ("kvplane-control-plane", "kvplane.control_plane.step", UNARY),
}
SUBMIT = {
    ("a-client", "kvplane.StepRequest", None),
    ("kvplane-control-plane", "kvplane.control_plane.step", "kvplane.StepRequest"),
}
ABORT = {
    ("a-client", "kvplane.AbortPlansRequest", None),
    (
        "kvplane-control-plane",
        "kvplane.v1.SessionService/AbortPlans",
        "kvplane.AbortPlansRequest",
    ),
}
CLIENT = """
import sys

import grpc

from kvplane import Layout, tracing
from kvplane.sync import ControlClient
from kvplane.wire.v1 import session_pb2, session_pb2_grpc
from tests.helpers.planning.control_wire import stub_of

assert tracing.setup("a-client")
with ControlClient(sys.argv[1]) as control, grpc.insecure_channel(sys.argv[1]) as channel:
    layout = control.wait_ready("default").layout
    with control.open_session("default", layout) as session:
        session.submit_receipts()
        session.abort_plans()
        number = session.last_number + 1
        step = session_pb2.StepRequest(session=session._wrapped._ref, number=number)
        stub = stub_of(channel)
        with tracing.span("a unary step"):
            stub.Step(step, metadata=tracing.to_metadata())
"""
pytestmark = pytest.mark.timeout(300)


class Collector(otlp_grpc.TraceServiceServicer):
    """Keeps what it is sent: service and span."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    def Export(self, request: Any, context: Any) -> otlp.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            spans = [span for scope in resource.scope_spans for span in scope.spans]
            self.spans += [(names["service.name"], span) for span in spans]
        return otlp.ExportTraceServiceResponse()

    def traces(self) -> list[set[tuple[str, str, str | None]]]:
        """Service, name and the name above, of the spans of each trace."""
        names = {span.span_id: span.name for _, span in self.spans}
        found = defaultdict(set)
        for service, span in self.spans:
            above = names[span.parent_span_id] if span.parent_span_id else None
            found[span.trace_id].add((service, span.name, above))
        return list(found.values())


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Where all processes that the test starts send their spans."""
    server = grpc.server(ThreadPoolExecutor(2))
    collector = Collector()
    otlp_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    yield collector
    server.stop(None).wait()


def test_the_engine_and_both_planes_send_one_trace_for_each_step(
    collector: Collector, tmp_path: Path
) -> None:
    with Pair(MODEL, tmp_path, pool_id="default") as planes:
        flags = ["--model", str(MODEL), "--control-plane", planes.control.address, "--no-probe"]
        flags += ["--prompt", "abc=xyz;?abc=", "--max-tokens", "3"]
        for program in (("engine", "generate", *flags), ("-c", CLIENT, planes.control.address)):
            done = run(*program)
            assert done.returncode == 0, done.stderr
    traces = collector.traces()  # all three have ended, and sent what they had
    assert traces.count(STEP) >= 3, traces
    assert UNARY_STEP in traces
    assert SUBMIT in traces
    assert ABORT in traces
    opened = ("kvplane-control-plane", "kvplane.v1.SessionService/OpenSession", None)
    assert {opened} in traces
    numbers = {
        attribute.value.int_value
        for service, span in collector.spans
        for attribute in span.attributes
        if service == "kvplane-data-plane" and attribute.key == "kvplane.tokens"
    }
    assert 1 in numbers, "a plan that decodes one token"
