"""``/metrics`` for Prometheus; ``/healthz`` (whether a process is alive) and ``/ready`` (whether it
serves) for probes that cannot speak gRPC. Over HTTP or HTTPS, from threads of their own.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Thread, Timer
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvplane.errors import InvalidRequestError
from kvplane.serving.listener import family_of
from kvplane.transport.renewed import renewed_context

# Connections served at one time. One that has sent no request gives way to a new one, or that is
# closed.
_MAX_THREADS: Final = 8
_GIVE_WAY_S: Final = 1.0
# How long a connection may take in all, whichever side is slow.
_LONGEST_S: Final = 10.0
_LOGIN: Final = re.compile(r"([^:\s]+):([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class MetricsAccess:
    """Access rules of ``/metrics``. ``certificate`` and ``key``: PEM files; None for plain HTTP.
    ``login``: as ``read_login`` returns it; None for everybody.
    """

    certificate: Path | None = None
    key: Path | None = None
    login: tuple[str, str] | None = None

    def permits(self, authorization: str) -> bool:
        """Return whether a request with this header may read the metrics."""
        if self.login is None:
            return True
        kind, _, encoded = authorization.partition(" ")
        try:
            user, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except ValueError:
            return False
        given = f"{user}:{hashlib.sha256(password.encode()).hexdigest()}"
        return kind.lower() == "basic" and hmac.compare_digest(
            given.encode(), ":".join(self.login).encode()
        )


def read_login(path: Path) -> tuple[str, str]:
    """Parse a file that holds "USER:SHA256". Returns the user, and the SHA-256 of the password in
    hex.

    Raises InvalidRequestError.
    """
    try:
        found = _LOGIN.fullmatch(path.read_text().strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"cannot be read: {error}", field="metrics_login_file") from error
    if found is None:
        raise InvalidRequestError(
            f"{path} must hold USER:SHA256, the digest in hex", field="metrics_login_file"
        )
    return found[1], found[2]


@dataclass(frozen=True)
class MetricsEndpoint:
    """A running HTTP server for ``/metrics``, ``/healthz`` and ``/ready``."""

    port: int
    _server: WSGIServer
    _thread: Thread

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(
    registry: CollectorRegistry,
    is_alive: Callable[[], bool],
    host: str,
    port: int,
    access: MetricsAccess | None = None,
    *,
    is_ready: Callable[[], bool] | None = None,
) -> MetricsEndpoint:
    """Start to serve ``registry``; port 0 picks a free one. ``is_alive`` and ``is_ready`` are
    called on the threads of probes; without ``is_ready``, alive means ready. Raises OSError when it
    cannot bind or a TLS file cannot be read.
    """
    access = access or MetricsAccess()
    probes = {"/healthz": is_alive, "/ready": is_ready or is_alive}
    metrics: Any = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        headers = [("Content-Type", "text/plain")]
        if probe := probes.get(environ["PATH_INFO"]):
            is_up = probe()
            start_response("200 OK" if is_up else "503 Service Unavailable", headers)
            return [b"OK\n" if is_up else b"NOT OK\n"]
        if not access.permits(environ.get("HTTP_AUTHORIZATION", "")):
            headers.append(("WWW-Authenticate", 'Basic realm="metrics"'))
            start_response("401 Unauthorized", headers)
            return [b""]
        return metrics(environ, start_response)

    try:
        server = make_server(host.strip("[]"), port, answer, _HttpServer, _Handler)
    except OSError as error:
        raise OSError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
    if access.certificate is not None and access.key is not None:
        context = renewed_context(access.certificate, access.key)
        # The connection's thread does the handshake, not the one that accepts.
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return MetricsEndpoint(server.server_port, server, thread)


class _HttpServer(ThreadingMixIn, WSGIServer):
    """Runs a thread for each connection, at most ``_MAX_THREADS``, each for a bounded time."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], *arguments: Any, **settings: Any) -> None:
        self._free = BoundedSemaphore(_MAX_THREADS)
        self.silent: dict[socket.socket, None] = {}
        """Connections that have sent no request yet, the oldest first."""
        self.address_family = family_of(*address)
        super().__init__(address, *arguments, **settings)

    def process_request(self, request: Any, client_address: Any) -> None:
        may_serve = self._free.acquire(blocking=False)
        if not may_serve and (silent := list(self.silent)):
            _cut(silent[0])
            may_serve = self._free.acquire(timeout=_GIVE_WAY_S)
        if may_serve:
            self.silent[request] = None
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        deadline = Timer(_LONGEST_S, _cut, [request])
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self.silent.pop(request, None)
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a connection that breaks."""


class _Handler(WSGIRequestHandler):
    """Handles an HTTP request without logging it."""

    timeout = _LONGEST_S

    def parse_request(self) -> bool:
        """Parse the request that has come; its connection gives way no more."""
        self.server.silent.pop(self.connection, None)  # type: ignore[attr-defined]
        return super().parse_request()

    def log_message(self, format: str, *args: Any) -> None:
        """Discard the message."""


def _cut(request: socket.socket) -> None:
    """Shut down a connection that a thread reads from or writes to."""
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has just ended
        return
