"""A newcomer's first quarter of an hour: stack up, traffic, and every view says the same.

That every panel has data is in ``test_boards``, that alerts fire and clear in ``test_alerts``, that
metrics have values in ``test_newcomer_metrics``, and clients in other languages are in
``test_clients``. ``make newcomer`` runs all of them.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

from kvplane import ControlClient
from kvplane.results import total_of
from kvplane.wire.v1 import types_pb2
from tests.helpers.load import Load
from tests.helpers.monitored_stack import ROOT, MonitoredStack, free_port
from tests.helpers.programs import run
from tests.helpers.tools import needs

POOL = ["--num-device-blocks", "96", "--num-host-blocks", "32"]
STATES = ("free", "cached", "held", "retired")
PATIENCE_S = 20.0


def command(stack: MonitoredStack, *arguments: str) -> Any:
    """What a command of kvplane prints as JSON."""
    done = run("kvplane", "--json", "--control-plane", stack.control, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def shown(port: int) -> dict[str, Any]:
    """The only pool as the page shows it now."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/events", timeout=10) as events:
        told = json.loads(events.readline().removeprefix(b"data: "))
    (pool,) = told["pools"]
    return pool  # type: ignore[no-any-return]


async def test_page_command_metrics_and_api_agree_on_a_stack_that_had_traffic(
    tmp_path: Path,
) -> None:
    port = free_port()
    arguments = ["--model", str(ROOT / "models" / "recall"), *POOL]
    pages = ["--page-port", str(port)]
    needs("prometheus", "chromium")
    with MonitoredStack(tmp_path, pages, arguments, with_alertmanager=False) as stack:
        before = await asyncio.to_thread(shown, port)
        async with ControlClient(stack.control) as control:
            load = asyncio.create_task(Load(duration_s=5).run(control, "default"))
            while (await asyncio.to_thread(shown, port))["num_sequences"] == 0:
                assert not load.done(), load
            await load
        async with asyncio.timeout(PATIENCE_S):  # until the data plane has fenced the session
            page = await asyncio.to_thread(shown, port)
            while any(drawn["num_in"]["retired"] for drawn in page["maps"]):
                page = await asyncio.to_thread(shown, port)
        assert page["num_lookup_tokens"] > before["num_lookup_tokens"]

        (status,) = (await asyncio.to_thread(command, stack, "status"))["pools"]
        pools = await asyncio.to_thread(command, stack, "pools")
        async with ControlClient(stack.control) as control:
            api = await control.get_pool("default")
            counters = await control.get_counters("default")
        told = status["pool"], status["sessions"], status["sequences"]
        assert told == ("default", 0, 0)
        assert (page["num_sessions"], page["num_sequences"]) == (0, 0)
        assert page["num_hit_tokens"] == total_of(counters, "hit_tokens_total") > 0
        for tier, row, drawn in zip(api.usage, pools["tiers"], page["maps"], strict=True):
            name = types_pb2.Tier.Name(tier.tier).removeprefix("TIER_").lower()
            counts = {state: getattr(tier, f"num_{state}_blocks") for state in STATES}
            assert drawn["tier"] == name
            assert drawn["num_in"] == counts
            assert {state: row[state] for state in STATES} == counts
            await until_scraped(stack, name, counts)


async def until_scraped(stack: MonitoredStack, tier: str, counts: dict[str, int]) -> None:
    """Prometheus has these numbers of blocks, as soon as it has scraped them."""
    expression = f'kvplane_blocks{{tier="{tier}"}}'
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        series = await asyncio.to_thread(stack.query, expression)
        found = {each["metric"]["state"]: int(float(each["value"][1])) for each in series}
        if {state: found.get(state) for state in STATES} == counts:
            return
        assert time.monotonic() < deadline_s, (found, counts)
        await asyncio.sleep(0.5)
