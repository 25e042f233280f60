"""A client of the Unix socket that sends what it likes: the data plane's memory stays in bounds."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from kvplane.transport.local import packets
from tests.helpers.attacked_planes import delimited
from tests.helpers.local_peer import plan_of_two_tokens
from tests.helpers.served import served

NUM_PACKETS = 120
LONG_BYTES = 100_000
MOST_GROWTH_BYTES = 4 << 20


async def test_layers_that_are_asked_for_again_and_again_take_no_memory(tmp_path: Path) -> None:
    """Each packet differs, by how often it names the layer, and asks for one that has run, or binds
    it.
    """
    async with served(tmp_path, local_region_bytes=1 << 20) as plane:
        peer = await plane.joined()
        assert (await peer.ask(plan=plan_of_two_tokens(plane.author))).started.num_tokens == 2
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
