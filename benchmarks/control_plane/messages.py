"""The messages that the fake data plane and the engines of this benchmark send."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from typing import Final

from kvplane import ops
from kvplane.layout import STATE, LayerGroup, Layout
from kvplane.wire import protocol, signing
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning import registration_messages

BLOCK_SIZE_TOKENS: Final = 16
POOL: Final = "benchmark"
EPOCH: Final = 1
LAYOUT: Final = Layout(
    model_id="benchmark",
    block_size_tokens=BLOCK_SIZE_TOKENS,
    dtype="float32",
    kv_dtype="float32",
    groups=(LayerGroup("full", (0,), num_kv_heads=1, head_size=8),),
)
HYBRID: Final = replace(
    LAYOUT,
    groups=(
        *LAYOUT.groups,
        LayerGroup("states", (0,), num_kv_heads=1, head_size=0, cache_kind=STATE, page_bytes=64),
    ),
)
_TEXT_TOKENS: Final = 1 << 16
_TEXT: Final = array("i", random.Random(0).choices(range(128_000), k=_TEXT_TOKENS))


def prompt(seed: int, num_tokens: int) -> bytes:
    """Return packed token ids, at most 32,768. Prompts of different seeds differ in the first
    block.
    """
    start = seed * 9_973 % (_TEXT_TOKENS // 2)
    return array("i", [seed]).tobytes() + _TEXT[start + 1 : start + num_tokens].tobytes()


def hello(num_device_blocks: int, num_host_blocks: int, num_checkpoints: int = 0) -> rpb.Hello:
    """Return the Hello of the pool's one shard, which keeps checkpoints of states if it has room
    for some.
    """
    sizes = [(num_device_blocks, num_host_blocks), (num_checkpoints, 0)]
    return registration_messages.hello(
        pool_id=POOL,
        shard=tpb.Shard(num_shards=1, num_layers=1, num_kv_heads=1),
        epoch=EPOCH,
        layout=(HYBRID if num_checkpoints else LAYOUT).to_proto(),
        num_device_blocks=num_device_blocks,
        num_host_blocks=num_host_blocks,
        groups=[
            rpb.GroupBlocks(num_device_blocks=device, num_host_blocks=host)
            for device, host in (sizes if num_checkpoints else [])
        ],
    )


def open_session(layout: tpb.Layout | None = None) -> cpb.OpenSessionRequest:
    """Return a request for a session on the pool."""
    return cpb.OpenSessionRequest(pool_id=POOL, layout=layout or LAYOUT.to_proto())


def receipt(
    key: bytes, session: tpb.SessionRef, number: int, plan: tpb.SignedPayload
) -> tpb.SignedPayload:
    """Return the data plane's signed statement that the plan of step ``number`` ran."""
    payload = plan_pb2.Receipt(
        version=protocol.NEWEST_PAYLOAD_VERSION,
        session=session,
        pool_id=POOL,
        epoch=EPOCH,
        plan_number=number,
        plan_digest=signing.digest(plan.payload),
    ).SerializeToString()
    return registration_messages.signed(key, payload)


def report_part(publications: plan_pb2.Publications) -> rpb.BlockReport:
    """Return a part of a report: published blocks with their generations."""
    blocks = tpb.Blocks(
        tier=tpb.TIER_DEVICE,
        indices=publications.indices,
        generations=publications.generations,
    )
    return rpb.BlockReport(blocks=[blocks], publications=[publications])


class Decoding:
    """Sequences of one engine that get one token each in every step.

    ``ids``: the sequences. Their prompts end at different places in a block, so that in each step a
    sixteenth of them fills one and a sixteenth needs one.
    """

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self._num_tokens = [BLOCK_SIZE_TOKENS + i % BLOCK_SIZE_TOKENS for i, _ in enumerate(ids)]
        self._num_steps = 0

    def admits(self) -> list[cpb.Operation]:
        """Return the operations that start the sequences."""
        pairs = zip(self.ids, self._num_tokens, strict=True)
        return [ops.admit(i, prompt(i, num_tokens)) for i, num_tokens in pairs]

    def append(self) -> cpb.Operation:
        """Return an append of the next token of each."""
        tokens = range(self._num_steps, self._num_steps + len(self.ids))
        positions = [num_tokens + self._num_steps for num_tokens in self._num_tokens]
        self._num_steps += 1
        return ops.append(self.ids, tokens, 1, first_positions=positions, num_tokens=1)
