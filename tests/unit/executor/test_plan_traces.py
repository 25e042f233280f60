"""Every plan's trace ends, also that of a plan that never does: only then it is exported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvplane import tracing
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.plan_author import PlanAuthor, set_blocks, span


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("tests"))
    yield exporter
    provider.shutdown()


@pytest.fixture
def rig() -> Rig:
    """A plan has started, and one of two layers is written."""
    rig = Rig()
    rig.start(1, set_blocks(1, [(0, 1)]), span(1, 0, 3))
    rig.layer(0, 3)
    return rig


def ended(traces: InMemorySpanExporter) -> list[str | None]:
    """Why the plans whose traces have ended failed; None for those that have run."""
    return [each.status.description for each in traces.get_finished_spans()]


def test_a_plan_that_has_run(traces: InMemorySpanExporter, rig: Rig) -> None:
    assert ended(traces) == []
    rig.layer(1, 3)
    assert rig.executor.receipt(1) is not None
    assert ended(traces) == [None]
    rig.fence(1)
    assert ended(traces) == [None]


def test_a_plan_that_is_voided(traces: InMemorySpanExporter, rig: Rig) -> None:
    rig.run(2, set_blocks(1, [(0, 1)], allocated=False), previous=0, resync=True)
    assert ended(traces) == ["the plan was voided", None]


def test_a_plan_whose_session_ends(traces: InMemorySpanExporter, rig: Rig) -> None:
    rig.fence(1)
    assert ended(traces) == ["the session has ended"]


def test_a_plan_of_a_former_control_plane(traces: InMemorySpanExporter, rig: Rig) -> None:
    later = PlanAuthor(rig.executor.epoch, incarnation=rig.author.incarnation + 1)
    rig.executor.install(later.incarnation, later.key)
    assert ended(traces) == ["the session has ended"]
