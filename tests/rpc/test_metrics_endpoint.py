"""Who may read /metrics, over what, and that slow readers keep nobody out for long."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from control_plane.server.config import ControlPlaneSettings
from kvplane.errors import InvalidRequestError
from kvplane.serving import plane_server
from kvplane.serving.observability import metrics_endpoint
from kvplane.serving.observability.metrics_endpoint import (
    MetricsAccess,
    MetricsEndpoint,
    read_login,
    serve_metrics,
)
from tests.helpers.planes_in_process import control_plane
from tests.helpers.refusals import refused

TLS = Path(__file__).parent / "tls"
LOGIN = "prometheus", hashlib.sha256(b"word:with colon").hexdigest()
Start = Callable[[MetricsAccess], MetricsEndpoint]


def ipv6() -> list[str]:
    """The ways to write the loopback of IPv6, where this machine has one."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return []
    return ["::1", "[::1]"]


IPV6 = ipv6()


@pytest.fixture
def start() -> Iterator[Start]:
    endpoints: list[MetricsEndpoint] = []

    def serve(access: MetricsAccess) -> MetricsEndpoint:
        endpoints.append(serve_metrics(CollectorRegistry(), lambda: True, "127.0.0.1", 0, access))
        return endpoints[-1]

    yield serve
    for endpoint in endpoints:
        endpoint.close()


def get(url: str, *, login: str = "", trusted: Path | None = None) -> int:
    """The status of a GET. ``login``: USER:PASSWORD. ``trusted``: the CA, for HTTPS."""
    request = urllib.request.Request(url)
    if login:
        request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    context = ssl.create_default_context(cafile=str(trusted)) if trusted else None
    if context is not None:
        context.check_hostname = False  # the certificate is another host's
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    ("login", "status"),
    [
        ("prometheus:word:with colon", 200),
        ("prometheus:other", 401),
        ("other:word:with colon", 401),
        (f"prometheus:{LOGIN[1]}", 401),
        ("", 401),
    ],
)
def test_only_who_has_the_login_reads_metrics(start: Start, login: str, status: int) -> None:
    address = f"http://127.0.0.1:{start(MetricsAccess(login=LOGIN)).port}"
    assert get(f"{address}/metrics", login=login) == status
    assert get(f"{address}/healthz", login=login) == 200


def test_a_header_that_is_none_is_refused() -> None:
    access = MetricsAccess(login=LOGIN)
    for header in ("Basic", "Basic ???", "Basic /w==", "Bearer abc", "\x00"):
        assert not access.permits(header)


@pytest.mark.parametrize("host", ["localhost", *IPV6])
def test_metrics_are_served_at_the_host_that_is_named(host: str) -> None:
    endpoint = serve_metrics(CollectorRegistry(), lambda: True, host, 0)
    shown = host if host.isalpha() else f"[{host.strip('[]')}]"
    assert get(f"http://{shown}:{endpoint.port}/metrics") == 200
    endpoint.close()


@pytest.mark.parametrize("host", ["localhost", *IPV6[1:]])
async def test_a_plane_serves_its_metrics_and_its_page_where_it_binds(host: str) -> None:
    async with control_plane(bind=f"{host}:0", metrics_port=0, page_port=0) as plane:
        for address in (f"{host}:{plane.metrics_port}", plane.page_address):
            assert await asyncio.to_thread(get, f"http://{address}/") == 200


async def test_a_plane_is_alive_while_its_loop_runs_and_ready_while_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plane_server, "_STUCK_S", 0.5)

    def probe(*paths: str) -> list[int]:
        return [get(f"http://127.0.0.1:{plane.metrics_port}{path}") for path in paths]

    async with control_plane(metrics_port=0) as plane:
        assert await asyncio.to_thread(probe, "/healthz", "/ready") == [200, 200]
        plane._set_serving(False)  # as of a plane that stands by, which is not to be restarted
        assert await asyncio.to_thread(probe, "/healthz", "/ready") == [200, 503]
        plane._set_serving(True)
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(lambda: time.sleep(1) or probe("/healthz", "/ready"))
            assert asked.result() == [503, 503], "the loop is held by this call"
        await asyncio.sleep(0.2)
        assert await asyncio.to_thread(probe, "/healthz", "/ready") == [200, 200]


def test_metrics_are_served_over_https(start: Start) -> None:
    access = MetricsAccess(TLS / "server.pem", TLS / "server.key")
    port = start(access).port
    assert get(f"https://127.0.0.1:{port}/metrics", trusted=TLS / "ca.pem") == 200
    with pytest.raises(OSError, match=r"reset|closed|refused|timed out|status line"):
        get(f"http://127.0.0.1:{port}/metrics")


@pytest.mark.parametrize("tls", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_slow_readers_are_bounded_in_number_and_time(
    start: Start, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    monkeypatch.setattr(metrics_endpoint, "_LONGEST_S", 1.0)
    access = MetricsAccess(TLS / "server.pem", TLS / "server.key") if tls else MetricsAccess()
    port = start(access).port
    num_threads = threading.active_count()
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    time.sleep(0.3)
    # A thread and its deadline for each.
    assert threading.active_count() - num_threads <= 2 * metrics_endpoint._MAX_THREADS
    for _ in range(12):  # a byte at a time outlasts every timeout of a single read
        for each in slow:
            try:
                each.send(b"G")
            except OSError:
                continue
        time.sleep(0.1)
    scheme, trusted = ("https", TLS / "ca.pem") if tls else ("http", None)
    assert get(f"{scheme}://127.0.0.1:{port}/healthz", trusted=trusted) == 200
    for each in slow:
        each.close()


def test_silent_connections_that_are_renewed_keep_no_probe_out(start: Start) -> None:
    address = "127.0.0.1", start(MetricsAccess()).port
    silent = [socket.create_connection(address) for _ in range(metrics_endpoint._MAX_THREADS)]
    for _ in range(4):
        time.sleep(0.1)
        assert get(f"http://127.0.0.1:{address[1]}/healthz") == 200
        silent.append(socket.create_connection(address))
    assert [each.recv(1) for each in silent[:3]] == [b""] * 3, "the oldest give way"
    for each in silent:
        each.close()


@pytest.mark.parametrize("text", ["", "user", "user:abc", f"us er:{'0' * 64}", f"a:{'0' * 64}:b"])
def test_a_login_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "login"
    path.write_text(text)
    with refused(InvalidRequestError, "metrics_login_file"):
        read_login(path)


def test_metrics_that_others_could_read_in_the_clear_need_a_word_for_it() -> None:
    tls = {"tls_cert": TLS / "server.pem", "tls_key": TLS / "server.key"}
    with refused(InvalidRequestError, "metrics_host"):
        ControlPlaneSettings(bind="0.0.0.0:0", **tls)
    with refused(InvalidRequestError, "metrics_tls"):
        ControlPlaneSettings(metrics_tls=True)
    for more in (
        {"metrics_tls": True},
        {"metrics_host": "127.0.0.1"},
        {"metrics_port": -1},
        {"insecure": True},
    ):
        ControlPlaneSettings(bind="0.0.0.0:0", **tls, **more)
