"""Counts the blocks that one long sequence holds in each layer group of models with windowed and
full attention, and the blocks it would hold with full attention everywhere.

    python -m benchmarks.window_groups [NUM_TOKENS]

The control plane's core decides, as in a server. There is no model and no pool memory, so this
takes seconds. The prompt comes in parts of 2048 tokens, then one token is decoded.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from transformers import Cohere2Config, Gemma3TextConfig, GptOssConfig

from benchmarks.control_plane import messages
from benchmarks.control_plane.engine import Engine
from control_plane.config import CoreConfig
from control_plane.core import ControlPlane
from kvplane import ops
from kvplane.layout import Layout
from kvplane.models.model_layers import layer_groups
from kvplane.shard import Shard
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import session_pb2 as cpb

PART_TOKENS: Final = 2048
MODELS: Final = {
    "Gemma 3 27B": Gemma3TextConfig(
        num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=16, head_dim=128,
        sliding_window=1024,
    ),
    "Command R7B (Cohere 2)": Cohere2Config(
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096,
        sliding_window=4096,
    ),
    "gpt-oss 20B": GptOssConfig(
        num_hidden_layers=24, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
        sliding_window=128,
    ),
}  # fmt: skip
"""Configs with the published models' layers, KV heads, head sizes and windows."""
_TENANT: Final = "tenant"


class _Core:
    """A control plane's core with a pool of ``layout``, as a wire for an engine's steps."""

    def __init__(self, layout: Layout, num_device_blocks: int) -> None:
        self._core = ControlPlane(incarnation=1, config=CoreConfig(), clock=lambda: 1.0)
        hello = messages.hello(num_device_blocks, 0)
        hello.layout.CopyFrom(layout.to_proto())
        hello.shard.CopyFrom(Shard.whole(layout).to_proto())
        of_group = rpb.GroupBlocks(num_device_blocks=num_device_blocks)
        hello.groups.extend([of_group] * len(layout.groups))
        key = self._core.register(hello).key
        self._core.report(messages.POOL, 0, messages.EPOCH, rpb.BlockReport(last=True))
        self._core.take_notified()
        while self._core.has_work():
            self._core.work()
            self._core.take_notified()
        request = messages.open_session()
        request.layout.CopyFrom(layout.to_proto())
        session = self._core.open_session(request, _TENANT).session
        self.engine = Engine(self, session, key)

    async def step(self, request: cpb.StepRequest) -> tuple[cpb.StepResponse, float]:
        answer = self._core.step(request, _TENANT)
        self._core.take_outgoing(messages.POOL, 0)
        return answer, 0.0

    async def abort(self, request: cpb.AbortPlansRequest) -> float:
        self._core.abort_plans(request, _TENANT)
        return 0.0

    def num_held(self) -> dict[int, int]:
        """Return the device blocks that sequences hold, by layer group."""
        tiers = self._core.get_pool(messages.POOL).usage
        return {usage.group: usage.num_held_blocks for usage in tiers if usage.num_held_blocks}


def layout_of(name: str) -> Layout:
    """Return the layout of one of ``MODELS``, in bfloat16."""
    return Layout(
        model_id=name,
        block_size_tokens=messages.BLOCK_SIZE_TOKENS,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        groups=layer_groups(MODELS[name]),
    )


async def held_blocks(layout: Layout, num_tokens: int) -> dict[int, int]:
    """Return by layer group the blocks of ``num_tokens`` prompt tokens and a decoded one."""
    core = _Core(layout, num_tokens // layout.block_size_tokens + 1)
    engine, tokens = core.engine, range(num_tokens + 1)
    (sequence,) = engine.new_ids(1)
    await engine.step(ops.admit(sequence, tokens[:PART_TOKENS]))
    for first in [*range(PART_TOKENS, num_tokens, PART_TOKENS), num_tokens]:
        stop = min(first + PART_TOKENS, num_tokens) if first < num_tokens else first + 1
        part = tokens[first:stop]
        await engine.step(ops.append(sequence, part, len(part), first_positions=first))
    await engine.settle()
    return core.num_held()


def table(num_tokens: int) -> str:
    """Return a row for each layer group, and one for the whole of each model."""
    lines = [
        "| model | layers | window | blocks held | of | MiB held | of |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in MODELS:
        layout = layout_of(name)
        held = asyncio.run(held_blocks(layout, num_tokens))
        whole = -(-(num_tokens + 1) // layout.block_size_tokens)
        sizes = [layout.block_bytes(i) / 2**20 for i in range(len(layout.groups))]
        for i, group in enumerate(layout.groups):
            window = group.sliding_window_tokens or "none"
            lines.append(
                f"| {name} | {len(group.layers)} | {window} | {held[i]} | {whole} | "
                f"{held[i] * sizes[i]:.0f} | {whole * sizes[i]:.0f} |"
            )
        mib, most = sum(held[i] * size for i, size in enumerate(sizes)), whole * sum(sizes)
        lines.append(
            f"| {name} | all {layout.num_layers} | | | | {mib:.0f} ({mib / most:.0%}) "
            f"| {most:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{table(int(sys.argv[1]) if len(sys.argv) > 1 else 32_768)}\n")
