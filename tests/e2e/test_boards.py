"""Every panel of every board has data, from a real Prometheus that scrapes a loaded stack."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvplane import ControlClient
from scripts import boards
from tests.helpers.load import Load
from tests.helpers.monitored_stack import ROOT, RULES, MonitoredStack
from tests.helpers.tools import needs

INTERVAL = "10s"
NOT_HERE = re.compile(
    "kvplane_(engine|router|file|fence|requests_failed|rejections|admissions_failed)"
)
# Tight: sequences wait, are cut, swapped and evicted.
POOL = ["--num-device-blocks", "96", "--num-host-blocks", "32"]


def panels() -> list[tuple[str, dict[str, Any]]]:
    """Panels with queries: neither rows nor the runbook's text."""
    return [
        (name, panel)
        for name, text in boards.files().items()
        for panel in json.loads(text)["panels"]
        if panel["type"] not in ("row", "text")
    ]


def expression(target: dict[str, Any]) -> str:
    """A panel's query as Grafana sends it, with every variable set to all."""
    text: str = target["expr"].replace("$__rate_interval", INTERVAL).replace("$__range", "5m")
    return re.sub(r"\$(pool|instance|tenant)", ".*", text)


def missing(stack: MonitoredStack) -> list[str]:
    """The queries that have no finite value now. This stack has no engine, router or files, and
    no call fails and no session ends.
    """
    found = []
    for name, panel in panels():
        for query in map(expression, panel["targets"]):
            values = [float(series["value"][1]) for series in stack.query(query)]
            if not any(map(math.isfinite, values)) and not NOT_HERE.search(query):
                found.append(f"{name}: {panel['title']}: {query}")
    return found


@pytest.mark.nightly  # waits for Prometheus; queries are checked on push
async def test_every_panel_has_data_under_load(tmp_path: Path) -> None:
    arguments = ["--model", str(ROOT / "models" / "recall"), *POOL]
    needs("prometheus", "promtool")
    with MonitoredStack(tmp_path, [], arguments, with_alertmanager=False) as stack:
        async with ControlClient(stack.control) as control:
            engine = Load(duration_s=60, num_sequences=24, num_prefixes=12)
            load = asyncio.create_task(engine.run(control, "default"))
            end_s = time.monotonic() + 45
            while absent := await asyncio.to_thread(missing, stack):
                assert time.monotonic() < end_s, "\n".join(absent)
                assert not load.done(), load
                await asyncio.sleep(1)
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)


def test_the_boards_are_those_that_the_script_writes() -> None:
    for name, text in boards.files().items():
        assert (boards.BOARDS / name).read_text() == text, "run make boards"
    assert {path.name for path in boards.BOARDS.iterdir()} == set(boards.files())


def test_the_first_board_asks_an_operators_four_questions() -> None:
    (overview,) = (json.loads(text) for name, text in boards.files().items() if "overview" in name)
    rows = [panel["title"] for panel in overview["panels"] if panel["type"] == "row"]
    assert rows == ["Is it up", "Is it useful", "Is it full", "Is it slow"]
    names = [each["name"] for each in overview["templating"]["list"]]
    assert names == ["datasource", "pool", "instance", "tenant"]


def test_every_alert_has_a_panel_of_the_runbook() -> None:
    (runbook,) = (json.loads(text) for name, text in boards.files().items() if "runbook" in name)
    titles = {panel["title"] for panel in runbook["panels"]}
    alerts = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"][0]["rules"]
    assert {rule["alert"] for rule in alerts} <= titles


def test_every_panel_says_what_it_shows_and_in_which_unit() -> None:
    for name, panel in panels():
        assert panel["description"].endswith("."), f"{name}: {panel['title']}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}", "one's own Grafana has another source"
        assert panel["targets"]
        divided = [each["expr"] for each in panel["targets"] if "/" in each["expr"]]
        assert all("> 0)" in query for query in divided), "NaN without traffic"
        steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
        begins = [each["value"] for each in steps]
        assert begins == sorted(begins), "colours begin one after the other"
    for text in boards.files().values():
        places = [panel["gridPos"] for panel in json.loads(text)["panels"]]
        cells = [
            (x, y)
            for place in places
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(cells) == len(set(cells)), "panels overlap"
        assert max(x for x, _ in cells) < 24
