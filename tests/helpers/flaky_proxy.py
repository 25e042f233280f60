"""A TCP proxy that loses data, as networks do, when a test asks for it."""

from __future__ import annotations

import asyncio


class FlakyProxy:
    """Forwards connections to ``target`` ("host:port")."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._answers_pass = asyncio.Event()
        self._answers_pass.set()
        self.num_connections = 0

    async def __aenter__(self) -> FlakyProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def hold_answers(self) -> None:
        """Let requests through and hold answers, from now on."""
        self._answers_pass.clear()

    def cut(self) -> None:
        """Drop every connection and all held data; new connections pass everything."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        self._answers_pass.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        pair = [writer, far_writer]
        self._writers.extend(pair)
        await asyncio.gather(
            self._forward(reader, far_writer, pair, answers=False),
            self._forward(far_reader, writer, pair, answers=True),
        )

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pair: list[asyncio.StreamWriter],
        *,
        answers: bool,
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                if answers:
                    await self._answers_pass.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        for side in pair:
            side.close()
