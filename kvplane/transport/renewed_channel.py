"""A channel whose later calls go by the certificates that the client's files have by then.

gRPC reads a client's certificates once. So there is another channel when the files have changed;
calls that are open stay on the one before until they end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from kvplane.transport.renewed import Renewed

_LOOK_INTERVAL_S: Final = 1.0


class RenewedChannel(grpc.aio.Channel):
    """Is used as the channels that ``make`` opens."""

    def __init__(self, make: Callable[[], grpc.aio.Channel], files: Sequence[Path | None]) -> None:
        """Raises what ``make`` raises."""
        self._renewed = Renewed(make, files, interval_s=_LOOK_INTERVAL_S)
        self._present = self._renewed.get()
        self._calls: dict[grpc.aio.Channel, set[Any]] = {self._present: set()}
        self._closing: set[asyncio.Task[None]] = set()

    def present(self) -> grpc.aio.Channel:
        """For a call that begins now."""
        former = self._present
        if not self._calls:
            return former  # it is closed, and says so
        channel = self._renewed.get()
        if channel is not former:
            self._present = channel
            self._calls[channel] = set()
            self._close_if_idle(former)
        return channel

    def keep(self, channel: grpc.aio.Channel, call: Any) -> None:
        """Keep the channel that the call is on for as long as it is open."""
        self._calls[channel].add(call)
        call.add_done_callback(partial(self._ended, channel))

    def _ended(self, channel: grpc.aio.Channel, call: Any) -> None:
        if channel in self._calls:
            self._calls[channel].discard(call)
            self._close_if_idle(channel)

    def _close_if_idle(self, channel: grpc.aio.Channel) -> None:
        if channel is not self._present and not self._calls[channel]:
            del self._calls[channel]
            task = asyncio.ensure_future(channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "stream_stream", args, kwargs)

    async def close(self, grace: float | None = None) -> None:
        channels = [*self._calls]
        self._calls.clear()
        for channel in channels:
            await channel.close(grace)
        await asyncio.gather(*self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._present.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._present.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._present.channel_ready()

    async def __aenter__(self) -> RenewedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Method:
    """One method of the service, on whichever channel there is."""

    def __init__(
        self, channel: RenewedChannel, kind: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self._channel = channel
        self._of: grpc.aio.Channel | None = None
        self._make: Callable[[Any], Any] = lambda at: getattr(at, kind)(*args, **kwargs)
        self._call: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        present = self._channel.present()
        if present is not self._of:
            self._of, self._call = present, self._make(present)
        call = self._call(*args, **kwargs)
        self._channel.keep(present, call)
        return call
