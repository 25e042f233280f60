"""An executor with its plan author, and a check that a refused command leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from data_plane import Executor, StartedPlan
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.server.embedded_execution import EmbeddedExecution
from kvplane.attention_options import AttentionOptions
from kvplane.errors import KvplaneError
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.kernel_sets import LateRuntime, late_kernels
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.data.plan_author import (
    LAYOUT,
    POOL_ID,
    Part,
    PlanAuthor,
    fields_of,
    publications,
    set_blocks,
    span,
    tokens,
)

if TYPE_CHECKING:  # it brings the control plane, which the tests on a GPU do without
    from kvplane.runtime.embedded import EmbeddedBackend

LAYERS = (0, 1)


made: list[Rig] = []
"""The rigs of the present test; the fixture ``sound_rigs`` checks them at its end."""


def sound_rigs() -> Iterator[None]:
    """Body of a fixture: check the integrity of all rigs that a test has made."""
    yield
    for rig in made:
        rig.executor.check_integrity()
    made.clear()


class Rig:
    """Session 1 is open; pools are zeroed so that they can be compared."""

    def __init__(self, **settings: Any) -> None:
        values: dict[str, Any] = {
            "layout": LAYOUT,
            "pool_id": POOL_ID,
            "num_device_blocks": 8,
            "num_host_blocks": 4,
            "num_threads": 1,
        }
        self.executor = Executor(**{**values, **settings})
        for tier in (self.executor.pools.device_tier, self.executor.pools.host_tier):
            tier.view(torch.uint8).zero_()
        num_shards = self.executor.shard.num_shards
        self.author = PlanAuthor(
            self.executor.epoch, layout=self.executor.layout, num_shards=num_shards
        )
        self.executor.install(self.author.incarnation, self.author.key)
        self.session = self.open(1)
        made.append(self)

    def open(self, session_id: int, **fields: Any) -> int:
        return self.executor.open(self.author.grant(session_id, **fields))

    def fence(self, session_id: int) -> None:
        self.executor.fence(self.author.session(session_id), session_id)

    def plan(
        self, number: int, *parts: Part, session_id: int = 1, **fields: Any
    ) -> pb.SignedPayload:
        """Sign a plan of these parts. ``fields``: of its message."""
        return self.author.plan(number, session_id, **{**fields_of(parts), **fields})

    def start(self, number: int, *parts: Part, session_id: int = 1, **fields: Any) -> StartedPlan:
        plan = self.plan(number, *parts, session_id=session_id, **fields)
        return self.executor.start(session_id, plan)

    def run_layers(self, num_tokens: int) -> None:
        """Run all layers of the latest plan."""
        for layer in self.executor.layers:
            self.layer(layer, num_tokens)

    def run_layer(
        self,
        layer: int,
        query: torch.Tensor | None,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        *,
        session_id: int = 1,
        options: AttentionOptions = AttentionOptions(),
    ) -> torch.Tensor | None:
        """Run one layer of the latest plan and its present pass."""
        named = of_latest(self.executor, session_id)
        tensors = query, key, value
        return self.executor.layer(session_id, layer, *tensors, options=options, **named)

    def layer(
        self, layer: int, num_tokens: int, *, session_id: int = 1, seed: int = 0
    ) -> torch.Tensor:
        """Run one layer of the latest plan with random queries (4 heads), keys and values."""
        key, value = tokens(num_tokens, seed=seed + 1), tokens(num_tokens, seed=seed + 2)
        output = self.run_layer(layer, tokens(num_tokens, 4), key, value, session_id=session_id)
        assert output is not None
        return output

    def run(
        self, number: int, *parts: Part, session_id: int = 1, seed: int = 0, **fields: Any
    ) -> plan_pb2.Receipt:
        """Start a plan and run all its layers."""
        started = self.start(number, *parts, session_id=session_id, **fields)
        if started.receipt is None:
            for layer in LAYERS:
                self.layer(layer, started.num_tokens, session_id=session_id, seed=seed)
        return self.author.read_receipt(self.executor.receipt(session_id))

    def admit(
        self, number: int = 1, *, sequence_id: int = 1, num_tokens: int = 12
    ) -> plan_pb2.Receipt:
        """Run a prompt of at most 16 tokens on blocks 0 and 1."""
        table = set_blocks(sequence_id, [(0, 1), (1, 1)])
        return self.run(number, table, span(sequence_id, 0, num_tokens))

    def publish(self, index: int, generation: int = 1) -> None:
        assert self.executor.publish(publications((index, generation))) == 1

    def stored(self, session_id: int, sequence_id: int, num_blocks: int) -> torch.Tensor:
        """Return the contents of a table's first blocks in the first layer group, also of slots
        never written and slots that no query may read: [num_layers, num_blocks, ...].
        """
        executor = self.executor
        table = executor._tables.get(session_id, sequence_id, "sequence_id").part(0, num_blocks)
        layers = range(len(executor.shard.group_layers(executor.layout, 0)))
        return executor._compute._gather(table.tier_key, table.blocks, layers)

    def snapshot(self) -> tuple[bytes, ...]:
        """Return the contents of both tiers, and all known facts about the blocks."""
        return (
            self.executor.pools.device_tier.view(torch.uint8).numpy().tobytes(),
            self.executor.pools.host_tier.view(torch.uint8).numpy().tobytes(),
            *(part.SerializeToString(deterministic=True) for part in self.executor.report()),
        )

    @contextmanager
    def refuses(self, error: type[KvplaneError], field: str | None = None) -> Iterator[None]:
        """Assert that the body raises exactly ``error`` naming ``field``, and leaves memory, tables
        and counts as they were.
        """
        before = self.snapshot(), self.executor.num_sequences
        with pytest.raises(error) as caught:
            yield
        assert type(caught.value) is error
        if field is not None:
            assert caught.value.field == field
        assert (self.snapshot(), self.executor.num_sequences) == before
        self.executor.check_integrity()


class LateRig(Rig):
    """Its kernels do nothing until somebody waits, but for what chance lets go earlier."""

    runtime: LateRuntime

    def __init__(self, seed: int = 0) -> None:
        kernels, self.runtime = late_kernels(CpuKernels(1), seed)
        super().__init__(kernels=kernels)


def embedded_backend(rig: Rig) -> EmbeddedBackend:
    """Return an engine's backend for session 1, without planes of its own."""
    from kvplane.runtime.embedded import EmbeddedBackend

    backend = EmbeddedBackend.__new__(EmbeddedBackend)
    backend._executor = rig.executor
    backend._execution = EmbeddedExecution(rig.executor, rig.author.grant(1))
    return backend
