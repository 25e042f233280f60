"""Asks a data plane for the same blocks many times at once, and says when it has:

python tests/helpers/deaf_reader.py ADDRESS FILE NUM

FILE has a ReadBlocksRequest. Who starts it can stop it then: it reads none of its answers.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import grpc.aio

from kvplane.wire import protocol
from kvplane.wire.v1.execution_pb2 import ReadBlocksRequest
from tests.helpers.planning.control_wire import stub_of


async def main(address: str, file: str, num: str) -> None:
    request = ReadBlocksRequest.FromString(Path(file).read_bytes())
    async with grpc.aio.insecure_channel(address, options=protocol.CHANNEL_OPTIONS) as channel:
        stub = stub_of(channel)
        await stub.ReadBlocks(request)
        calls = [stub.ReadBlocks(request) for _ in range(int(num))]
        await asyncio.sleep(0.1)  # until they are sent
        sys.stdout.write("sent\n")
        sys.stdout.flush()
        await asyncio.gather(*calls, return_exceptions=True)


asyncio.run(main(*sys.argv[1:]))
