"""The page shows what the API says, live, and to whom the API would say it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from control_plane.server.page import page_server
from control_plane.server.server import ControlPlaneServer
from kvplane import ControlClient, DataClient, Execution, Session, ops
from kvplane.results import total_of
from tests.helpers.both_planes import LAYOUT, POOL, Planes, run_step
from tests.helpers.browser import Browser
from tests.helpers.planes_in_process import control_plane
from tests.helpers.tools import needs
from tests.helpers.waiting import until

TLS = Path(__file__).parent / "tls"
SCRIPT = Path(page_server.__file__).with_name("page.js").read_text()
STATES = json.loads(SCRIPT.partition("const STATES = ")[2].partition(";")[0])


@pytest.fixture
async def planes(tmp_path: Path) -> AsyncIterator[Planes]:
    async with Planes(tmp_path, page_port=0) as planes:
        yield planes


@asynccontextmanager
async def asked(
    server: ControlPlaneServer,
    path: str = "/events",
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[str, str, asyncio.StreamReader]]:
    """Status line, head and what comes after it."""
    host, _, port = server.page_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    lines = [f"{name}: {value}" for name, value in ({"Host": host} | (headers or {})).items()]
    writer.write("\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode())
    try:
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode()
        yield head.partition("\r\n")[0].partition(" ")[2], head, reader
    finally:
        writer.close()


async def event(reader: asyncio.StreamReader, timeout_s: float = 10) -> dict[str, Any]:
    """The next event."""
    line = await asyncio.wait_for(reader.readline(), timeout_s)
    assert line.startswith(b"data: "), line
    await reader.readline()
    told: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return told


async def status(server: ControlPlaneServer, path: str = "/events", **how: Any) -> str:
    async with asked(server, path, **how) as (status, _, _):
        return status


async def branching(session: Session, execution: Execution) -> None:
    """Two live sequences that share two blocks."""
    await run_step(session, execution, ops.admit(1, [1] * 40))
    await run_step(session, execution, ops.free([1]))
    for i in (2, 3):
        await run_step(session, execution, ops.admit(i, [1] * 16 + [i] * 20))
    await session.submit_receipts()


async def test_the_page_shows_what_the_api_says(
    planes: Planes, control: ControlClient, data: DataClient
) -> None:
    async with (
        await control.open_session(POOL, LAYOUT) as session,
        await data.open(session.grant) as execution,
        asked(planes.control) as (status, head, reader),
    ):
        assert status == "200 OK"
        assert "text/event-stream" in head
        await event(reader)
        await branching(session, execution)
        (pool,) = (await event(reader))["pools"]
        while len(pool["sessions"][0]["sequences"]) < 2:
            (pool,) = (await event(reader))["pools"]
        described = await control.get_pool(POOL)
        counters = await control.get_counters(POOL)
        (own,) = await control.list_sessions(POOL)
        shown = pool["sessions"][0]
        assert (pool["id"], pool["ready"], pool["num_sessions"]) == (POOL, True, 1)
        assert (shown["id"], shown["num_held_blocks"]) == (str(session.id), own.num_held_blocks)
        for usage, shown_map in zip(described.usage, pool["maps"], strict=True):
            cells = Counter(STATES[int(cell)] for cell in shown_map["cells"])
            assert shown_map["num_in"]["held"] == usage.num_held_blocks == cells["held"]
            assert shown_map["num_in"]["cached"] == usage.num_cached_blocks == cells["cached"]
            assert shown_map["num_in"]["free"] == usage.num_free_blocks == cells["free"]
        assert cells.total() == 8
        for name in ("lookup_tokens", "hit_tokens", "evictions"):
            assert pool[f"num_{name}"] == total_of(counters, f"{name}_total")
        for sequence in shown["sequences"]:
            state = (await session.list_sequences([int(sequence["id"])]))[0]
            for name in ("num_tokens", "num_cached_tokens", "num_blocks"):
                assert sequence[name] == getattr(state, name)


async def test_an_event_follows_each_change_and_no_other(
    planes: Planes, control: ControlClient
) -> None:
    async with asked(planes.control) as (_, _, reader):
        assert (await event(reader))["pools"][0]["num_sessions"] == 0
        with pytest.raises(TimeoutError):
            await event(reader, 4 * page_server.INTERVAL_S)
        async with await control.open_session(POOL, LAYOUT) as session:
            assert (await event(reader, 2))["pools"][0]["sessions"][0]["id"] == str(session.id)
        assert (await event(reader, 2))["pools"][0]["sessions"] == []


async def test_the_files_are_served_and_nothing_else(planes: Planes) -> None:
    for path in ("/", "/page.js", "/page.css"):
        async with asked(planes.control, path) as (status_line, head, reader):
            assert status_line == "200 OK"
            assert "Content-Security-Policy: default-src 'self'" in head
            assert len(await reader.read()) > 100
    assert await status(planes.control, "/../server.py") == "404 Not Found"
    assert await status(planes.control, "/page_server.py") == "404 Not Found"
    assert await status(planes.control, method="POST") == "405 Method Not Allowed"


async def test_a_name_that_points_here_is_not_answered(planes: Planes) -> None:
    refused = await status(planes.control, headers={"Host": "evil.example:9103"})
    assert refused.startswith("421")
    assert await status(planes.control, headers={"Host": "localhost:9103"}) == "200 OK"
    assert await status(planes.control, headers={"Host": "[::1]:9103"}) == "200 OK"


async def test_a_name_that_is_set_is_answered() -> None:
    async with control_plane(page_port=0, page_hosts="kv.example,other.example") as plane:
        assert await status(plane, headers={"Host": "kv.example:9103"}) == "200 OK"
        for host in ("evil.example", "", "kv.example,other.example"):
            assert (await status(plane, headers={"Host": host})).startswith("421")


async def test_a_head_that_does_not_end_and_too_many_streams_are_cut(
    planes: Planes, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _, port = planes.control.page_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10_000)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    monkeypatch.setattr(page_server, "_MAX_CONNECTIONS", 1)
    async with asked(planes.control) as (first, _, _):
        assert first == "200 OK"
        assert await status(planes.control) == "503 Service Unavailable"


async def test_silent_connections_give_way_and_are_bounded(
    planes: Planes, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _, port = planes.control.page_address.rpartition(":")
    monkeypatch.setattr(page_server, "_MAX_CONNECTIONS", 2)
    async with AsyncExitStack() as stack:
        readers = []
        for _ in range(4):
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            readers.append(reader)
            await asyncio.sleep(0.05)
        assert await status(planes.control) == "200 OK"
        for reader in readers[:3]:  # the oldest
            assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_more_connections_than_there_may_be_are_closed(start_control_plane: Any) -> None:
    """Also those whose handshake is not finished, which the page does not know of."""
    tls = {"tls_cert": TLS / "server.pem", "tls_key": TLS / "server.key"}
    server = await start_control_plane(page_port=0, **tls)
    host, _, port = server.page_address.rpartition(":")
    async with AsyncExitStack() as stack:
        readers = []
        for _ in range(2 * page_server._MAX_CONNECTIONS + 8):
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            readers.append(asyncio.create_task(reader.read()))
        # Long before a handshake has taken too long.
        await until(lambda: sum(reader.done() for reader in readers) >= 8, 5)


async def test_a_browser_that_left_takes_up_no_place(
    planes: Planes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "_MAX_CONNECTIONS", 2)
    for _ in range(3):
        async with asked(planes.control) as (first, _, reader):
            assert first == "200 OK"
            await event(reader)
        await asyncio.sleep(2 * page_server.INTERVAL_S)


def access_file(folder: Path) -> Path:
    path = folder / "access.toml"
    entries = [("operator", "a"), ("engine", "b")]
    path.write_text(
        "\n".join(
            f'[[callers]]\ntoken_sha256 = "{hashlib.sha256(role.encode()).hexdigest()}"\n'
            f'tenant = "{tenant}"\nroles = ["{role}"]'
            for role, tenant in entries
        )
        + '\n[[callers]]\ncertificate = "tenant-a"\nroles = ["operator"]\n'
    )
    return path


async def test_a_listed_operator_is_let_in_by_its_token(
    start_control_plane: Any, tmp_path: Path
) -> None:
    server = await start_control_plane(page_port=0, access_file=access_file(tmp_path))
    async with asked(server, "/") as (refused, head, _):
        assert refused == "401 Unauthorized"
        assert "WWW-Authenticate: Basic" in head
    password = base64.b64encode(b"anybody:operator").decode()
    assert await status(server, headers={"Authorization": f"Basic {password}"}) == "200 OK"
    assert await status(server, headers={"Authorization": "Bearer operator"}) == "200 OK"
    assert await status(server, headers={"Authorization": "Bearer engine"}) == "403 Forbidden"
    assert await status(server, headers={"Authorization": "Bearer guess"}) == "401 Unauthorized"


async def test_over_tls_a_caller_is_known_by_its_certificate(
    start_control_plane: Any, tmp_path: Path
) -> None:
    server = await start_control_plane(
        page_port=0,
        tls_cert=TLS / "server.pem",
        tls_key=TLS / "server.key",
        tls_client_ca=TLS / "ca.pem",
        access_file=access_file(tmp_path),
    )
    client = ssl.create_default_context(cafile=str(TLS / "ca.pem"))
    client.check_hostname = False
    with pytest.raises((ssl.SSLError, EOFError, ConnectionError)):
        await status(server, tls=client)
    client.load_cert_chain(TLS / "client.pem", TLS / "client.key")
    assert await status(server, tls=client) == "200 OK"


async def test_a_tenant_sees_no_session_of_another(
    planes: Planes, control: ControlClient, data: DataClient
) -> None:
    async with (
        await control.open_session(POOL, LAYOUT) as session,
        await data.open(session.grant) as execution,
    ):
        await branching(session, execution)
        (own,) = planes.control.core.view_pools("default")
        (other,) = planes.control.core.view_pools("other")
    assert own["sessions"]
    assert other["sessions"] == []
    assert other["maps"] == own["maps"]


LOOK = """({
  link: document.getElementById("link").textContent,
  colours: [...document.querySelectorAll("canvas")].map((canvas) => {
    const context = canvas.getContext("2d");
    const size = 12;
    const colours = [];
    for (let x = 0; x < canvas.width; x += size)
      colours.push([...context.getImageData(x + 1, 1, 1, 1).data.slice(0, 3)].join());
    return colours;
  }),
  rows: [...document.querySelectorAll("tr")].map((row) => row.innerText),
})"""
COLOURS = {"free": "232,232,236", "cached": "127,179,230", "held": "47,125,79"}


def look(browser: Browser, wanted: str) -> dict[str, Any]:
    """What the page shows once ``wanted`` is true of it."""
    browser.wait_for(wanted)
    shown: dict[str, Any] = browser.evaluate(LOOK)
    return shown


@pytest.mark.nightly  # starts chromium; what it is told is tested above
async def test_a_browser_draws_it_and_draws_it_again_when_it_changes(
    planes: Planes, control: ControlClient, data: DataClient
) -> None:
    url = f"http://{planes.control.page_address}/"
    with ExitStack() as stack:
        needs("chromium")
        browser = await asyncio.to_thread(stack.enter_context, Browser(url))
        empty = await asyncio.to_thread(look, browser, "document.querySelector('canvas')")
        assert empty["link"] == "live"
        assert empty["colours"][0] == 32 * [COLOURS["free"]]
        async with (
            await control.open_session(POOL, LAYOUT) as session,
            await data.open(session.grant) as execution,
        ):
            await branching(session, execution)
            last = "document.querySelectorAll('tr').length === 4"
            busy = await asyncio.to_thread(look, browser, last)
            (pool,) = planes.control.core.view_pools("default")
        cells = [STATES[int(cell)] for cell in pool["maps"][0]["cells"]]
        assert busy["colours"][0] == [COLOURS[state] for state in cells]
        assert busy["rows"][-1].split() == ["3", "5", "36", "16", "device"]
        gone = "document.body.innerText.includes('None is open.')"
        assert await asyncio.to_thread(look, browser, gone)
        await planes.control.stop()
        off = "document.getElementById('link').textContent === 'not connected'"
        assert await asyncio.to_thread(look, browser, off)
