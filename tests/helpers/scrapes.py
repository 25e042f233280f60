"""Scrapes of a plane: fetched, and read by strict parsers."""

from __future__ import annotations

import asyncio
import subprocess
import urllib.request

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.tools import needs

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def fetch(port: int | None, accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


def read(text: str) -> dict[str, Metric]:
    """Return the families by name. A name that is there twice, with or without samples, fails."""
    families: dict[str, Metric] = {}
    for family in text_string_to_metric_families(text):
        assert family.name not in families, f"{family.name} is there twice"
        families[family.name] = family
        seen = [(s.name, tuple(sorted(s.labels.items()))) for s in family.samples]
        assert len(seen) == len(set(seen)), f"a sample of {family.name} is there twice"
    return families


def lint(text: str) -> None:
    """Run promtool; fail with its complaints."""
    needs("promtool")
    run = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True
    )
    assert run.returncode == 0 and not run.stdout + run.stderr, run.stdout + run.stderr


async def checked(port: int | None) -> dict[str, Metric]:
    """Return the families of a scrape, in both formats, after all checks."""
    text = await asyncio.to_thread(fetch, port)
    lint(text)
    open_text = await asyncio.to_thread(fetch, port, OPEN_METRICS)
    open_names = [family.name for family in parse_open(open_text)]
    assert len(open_names) == len(set(open_names))
    return read(text)
