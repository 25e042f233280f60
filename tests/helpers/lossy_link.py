"""A TCP proxy that can be cut, held, slowed and half-closed while connections run through it."""

from __future__ import annotations

import asyncio
import contextlib


class LossyLink:
    """Forwards connections to ``target`` ("host:port") from ``address``."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._passes = {"requests": asyncio.Event(), "answers": asyncio.Event()}
        self._delay_s = 0.0
        self.num_connections = 0
        self.heal()

    async def __aenter__(self) -> LossyLink:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def heal(self) -> None:
        """Everything passes, at once."""
        self._delay_s = 0.0
        for passes in self._passes.values():
            passes.set()

    def cut(self) -> None:
        """Drop every connection, and what was under way in it. New ones pass everything."""
        for writer in list(self._writers):
            writer.transport.abort()
        self.heal()

    def hold(self, direction: str) -> None:
        """Take what is sent as "requests" or "answers" and pass none of it on."""
        self._passes[direction].clear()

    def delay(self, seconds: float) -> None:
        """Pass each piece on so much later."""
        self._delay_s = seconds

    def half_close(self) -> None:
        """Say on every connection that nothing more comes, and go on reading."""
        for writer in list(self._writers):
            if not writer.is_closing():
                with contextlib.suppress(OSError):  # the other side has gone
                    writer.write_eof()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        sides = {writer, far_writer}
        self._writers |= sides
        await asyncio.gather(
            self._forward(reader, far_writer, "requests"),
            self._forward(far_reader, writer, "answers"),
        )
        self._writers -= sides
        for side in sides:
            side.close()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await self._passes[direction].wait()
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except (OSError, RuntimeError):  # RuntimeError: it was half-closed already
            writer.transport.abort()
