"""A client of the Unix socket that sends what it likes: the data plane's memory stays in bounds."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import grpc.aio

from kvplane.transport.local import packets
from kvplane.wire.v1 import execution_pb2_grpc
from tests.helpers.attacked_planes import delimited
from tests.helpers.data.data_server import author_of, serving
from tests.helpers.local_peer import LocalPeer, plan_of_two_tokens

NUM_PACKETS = 120
LONG_BYTES = 100_000
MOST_GROWTH_BYTES = 4 << 20


async def test_layers_that_are_asked_for_again_and_again_take_no_memory(tmp_path: Path) -> None:
    """Each packet differs, by how often it names the layer, and asks for one that has run, or binds
    it.
    """
    async with (
        serving(tmp_path, local_region_bytes=1 << 20) as (server, side),
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        author = author_of(server, side)
        stub = execution_pb2_grpc.ExecutionServiceStub(channel)
        peer = await LocalPeer.joined(stub, author.grant(1))
        assert (await peer.ask(plan=plan_of_two_tokens(author))).started.num_tokens == 2
        packet = peer.packet(peer.layer(0, 2))
        assert (await peer.ask(packet)).output.layer == 0

        async def ask_again(number: int) -> None:
            again = b"\x18\x00" * (LONG_BYTES // 2 + number)  # RunLayerRequest.layer = 0
            # ExecuteRequest.layer, to be merged
            answer = await peer.ask(packet + delimited(3, again))
            assert answer.WhichOneof("message") == "output"
            longer = peer.layer(0, 2).SerializeToString() + again
            peer.send(packets.head_of(packets.BIND_LAYER, number) + longer)
            assert (await peer.answer()).error.field == "layer"

        await ask_again(0)
        tracemalloc.start()
        try:
            before_bytes, _ = tracemalloc.get_traced_memory()
            for number in range(NUM_PACKETS):
                await ask_again(number)
            after_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert after_bytes - before_bytes < MOST_GROWTH_BYTES
        peer.close()
        peer.memory = None
