"""Traces of steps, by OpenTelemetry: opt-in, and next to nothing while they are off.

One step is one trace: the engine's span, below it the client's call, the control plane's step, and
the plan on each data plane. Unary calls carry W3C's ``traceparent`` as gRPC metadata. A step on a
stream has it in its request, and its plan carries it through the engine to the data planes.

    engine.step
      kvplane.StepRequest              the client, until the answer
        kvplane.control_plane.step     in the control plane
        kvplane.data_plane.plan        from its start to its receipt, on each shard
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, Literal

from kvplane.errors import InvalidRequestError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

Kind = Literal["INTERNAL", "SERVER", "CLIENT"]
Value = str | int | float

_HEADER: Final = "traceparent"
_TRACEPARENT: Final = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_LAST_EXPORT_MS: Final = 1000
_NOTHING: Final = nullcontext()
_tracer: Tracer | None = None


def setup(service: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Switch traces on, and export them, if ``environ`` names an exporter or an endpoint for them
    (``OTEL_TRACES_EXPORTER``, ``OTEL_EXPORTER_OTLP_ENDPOINT``). Returns whether it did. The other
    variables of OpenTelemetry apply too; ``service`` is the name unless they give one.

    Raises InvalidRequestError when OpenTelemetry is not installed, or the exporter is not known.
    """
    exporters = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    is_asked_for = exporters or any(environ.get(name) for name in _ENDPOINTS)
    is_disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_disabled or not is_asked_for or exporters == "none":
        return False
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            "traces are asked for, but OpenTelemetry is not installed: pip install 'kvplane[otel]'",
            field="OTEL_TRACES_EXPORTER",
        ) from error

    class Processor(BatchSpanProcessor):
        def shutdown(self) -> None:
            """Export what is left, for at most as long as an exit may wait for a collector."""
            self._batch_processor.shutdown(_LAST_EXPORT_MS)

    resource = Resource({"service.name": service}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    for name in (exporters or "otlp").split(","):
        provider.add_span_processor(Processor(_exporter(name.strip(), environ)))
    trace.set_tracer_provider(provider)
    use_application()
    return True


def use_application() -> None:
    """Switch traces on in a process that has set OpenTelemetry up itself: spans go to its tracer
    provider. Needs ``opentelemetry-api``.
    """
    global _tracer
    from opentelemetry import trace

    _tracer = trace.get_tracer("kvplane")


def is_on() -> bool:
    """Return whether tracing is switched on."""
    return _tracer is not None


def span(
    name: str, parent: str = "", kind: Kind = "INTERNAL", **attributes: Value
) -> AbstractContextManager[Any]:
    """Return a context in which a new span is current; the span ends with it. ``parent``: the
    ``traceparent`` of the span above it where none is current.
    """
    if _tracer is None:
        return _NOTHING
    from opentelemetry.trace import SpanKind

    return _tracer.start_as_current_span(
        name, _above(parent), kind=SpanKind[kind], attributes=_ours(attributes)
    )


def begin(name: str, parent: str = "", kind: Kind = "INTERNAL", **attributes: Value) -> Span | None:
    """Start a span that ``end`` ends, on any thread. Returns None while traces are off."""
    if _tracer is None:
        return None
    from opentelemetry.trace import SpanKind

    return _tracer.start_span(
        name, _above(parent), kind=SpanKind[kind], attributes=_ours(attributes)
    )


def inside(span: Span | None) -> AbstractContextManager[Any]:
    """Return a context in which ``span`` is the current one. Does not end it."""
    if span is None:
        return _NOTHING
    from opentelemetry.trace import use_span

    return use_span(span)


def end(span: Span | None, failure: str = "", **attributes: Value) -> None:
    """End a span of ``begin``, unless it has ended. ``failure``: the error, empty without one."""
    if span is None or not span.is_recording():
        return
    span.set_attributes(_ours(attributes))
    if failure:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, failure))
    span.end()


def traceparent() -> str:
    """Return the ``traceparent`` of the current span; empty while there is none."""
    if _tracer is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(_HEADER, "")


def checked(traceparent: str) -> str:
    """Return ``traceparent`` if well-formed, else empty, which by W3C starts a new trace."""
    return traceparent if traceparent and _TRACEPARENT.fullmatch(traceparent) else ""


def to_metadata() -> tuple[tuple[str, str], ...] | None:
    """Return gRPC metadata that carries the current span; None while there is none."""
    parent = traceparent()
    return ((_HEADER, parent),) if parent else None


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the ``traceparent`` in gRPC metadata; empty while traces are off."""
    if _tracer is None:
        return ""
    for key, value in metadata or ():
        if key == _HEADER and isinstance(value, str):
            return value
    return ""


def _ours(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"kvplane.{name}": value for name, value in attributes.items()}


def _above(parent: str) -> Context | None:
    """Return the OpenTelemetry context of ``parent`` for a new span, or the current span's."""
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not checked(parent) or get_current_span().get_span_context().is_valid:
        return None
    return TraceContextTextMapPropagator().extract({_HEADER: parent})


def _exporter(name: str, environ: Mapping[str, str]) -> Any:
    if name == "otlp":
        own, shared = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
        protocol = environ.get(own) or environ.get(shared) or "grpc"
        name = f"otlp_proto_{protocol.partition('/')[0]}"
    known = entry_points(group="opentelemetry_traces_exporter")
    if name not in known.names:
        raise InvalidRequestError(
            f"{name!r} is not installed: there are {', '.join(sorted(known.names))}",
            field="OTEL_TRACES_EXPORTER",
        )
    return known[name].load()()
