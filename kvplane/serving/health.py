"""Answers health checks by gRPC's health protocol. A watcher that reads nothing delays nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


class Health(health_pb2_grpc.HealthServicer):
    """The health of a server's services, by name. The empty name is the server as a whole."""

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
