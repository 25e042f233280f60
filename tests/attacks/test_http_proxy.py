"""Clients of an engine behind the proxy of ``deploy/proxy``: what some of them do delays no others.

Attackers have an address of their own, as on a network.
"""

from __future__ import annotations

import http.client
import json
import resource
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.engine_planes import Process, free_port, save_byte_model
from tests.helpers.http_programs import HttpProgram
from tests.helpers.programs import ROOT
from tests.helpers.tools import needs
from tests.helpers.waiting import wait_until

TLS = Path(__file__).parents[1] / "rpc" / "tls"
ATTACKER = "127.0.0.2"
NUM_SILENT = 1100
MOST_OPEN = 64
NUM_REQUESTS = 100
P99_S = 0.2
FILES = 8192
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
# The beginning of a TLS handshake.
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
PATHS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")

pytestmark = pytest.mark.timeout(300)


class Proxied:
    """A proxy and the engine behind it."""

    def __init__(self, folder: Path, engine: HttpProgram) -> None:
        self.engine, self.port = engine, free_port()
        self.tls = ssl.create_default_context(cafile=TLS / "ca.pem")
        self.tls.check_hostname = False
        text = (ROOT / "deploy" / "proxy" / "nginx.conf").read_text()
        temporary = "".join(f"{name}_temp_path {folder / name}; " for name in PATHS)
        for old, new in (
            ("listen 443", f"listen 127.0.0.1:{self.port}"),
            ("/etc/kvplane/server.pem", str(TLS / "server.pem")),
            ("/etc/kvplane/server.key", str(TLS / "server.key")),
            ("127.0.0.1:8000", f"127.0.0.1:{engine.port}"),
            ("http {", f"http {{ access_log off; {temporary}"),
        ):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        config = folder / "nginx.conf"
        config.write_text(text)
        settings = f"daemon off; pid {folder / 'pid'}; error_log {folder / 'error.log'};"
        self.process = subprocess.Popen(
            ["nginx", "-p", folder, "-c", config, "-e", folder / "error.log", "-g", settings]
        )

    def connect(self, host: str) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 30, (host, 0))

    def attack(self, said: bytes) -> ssl.SSLSocket:
        """Connect over TLS from the attacker's address, and send ``said``."""
        connection = self.tls.wrap_socket(self.connect(ATTACKER))
        connection.sendall(said)
        return connection

    def p99_s(self) -> float:
        """Return how long honest requests take: the second longest of a hundred."""
        body = json.dumps({"model": "byte-model", "prompt": "hello", "max_tokens": 1})
        took_s = []
        client = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=self.tls)
        for _ in range(NUM_REQUESTS):
            began_s = time.monotonic()
            client.request("POST", "/v1/completions", body)
            answer = client.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
            took_s.append(time.monotonic() - began_s)
            time.sleep(0.02)
        client.close()
        return sorted(took_s)[-2]


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    needs("nginx")
    folder = tmp_path_factory.mktemp("proxied")
    model = save_byte_model(folder / "byte-model")
    with Process("control_plane", folder / "control.log") as control:
        engine = HttpProgram(
            *(folder, "engine", "engine", "serve", "--model", str(model), "--num-threads", "1"),
            *("--control-plane", control.address, "--data-plane", "embedded", "--no-probe"),
            *("--num-device-blocks", "1024", "--idle-timeout-s", "75"),
        )
        engine.start()
        engine.wait()
        proxied = Proxied(folder, engine)
        try:
            wait_until(lambda: not proxied_refuses(proxied))
            proxied.p99_s()  # to warm up
            yield proxied
        finally:
            proxied.process.terminate()
            proxied.process.wait(30)
            engine.stop()


def proxied_refuses(proxied: Proxied) -> bool:
    with suppress(OSError), proxied.connect("127.0.0.1"):
        return False
    return True


@pytest.fixture(autouse=True)
def files() -> Iterator[None]:
    """Let this process have more connections than the proxy's clients usually may."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, limits[1]), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextmanager
def silent(proxied: Proxied, said: bytes = b"") -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(NUM_SILENT):
            stack.enter_context(proxied.connect(ATTACKER)).sendall(said)
        yield


@contextmanager
def unfinished_handshakes(proxied: Proxied) -> Iterator[None]:
    with silent(proxied, HELLO):
        yield


@contextmanager
def idle_connections(proxied: Proxied) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(proxied.attack(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"))
        yield


@contextmanager
def one_byte_chunks(proxied: Proxied) -> Iterator[None]:
    """Half a MB of them a second, on new connections when one is closed."""
    is_over = threading.Event()
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

    def send() -> None:
        while not is_over.is_set():
            with suppress(OSError), proxied.attack(head) as connection:
                while not is_over.wait(0.1):
                    connection.sendall(b"1\r\nx\r\n" * 8192)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    is_over.set()
    thread.join()


@contextmanager
def slow_readers(proxied: Proxied) -> Iterator[None]:
    """They read nothing of a stream that is longer than all buffers on its way."""
    how = {"max_tokens": 400, "n": 8, "logprobs": 20, "stream": True, "ignore_eos": True}
    body = json.dumps({"model": "byte-model", "prompt": "hello", **how}).encode()
    with ExitStack() as stack:
        for _ in range(4):
            head = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode()
            stack.enter_context(proxied.attack(head + body))
        wait_until(lambda: proxied.engine.metric("kvplane_engine_open_requests") == 0, 60.0)
        yield


AT_NIGHT = [pytest.param(each, marks=pytest.mark.nightly) for each in (silent, slow_readers)]


@pytest.mark.parametrize(
    "attack", [unfinished_handshakes, idle_connections, one_byte_chunks, *AT_NIGHT]
)
def test_others_do_not_wait_for_an_attacker(
    proxied: Proxied, attack: Callable[[Proxied], AbstractContextManager[None]]
) -> None:
    with attack(proxied):
        assert proxied.p99_s() < P99_S


def test_an_address_has_so_many_open_requests(proxied: Proxied) -> None:
    with ExitStack() as stack:
        asked = [
            stack.enter_context(proxied.attack(HEAD + b"Content-Length: 10\r\n\r\n"))
            for _ in range(MOST_OPEN + 1)
        ]
        assert asked[-1].recv(64).startswith(b"HTTP/1.1 429 ")
        assert proxied.p99_s() < P99_S


@pytest.mark.parametrize("path", ["/metrics", "/health", "/healthz"])
def test_the_proxy_keeps_probes_and_metrics_to_itself(proxied: Proxied, path: str) -> None:
    with proxied.attack(f"GET {path} HTTP/1.0\r\n\r\n".encode()) as connection:
        assert connection.recv(64).startswith(b"HTTP/1.1 404 ")
