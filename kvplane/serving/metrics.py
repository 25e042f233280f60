"""The metrics that any gRPC server has, and the HTTP endpoint that Prometheus scrapes them from."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Thread
from typing import Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server

# From the cost of an empty call on loopback to that of the slowest one that anybody would wait for.
LATENCY_BUCKETS_S: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)


class RpcMetrics:
    """Calls answered, by method and status code. A stream counts once, when it ends."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.handled = Counter(
            "kvplane_rpc_handled_total",
            "RPCs that have ended.",
            ["method", "code"],
            registry=registry,
        )
        self.duration = Histogram(
            "kvplane_rpc_duration_seconds",
            "Time from an RPC's arrival to its end; unary calls only.",
            ["method"],
            registry=registry,
            buckets=LATENCY_BUCKETS_S,
        )
        self.rejected = Counter(
            "kvplane_rejections_total",
            "Requests refused with an error, inside streams too, by the error's reason.",
            ["reason"],
            registry=registry,
        )


@dataclass(frozen=True)
class MetricsEndpoint:
    """A running ``/metrics`` server."""

    port: int
    _server: WSGIServer
    _thread: Thread

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> MetricsEndpoint:
    """Serve ``registry`` over HTTP from a thread of its own; port 0 picks a free one. Raises
    OSError when it cannot bind.
    """
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise OSError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
    return MetricsEndpoint(server.server_port, server, thread)
