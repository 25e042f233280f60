"""Puts load on both planes, as an engine does: prompts that share prefixes, and decoding.

Tensors are made up.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

from kvplane import (
    AttentionOptions,
    ControlClient,
    Execution,
    Session,
    Tensor,
    ops,
)
from kvplane.layout import LATENT
from kvplane.results import Signed


@dataclass
class Sequence:
    """``position``: the next one to compute, -1 while the sequence waits to be admitted."""

    tokens: list[int]
    num_left: int
    position: int = -1


@dataclass(kw_only=True)
class Load:
    """Generates requests, runs them, and counts the results. Each prompt begins with one of
    ``num_prefixes`` shared prefixes.
    """

    duration_s: float = 10.0
    num_sequences: int = 8
    num_prefixes: int = 8
    prefix_tokens: int = 64
    own_tokens: int = 32
    output_tokens: int = 32
    seed: int = 1
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    last_id: int = 0
    live: dict[int, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random, shared = random.Random(self.seed), random.Random(0)
        sizes = [self.prefix_tokens] * self.num_prefixes
        self.prefixes = [shared.choices(range(256), k=size) for size in sizes]

    async def run(self, control: ControlClient, pool_id: str) -> None:
        """Step until the end."""
        session = await control.open_session(pool_id, client_name="load")
        until_s = time.monotonic() + self.duration_s
        async with session, session.open_execution() as execution:
            while time.monotonic() < until_s:
                await self.step(session, execution)
                await asyncio.sleep(0)
            await session.submit_receipts()

    async def step(self, session: Session, execution: Execution) -> None:
        """Free finished sequences, compute the next token of the others, and admit one more."""
        self.num_steps += 1
        done = [i for i, each in self.live.items() if each.num_left <= 0]
        self.live = {i: each for i, each in self.live.items() if each.num_left > 0}
        running = {i: each for i, each in self.live.items() if each.position >= 0}
        new: dict[int, list[int]] = {}  # none where some of the prompt is not computed yet
        operations = [ops.free(done)]
        for i, each in running.items():
            new[i] = self.draw(each.position == len(each.tokens))
            count = len(each.tokens) + len(new[i]) - each.position
            operations.append(ops.append(i, new[i], count, first_positions=each.position))
        if len(running) == len(self.live) < self.num_sequences:
            self.last_id += 1
            prompt = self.random.choice(self.prefixes) + self.draw(self.own_tokens)
            self.live[self.last_id] = Sequence(prompt, self.output_tokens)
            operations.append(ops.admit(self.last_id, prompt, num_compute_tokens=0, wait=True))
        result = await session.step(operations)
        _, *appended = result.results[: len(running) + 1]
        for (i, each), outcome in zip(running.items(), appended, strict=True):
            if outcome.failures:
                self.live[max(running)].num_left = 0  # the youngest makes room for the others
            else:
                each.tokens += new[i]
                each.position = len(each.tokens)
                each.num_left -= 1
        for outcome in result.results[len(running) + 1 :]:
            if not outcome.failures:
                self.admitted(self.last_id, outcome.admit.num_cached_tokens)
            elif not outcome.failures[0].queue_position:
                del self.live[self.last_id]
        for granted in result.news.granted:
            self.admitted(granted.sequence_id, granted.num_cached_tokens)
        for i in result.news.cut:
            self.live.pop(i, None)
        if result.plan is not None:
            await execute(session, execution, result.plan)

    def draw(self, num_tokens: int) -> list[int]:
        return self.random.choices(range(256), k=num_tokens)

    def admitted(self, sequence_id: int, num_cached_tokens: int) -> None:
        self.live[sequence_id].position = num_cached_tokens
        self.num_prompt_tokens += len(self.live[sequence_id].tokens)
        self.num_cached_tokens += num_cached_tokens


async def execute(session: Session, execution: Execution, plan: Signed) -> None:
    """Run a plan, with tensors of zeros."""
    await execution.start(plan)
    dtype, groups = session.layout.dtype, session.layout.groups
    for layer in [] if execution.has_run else execution.layers:
        group = next(group for group in groups if layer in group.layers)
        key = Tensor.zeros(dtype, execution.key_shape(layer))
        is_latent = group.cache_kind == LATENT  # whose value is a part of its key
        value = None if is_latent else Tensor.zeros(dtype, (*key.shape[:2], group.value_size))
        await execution.layer(layer, key, key, value, options=AttentionOptions(scale=1.0))
