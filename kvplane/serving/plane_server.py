"""The base of both planes' servers: services, their health and metrics, from binding the port to
answering the last call.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor

from kvplane import __version__
from kvplane.serving import server as serving
from kvplane.serving.callers.access import AccessList
from kvplane.serving.callers.identity import Gate
from kvplane.serving.certificates import ServerCertificate
from kvplane.serving.config import ServerSettings, is_loopback
from kvplane.serving.interceptor import ErrorInterceptor
from kvplane.serving.limits.message_bounds import MessageBounds
from kvplane.serving.limits.receive_budget import ReceiveBudget
from kvplane.serving.observability.metrics import PlaneMetrics
from kvplane.serving.observability.metrics_endpoint import serve_metrics
from kvplane.serving.requests import Admission

_LOGGER: Final = logging.getLogger(__name__)
_LAG_INTERVAL_S: Final = 0.1
_STUCK_S: Final = 30.0
"""A plane whose event loop has not run for this long has to be restarted."""
_CALLER_SHARE: Final = 4
"""Part of ``--max-received-bytes`` that one caller's unanswered requests may take, and also its
large unread answers: three other callers find room beside it.
"""
_OURS: Final = "kvplane."
_CONTRACT: Final = "kvplane.v1."
_PLANES: Final = {
    "PoolService": "the control plane",
    "SessionService": "the control plane",
    "PrefixService": "the control plane",
    "ExecutionService": "a data plane",
    "BlockService": "a data plane",
}
"""The plane that serves each service which only one of the planes has."""


def _no_streams() -> None:
    """Do nothing, for a service that has no streams to end."""


@dataclass(frozen=True, slots=True)
class Service:
    """A gRPC service and its servicer. ``add_to`` adds the servicer to a server. ``stop`` ends the
    service's open streams, and refuses new ones.
    """

    descriptor: ServiceDescriptor
    add_to: Callable[[grpc.aio.Server], None]
    stop: Callable[[], None] = _no_streams


class _WrongServiceInterceptor(grpc.aio.ServerInterceptor):
    """Explains UNIMPLEMENTED to callers that reached the other plane, or another release."""

    def __init__(self, services: Iterable[ServiceDescriptor]) -> None:
        """``services``: the names of those that this server serves."""
        self._served = {service.full_name for service in services}
        self._plane = next(
            plane for name, plane in _PLANES.items() if _CONTRACT + name in self._served
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        wanted = handler_call_details.method.removeprefix("/")
        if handler is not None or not wanted.startswith(_OURS):
            return handler
        text = self._explain(*wanted.rpartition("/")[::2])

        async def refuse(requests: Any, context: Any) -> AsyncIterator[bytes]:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)
            yield b""

        # A stream, for unary methods too: on the wire a refused call looks the same.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _explain(self, service: str, method: str) -> str:
        name = service.removeprefix(_CONTRACT)
        if service not in self._served and name in _PLANES:
            return (
                f"{name} is served by {_PLANES[name]}, and this is {self._plane}: are the planes' "
                "addresses swapped?"
            )
        if service in self._served or service.startswith(_CONTRACT):
            return (
                f"this server speaks kvplane.v1 of release {__version__}, which has no "
                f"{name}/{method}: update the client, or the server if it is the older one"
            )
        return f"{service.rpartition('.')[2]} is a plug-in's, which was not loaded here"


class PlaneServer:
    """The base of a plane's server. The plane calls ``_serve``, then ``_announce``."""

    _lag: asyncio.Task[None]

    def __init__(
        self,
        config: ServerSettings,
        services: Sequence[Service],
        metrics: PlaneMetrics,
        *,
        max_message_bytes: int,
        max_counts: Mapping[str, int] | None = None,
        also_bind: str = "",
    ) -> None:
        """Bind the addresses of ``config``, on the running event loop. ``services``: all that the
        plane serves. ``max_counts``: bounds of requests other than those of
        ``message_bounds.MAX_COUNTS``. ``also_bind``: a second address, or empty.

        Raises OSError when an address cannot be bound or a TLS file cannot be read, and
        InvalidRequestError for a wrong access list.
        """
        self._config = config
        self._services = services
        descriptors = [service.descriptor for service in services]
        self._service_names = [each.full_name for each in descriptors]
        self._access = AccessList(config.access_file)
        tls = config.server_tls
        if config.access_file is not None and tls is None and not is_loopback(config.bind):
            _LOGGER.warning("insecure bind=%s: others can read the callers' tokens", config.bind)
        self._gate = Gate(self._access, descriptors)
        bounds = {
            f"/{each.full_name}/{method.name}": MessageBounds(method.input_type, max_counts)
            for each in descriptors
            for method in each.methods
        }
        caller_bytes = config.max_received_bytes // _CALLER_SHARE
        budget = ReceiveBudget(config.max_received_bytes, caller_bytes)
        answers = ReceiveBudget(max_caller_bytes=caller_bytes)
        admission = Admission(self._gate, bounds, budget, answers)
        metrics.rpc.received = budget
        certificate = None if tls is None else ServerCertificate(tls)
        if certificate is not None:
            metrics.certificate_ends_s = certificate.ends_s
        self._server = serving.build(
            config.bind,
            also_bind=also_bind,
            tls=certificate,
            max_message_bytes=max_message_bytes,
            max_connections=serving.most_connections(),
            interceptors=[
                _WrongServiceInterceptor(descriptors),
                ErrorInterceptor(metrics.rpc, admission),
            ],
        )
        for service in services:
            service.add_to(self._server.grpc_server)
        self._metrics = metrics
        self._serving = False
        self._woken_s = math.inf  # when the event loop last woke the task that measures its lag
        self._endpoint = None
        if config.metrics_port >= 0:
            host, port = config.metrics_host or self._server.host, config.metrics_port
            self._endpoint = serve_metrics(
                metrics.registry,
                self._is_alive,
                host,
                port,
                config.metrics_access,
                is_ready=lambda: self._serving and self._is_alive(),
            )

    @property
    def address(self) -> str:
        """The server's address, "host:port"."""
        return self._server.address

    @property
    def metrics_port(self) -> int | None:
        """Port of ``/metrics``; None when it is off."""
        return self._endpoint.port if self._endpoint is not None else None

    async def run_until_signal(self) -> None:
        """Serve until SIGTERM or SIGINT, then stop."""
        await serving.wait_for_signal()
        await self.stop()

    async def stop(self) -> None:
        """Refuse new calls, answer those in flight, end the streams; returns when all
        have ended.
        """
        _LOGGER.info("stopping grace_s=%g", self._config.grace_s)
        self._serving = False
        for service in self._services:
            service.stop()
        await self._server.stop(self._config.grace_s)
        self._lag.cancel()
        await self._finish()
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.close)
        _LOGGER.info("stopped")

    async def _serve(self, *, serving: bool = True) -> None:
        """Begin to accept calls. ``serving``: whether health is SERVING."""
        await self._server.start(self._service_names, serving=serving)
        self._serving = serving
        self._lag = asyncio.create_task(self._measure_lag())

    def _set_serving(self, serving: bool) -> None:
        """Set the health of all services to SERVING or NOT_SERVING."""
        self._serving = serving
        for service in ("", *self._service_names):
            self._server.health.set(service, serving)

    def _is_alive(self) -> bool:
        """Return whether the event loop runs. A plane is alive for as long as it starts."""
        return time.monotonic() - self._woken_s < _STUCK_S

    async def _announce(self) -> None:
        """Write the port file and log the address; if it cannot, stop and raise OSError."""
        try:
            serving.announce(self._server.address, self._config.port_file)
        except OSError:
            await self.stop()
            raise

    async def _finish(self) -> None:
        """End the plane's background tasks. ``stop`` calls it once no call is left."""

    async def _measure_lag(self) -> None:
        """Measure, all the time, how late the event loop wakes this task up."""
        while True:
            self._woken_s = time.monotonic()
            await asyncio.sleep(_LAG_INTERVAL_S)
            lag_s = time.monotonic() - self._woken_s - _LAG_INTERVAL_S
            self._metrics.loop_lag.add(max(0.0, lag_s))
