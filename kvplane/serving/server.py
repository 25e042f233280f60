"""A gRPC server: bind, announce the address, serve until a signal comes, stop gracefully.

Stopping: health says NOT_SERVING, new calls are refused, calls in flight have ``grace_s`` to end.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME
from grpc_reflection.v1alpha import reflection

from kvplane.serving.certificates import ServerCertificate
from kvplane.wire.protocol import MAX_MESSAGE_BYTES, MIN_PING_INTERVAL_MS

MAX_CONNECTION_CALLS: Final = 256
HANDSHAKE_MS: Final = 10_000
"""Milliseconds that the handshakes of HTTP/2 and TLS may take."""
IDLE_MS: Final = 600_000
"""Milliseconds after which a connection without a call is closed; a client opens it again."""
_WINDOW_BYTES: Final = 1 << 20
_MOST_FILES: Final = 65_536

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Server:
    """A bound gRPC server with health. Add servicers to ``grpc_server``, then ``start``."""

    grpc_server: grpc.aio.Server
    health: Health
    host: str
    port: int

    @property
    def address(self) -> str:
        """The bound address, ``host:port``."""
        return f"{self.host}:{self.port}"

    async def start(self, services: Sequence[str], *, serving: bool = True) -> None:
        """Start to serve. ``services``: full names, for reflection and health; ``serving`` False
        leaves health at NOT_SERVING.
        """
        names = (*services, SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc_server)
        for service in ("", *services):
            self.health.set(service, serving)
        await self.grpc_server.start()

    async def stop(self, grace_s: float) -> None:
        """Stop (see the module's docstring). Returns when every call has ended."""
        self.health.stop()
        await self.grpc_server.stop(grace_s)


def build(
    bind: str,
    *,
    also_bind: str = "",
    tls: ServerCertificate | None = None,
    max_message_bytes: int,
    max_connections: int = 1024,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> Server:
    """Bind a server to ``bind``, "host:port"; port 0 picks a free one. Call it on the event loop
    that will serve. ``also_bind``: a second address, whose connections are counted apart; or empty.

    Raises OSError when it cannot bind or a TLS file cannot be read. Messages above
    ``max_message_bytes`` are refused with RESOURCE_EXHAUSTED, compressed ones with UNIMPLEMENTED:
    gRPC would decompress them on the thread that serves all. Connections beyond ``max_connections``
    are closed; calls beyond
    ``MAX_CONNECTION_CALLS`` of one connection wait at the client.
    """
    host, _, _ = bind.rpartition(":")
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max(max_message_bytes, MAX_MESSAGE_BYTES)),
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", MAX_CONNECTION_CALLS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.so_reuseport", 0),  # or a second server on the port would take half of the calls
        # Or the window of each unread call would grow to megabytes. A window that holds less than a
        # message costs it round trips.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", min(_WINDOW_BYTES, max_message_bytes // 32)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]
    server = grpc.aio.server(interceptors=list(interceptors), options=options)
    ports = []
    for address in filter(None, (bind, also_bind)):
        try:
            if tls is not None:
                ports.append(server.add_secure_port(address, tls.credentials()))
            else:
                ports.append(server.add_insecure_port(address))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}") from error
    health = Health()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return Server(server, health, host, ports[0])


def most_connections() -> int:
    """Return how many connections of one address the limit of open files allows. As many are left
    for a second address, and a quarter of the files for other uses.
    """
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        num_files = _MOST_FILES
    return min(num_files, _MOST_FILES) * 3 // 8


def announce(address: str, port_file: Path | None, logger: logging.Logger = _LOGGER) -> None:
    """Write the port of ``address``, "host:port", to ``port_file``, then log the address.

    Raises OSError when the file cannot be written.
    """
    if port_file is not None:
        partial = port_file.with_name(port_file.name + ".partial")
        try:
            partial.write_text(address.rpartition(":")[2] + "\n")
            partial.replace(port_file)  # so that a reader never sees half of it
        except OSError as error:
            raise OSError(f"cannot write port_file {port_file}: {error.strerror}") from error
    logger.info("listening address=%s", address)


async def wait_for_signal() -> None:
    """Wait for SIGTERM or SIGINT. Afterwards Python's default handlers are back, so a second one
    kills.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        await stopping.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class Health(health_pb2_grpc.HealthServicer):
    """The health of a server's services, by name, in gRPC's health protocol. The empty name is the
    server as a whole. A watcher that reads nothing delays nobody.
    """

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}  # values of ServingStatus
        self._changed = asyncio.Event()  # replaced at each change, so that all watchers wake up
        self._is_stopping = False

    def set(self, service: str, serving: bool) -> None:
        """Set the health of ``service``. After ``stop`` it stays NOT_SERVING."""
        states = health_pb2.HealthCheckResponse
        is_serving = serving and not self._is_stopping
        self._states[service] = states.SERVING if is_serving else states.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Set the health of all services to NOT_SERVING for good, and end the watchers' streams."""
        self._is_stopping = True
        for service in self._states:
            self.set(service, False)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._states:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=self._states[request.service])

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Yield the health now and after each change. A slow reader misses states between."""
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        sent: int | None = None
        while True:
            changed = self._changed
            state = self._states.get(request.service, unknown)
            if state != sent:
                yield health_pb2.HealthCheckResponse(status=state)
                sent = state
            elif self._is_stopping:
                return
            else:
                await changed.wait()
