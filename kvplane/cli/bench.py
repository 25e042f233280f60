"""Traffic for both planes, as an engine makes it: prompts that share prefixes, decode steps, forks,
swaps. Attention is computed of zeros, since only the traffic matters. When a plane restarts, the
traffic goes on in a new session, with other sequences.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from kvplane import ops
from kvplane.attention_options import AttentionOptions
from kvplane.clients.control_client import ControlClient
from kvplane.clients.data_client import DataClient
from kvplane.clients.execution import Execution
from kvplane.errors import (
    DeadlineExceededError,
    KvplaneError,
    NotFoundError,
    StaleError,
    UnavailableError,
)
from kvplane.layout import LATENT, LayerGroup, Layout
from kvplane.results import StepResult
from kvplane.session import Session
from kvplane.tensor import Tensor
from kvplane.transport.tls import TlsOptions
from kvplane.v1 import control_pb2 as pb
from kvplane.v1.types_pb2 import SignedPayload

# A fork and a swap to the host tier and back come once in so many steps.
_FORK_EVERY: Final = 16
_SWAP_EVERY: Final = 24
_REOPEN_DELAY_S: Final = 0.1
_OPTIONS: Final = AttentionOptions(scale=1.0)
# What comes of a plane that is away or has restarted: the session is lost.
_LOST: Final = (StaleError, NotFoundError, UnavailableError, DeadlineExceededError)
_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What is sent. ``num_sequences`` live at one time; prompts begin with one of ``num_prefixes``
    prefixes of ``prefix_tokens`` tokens, and have ``prompt_tokens`` in all. ``pause_s``: between
    steps.
    """

    duration_s: float = 10.0
    max_steps: int = 2**62
    num_sequences: int = 8
    num_prefixes: int = 8
    prefix_tokens: int = 64
    prompt_tokens: int = 96
    output_tokens: int = 32
    pause_s: float = 0.0
    seed: int = 1


@dataclass
class Measured:
    """What came of it: seconds that the steps took on the control plane's side of the wire and on
    the data plane's, and counts. A session is lost with the sequences that live in it and the step
    that was under way, and ``num_reopened_sessions`` of those lost were followed by another.
    """

    step_s: list[float] = field(default_factory=list)
    execute_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_refused: int = 0
    num_lost_sessions: int = 0
    num_reopened_sessions: int = 0
    num_lost_steps: int = 0
    num_lost_sequences: int = 0

    @property
    def has_ended_early(self) -> bool:
        """Whether no session followed the last one that was lost."""
        return self.num_reopened_sessions < self.num_lost_sessions

    def summary(self) -> dict[str, float]:
        """The figures that are printed."""
        return {
            "steps": len(self.step_s),
            "step_p50_ms": _percentile(self.step_s, 0.5) * 1000,
            "step_p99_ms": _percentile(self.step_s, 0.99) * 1000,
            "execute_p50_ms": _percentile(self.execute_s, 0.5) * 1000,
            "execute_p99_ms": _percentile(self.execute_s, 0.99) * 1000,
            "computed_tokens": self.num_computed_tokens,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "refused_items": self.num_refused,
            "lost_sessions": self.num_lost_sessions,
            "reopened_sessions": self.num_reopened_sessions,
            "lost_steps": self.num_lost_steps,
            "lost_sequences": self.num_lost_sequences,
        }


async def bench(
    control: ControlClient, pool_id: str, traffic: Traffic, tls: TlsOptions | None = None
) -> Measured:
    """Run ``traffic`` on a pool of one shard. Once a step has run, planes may be away, for as long
    as the traffic lasts. Raises KvplaneError.
    """
    session: Session | None = await _open(control, pool_id)
    load = _Load(traffic)
    deadline_s = time.monotonic() + traffic.duration_s
    while session is not None:
        try:
            await load.run(session, tls, deadline_s)
            break
        except _LOST as error:
            if not load.measured.execute_s:
                raise  # not lost: it could never be used
            _LOGGER.warning("session=%d lost: %s: %s", session.id, error.reason, error)
            load.lose()
        session = await _reopen(control, pool_id, deadline_s)
        load.measured.num_reopened_sessions += session is not None
    return load.measured


async def _open(control: ControlClient, pool_id: str, timeout_s: float | None = None) -> Session:
    layout = Layout.from_proto((await control.wait_ready(pool_id, timeout_s)).layout)
    return await control.open_session(pool_id, layout, "kvplane bench")


async def _reopen(control: ControlClient, pool_id: str, deadline_s: float) -> Session | None:
    """Another session, once the pool is ready; None at the deadline."""
    while (left_s := deadline_s - time.monotonic()) > 0:
        with suppress(*_LOST):
            return await _open(control, pool_id, left_s)
        await asyncio.sleep(_REOPEN_DELAY_S)
    return None


@dataclass
class _Sequence:
    """``position``: the next to be computed; -1 while the admission waits in the line."""

    tokens: list[int]
    num_outputs: int
    position: int = -1


class _Load:
    """The live sequences, and what the next step does to them."""

    _session: Session
    _execution: Execution

    def __init__(self, traffic: Traffic) -> None:
        self.measured = Measured()
        self._traffic = traffic
        self._random = random.Random(traffic.seed)
        shared = random.Random(0)  # by all engines
        self._prefixes = [
            shared.choices(range(256), k=traffic.prefix_tokens) for _ in range(traffic.num_prefixes)
        ]
        self._live: dict[int, _Sequence] = {}
        self._swapped = 0  # the sequence on the host tier
        self._last_id = 0
        self.num_steps = 0  # begun

    async def run(self, session: Session, tls: TlsOptions | None, deadline_s: float) -> None:
        """Step until the deadline, and free all sequences."""
        data = DataClient(session.shards[0].address, tls=tls)
        async with session, data, await data.open(session.grant) as execution:
            self._session, self._execution = session, execution
            while time.monotonic() < deadline_s and self.num_steps < self._traffic.max_steps:
                await self._step()
                await asyncio.sleep(self._traffic.pause_s)
            if self._live:
                await session.step([ops.free(sorted(self._live))])

    def lose(self) -> None:
        """The session is gone, with all that it held."""
        self.measured.num_lost_sessions += 1
        self.measured.num_lost_steps += 1
        self.measured.num_lost_sequences += len(self._live)
        self._live.clear()
        self._swapped = 0

    async def _step(self) -> None:
        """One step, and its plan."""
        self.num_steps += 1
        ended = [i for i, s in self._live.items() if s.num_outputs <= 0 and i != self._swapped]
        for sequence_id in ended:
            del self._live[sequence_id]
        operations = [ops.free(ended)] if ended else []
        self._add_swap(operations)
        grown = self._add_growth(operations)
        admitted = self._add_admission(operations)
        forked = self._add_fork(operations)
        begin_s = time.perf_counter()
        result = await self._session.step(operations)
        self.measured.step_s.append(time.perf_counter() - begin_s)
        for operation, outcome in zip(operations, result.results, strict=True):
            self.measured.num_refused += len(outcome.failures)
            kind = operation.WhichOneof("operation")
            failed = {failure.item for failure in outcome.failures}
            if kind == "append":
                self._grew([i for n, i in enumerate(grown) if n not in failed])
                if failed:
                    self._live[grown[-1]].num_outputs = 0  # ends, to make room for the others
            elif kind == "admit":
                self._admitted(admitted, outcome)
            elif kind == "fork" and failed:
                del self._live[forked]
            elif (kind == "swap_out" and failed) or (kind == "swap_in" and not failed):
                self._swapped = 0
        self._hear(result)
        if result.plan is not None:
            await self._execute(result.plan)

    def _tokens(self, num: int) -> list[int]:
        return self._random.choices(range(256), k=num)

    def _add_growth(self, operations: list[pb.Operation]) -> list[int]:
        """Append to every live sequence: the rest of its prompt, or one token."""
        grown = [i for i, s in self._live.items() if s.position >= 0 and i != self._swapped]
        if not grown:
            return grown
        sequences = [self._live[i] for i in grown]
        new = [[] if s.position < len(s.tokens) else self._tokens(1) for s in sequences]
        for sequence, tokens in zip(sequences, new, strict=True):
            sequence.tokens += tokens
        operations.append(
            ops.appends(
                grown,
                [s.position for s in sequences],
                [len(s.tokens) - s.position for s in sequences],
                [len(tokens) for tokens in new],
                [token for tokens in new for token in tokens],
            )
        )
        for sequence, tokens in zip(sequences, new, strict=True):
            del sequence.tokens[len(sequence.tokens) - len(tokens) :]
        self._appended = dict(zip(grown, new, strict=True))
        return grown

    def _grew(self, grown: Iterable[int]) -> None:
        for sequence_id in grown:
            sequence = self._live[sequence_id]
            sequence.tokens += self._appended[sequence_id]
            sequence.position = len(sequence.tokens)
            sequence.num_outputs -= 1

    def _add_admission(self, operations: list[pb.Operation]) -> int:
        """Admit one more sequence, unless one waits or there are enough. Returns its id, or 0."""
        traffic = self._traffic
        waits = any(sequence.position < 0 for sequence in self._live.values())
        if waits or len(self._live) >= traffic.num_sequences:
            return 0
        self._last_id += 1
        own = self._tokens(max(1, traffic.prompt_tokens - traffic.prefix_tokens))
        tokens = self._random.choice(self._prefixes) + own
        self._live[self._last_id] = _Sequence(tokens, traffic.output_tokens)
        operations.append(ops.admit(self._last_id, tokens, wait=True))
        return self._last_id

    def _admitted(self, sequence_id: int, outcome: pb.OperationResult) -> None:
        if not outcome.failures:
            sequence = self._live[sequence_id]
            sequence.position = len(sequence.tokens)
            self._count_cached(sequence, outcome.admit.num_cached_tokens)
        elif not outcome.failures[0].shortage.place_in_line:
            del self._live[sequence_id]

    def _count_cached(self, sequence: _Sequence, num_cached: int) -> None:
        self.measured.num_prompt_tokens += len(sequence.tokens)
        self.measured.num_cached_tokens += num_cached

    def _add_fork(self, operations: list[pb.Operation]) -> int:
        """Now and then, fork a sequence that is not the newest. Returns the new one's id, or 0."""
        if self.num_steps % _FORK_EVERY or len(self._live) >= self._traffic.num_sequences:
            return 0
        parents = [
            i
            for i, s in self._live.items()
            if 0 <= s.position == len(s.tokens) and i != self._swapped and i != self._last_id
        ]
        if not parents:
            return 0
        # It is forked after this step's appends: refused ones would leave it behind its parent.
        operations.insert(0, ops.fork(parents[0], self._last_id + 1))
        parent = self._live[parents[0]]
        self._last_id += 1
        self._live[self._last_id] = _Sequence([*parent.tokens], parent.num_outputs, parent.position)
        return self._last_id

    def _add_swap(self, operations: list[pb.Operation]) -> None:
        """Now and then, move a sequence to the host tier, and back a few steps later."""
        phase = self.num_steps % _SWAP_EVERY
        if self._swapped and phase >= _SWAP_EVERY // 4:
            operations.append(ops.swap_in([self._swapped]))
        elif not self._swapped and phase == 0 and self._session.num_host_blocks:
            idle = [i for i, s in self._live.items() if s.position >= 0]
            if idle:
                self._swapped = idle[0]
                operations.append(ops.swap_out([self._swapped]))

    def _hear(self, result: StepResult) -> None:
        """What happened without the session's asking."""
        news = result.news
        for granted in news.granted:
            sequence = self._live[granted.sequence_id]
            sequence.position = granted.num_cached_tokens
            self._count_cached(sequence, granted.num_cached_tokens)
        for sequence_id in news.cut:
            self._live.pop(sequence_id, None)
            if sequence_id == self._swapped:
                self._swapped = 0

    async def _execute(self, plan: SignedPayload) -> None:
        begin_s = time.perf_counter()
        started = await self._execution.start(plan)
        if started.receipt is None:
            layout = self._session.layout
            of_groups = [_zeros(layout, group, started.num_tokens) for group in layout.groups]
            for layer in self._execution.layers:
                index = next(i for i, group in enumerate(layout.groups) if layer in group.layers)
                key, value = of_groups[index]
                await self._execution.layer(layer, key, key, value, options=_OPTIONS)
        self.measured.num_computed_tokens += started.num_tokens
        self.measured.execute_s.append(time.perf_counter() - begin_s)
        if self._execution.receipt is None:
            raise KvplaneError("the plan ran and no receipt came")
        self._session.add_receipt(self._execution.receipt)


def _zeros(layout: Layout, group: LayerGroup, num_tokens: int) -> tuple[Tensor, Tensor | None]:
    """Keys and values of a layer of ``group``, as a data plane takes them."""

    def zeros(size: int) -> Tensor:
        shape = (num_tokens, group.num_kv_heads, size)
        return Tensor(layout.dtype, shape, bytes(Tensor.size_bytes(layout.dtype, shape)))

    is_latent = group.cache_kind == LATENT
    return zeros(group.head_size), None if is_latent else zeros(group.value_size)


def _percentile(values: list[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(int(share * len(ranked)), len(ranked) - 1)] if ranked else 0.0
