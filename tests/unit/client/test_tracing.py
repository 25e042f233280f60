"""Traces of steps: off they cost nothing, and what is not a trace context is passed over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvplane import ops, tracing
from kvplane.errors import DeadlineExceededError, InvalidRequestError
from kvplane.session.step_numbering import Steps
from kvplane.transport.retry import Deadline
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_model import World

ROOT = Path(__file__).resolve().parents[3]
ABOVE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

IN_MEMORY = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvplane import tracing

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
tracing.use_application()
ABOVE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
with tracing.span("outer", ABOVE, "SERVER", number=7):
    assert tracing.to_metadata() == (("traceparent", tracing.traceparent()),)
    inner = tracing.begin("inner", ABOVE)
    with tracing.inside(inner):
        here = tracing.traceparent()
    tracing.end(inner, "it broke", tokens=3)
    tracing.end(inner)
with tracing.span("begun anew", "00-no-parent"):
    pass
inner, outer, anew = exporter.get_finished_spans()
assert outer.parent.span_id == 0xB7AD6B7169203331
assert outer.context.trace_id == inner.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
assert inner.parent.span_id == outer.context.span_id, "the current span comes before the given one"
assert tracing.from_metadata([("a", "b"), ("traceparent", here)]).split("-")[2] == format(
    inner.context.span_id, "016x"
)
assert (outer.attributes, inner.attributes) == ({"kvplane.number": 7}, {"kvplane.tokens": 3})
assert (inner.status.description, anew.parent) == ("it broke", None)
"""


def run(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_spans_have_parents_attributes_and_failures() -> None:
    run(IN_MEMORY)


def test_without_traces_nothing_is_imported_and_no_span_is_made() -> None:
    run(
        "import sys\nfrom kvplane import tracing\n"
        "assert tracing.span('a') is tracing.span('b') is tracing.inside(None)\n"
        "assert tracing.begin('a') is None\ntracing.end(None)\n"
        "assert (tracing.traceparent(), tracing.to_metadata()) == ('', None)\n"
        "assert tracing.from_metadata([('traceparent', 'x')]) == ''\n"
        "assert 'opentelemetry' not in sys.modules"
    )


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"},
        {"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_SERVICE_NAME": "named"},
    ],
)
def test_nothing_is_set_up_unless_it_is_asked_for(environ: dict[str, str]) -> None:
    assert not tracing.setup("tests", environ)


def test_an_exporter_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="'zipkin' is not installed: there are console"):
        tracing.setup("tests", {"OTEL_TRACES_EXPORTER": "zipkin"})


def test_a_collector_that_is_away_delays_no_exit() -> None:
    run(
        "import atexit, os, time\nfrom kvplane import tracing\n"
        # Registered first, it is called last. An exception would not change the exit code.
        "atexit.register(lambda: time.monotonic() - ended_s > 4 and os._exit(1))\n"
        "os.environ['OTEL_EXPORTER_OTLP_ENDPOINT'] = 'http://127.0.0.1:9'\n"
        "assert tracing.setup('tests')\n"
        "with tracing.span('a'):\n    pass\n"
        "ended_s = time.monotonic()"
    )


def test_without_opentelemetry_a_program_says_what_to_install() -> None:
    hidden = (
        "import sys; sys.modules['opentelemetry'] = None; sys.argv = ['c', '--bind', '[::1]:0']"
    )
    run_main = "from control_plane.__main__ import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", f"{hidden}; {run_main}"],
        env={"OTEL_TRACES_EXPORTER": "otlp", "PYTHONPATH": ":".join(sys.path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "OpenTelemetry is not installed: pip install 'kvplane[otel]'" in done.stderr


def plan_of(traceparent: str) -> plan_pb2.Plan:
    world = World()
    engine = world.engine()
    operations = [ops.admit(1, [1, 2, 3])]
    request = cpb.StepRequest(
        session=engine.ref, number=1, operations=operations, traceparent=traceparent
    )
    answer = world.core.step(request, engine.tenant)
    request.traceparent = OTHER
    assert world.core.step(request, engine.tenant) == answer, "a trace is no part of the content"
    return plan_pb2.Plan.FromString(answer.plan.payload)


@pytest.mark.parametrize("traceparent", [ABOVE, "", "00-x", ABOVE + "-0", ABOVE.upper(), "é"])
def test_a_plan_takes_its_steps_trace_on_if_it_is_one(traceparent: str) -> None:
    plan = plan_of(traceparent)
    assert plan.traceparent == (traceparent if traceparent == ABOVE else "")
    assert plan.pool_id
    assert plan.number == 1


async def test_a_step_that_is_called_again_in_another_trace_is_the_same_step() -> None:
    sent: list[tuple[int, str]] = []

    async def send(request: Any, _: Deadline) -> str:
        sent.append((request.number, request.traceparent))
        if len(sent) == 1:
            raise DeadlineExceededError("no answer")
        return "answer"

    steps = Steps()
    with pytest.raises(DeadlineExceededError):
        await steps.call(cpb.StepRequest(traceparent=ABOVE), send, Deadline.after(60))
    again = await steps.call(cpb.StepRequest(traceparent=OTHER), send, Deadline.after(60))
    assert again == "answer"
    assert sent == [(1, ABOVE), (1, ABOVE)]
    assert not steps.abandoned
