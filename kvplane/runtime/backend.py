"""Backends, which carry out plans: the engine's only access to keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvplane.attention_options import AttentionOptions
from kvplane.errors import InternalError
from kvplane.execution.execution import Execution, Executions, shards_of
from kvplane.layout import Layout
from kvplane.results import ShardInfo, Signed
from kvplane.runtime.region_layers import RegionLayers
from kvplane.runtime.states import StateShards
from kvplane.sync.loop_thread import LoopThread
from kvplane.tensor import Tensor
from kvplane.transport.tls import Tls


@dataclass(frozen=True, slots=True)
class PlanStarted:
    """Result of starting a plan. ``receipts``: of all shards if it has nothing to compute, else
    empty.
    """

    num_tokens: int
    receipts: Sequence[Signed] = ()


class OpenedSession(Protocol):
    """The part of a session that a backend needs."""

    @property
    def grant(self) -> Signed:
        """The session's grant: its signed rights at a data plane."""

    @property
    def shards(self) -> Sequence[ShardInfo]:
        """Descriptions of the pool's shards, by index."""

    @property
    def layout(self) -> Layout:
        """The pool's layout."""


class DataBackend(Protocol):
    """Interface that runs the plans of one session, one at a time: ``start``, each layer in order,
    ``finish``. A plan in passes repeats this for each pass.
    """

    @property
    def has_passes(self) -> bool:
        """Say whether ``start`` can be given the index of a pass."""

    @property
    def latent_layers(self) -> frozenset[int]:
        """The model's layers that keep latents in the session's pool."""

    def open(self, session: OpenedSession) -> None:
        """Run the plans of ``session`` from now on, and of no other."""

    def start(
        self, plan: Signed, num_tokens: int = 0, pass_index: int | None = None
    ) -> PlanStarted:
        """Start a plan, or its next pass. ``num_tokens``: tokens that it computes, 0 if unknown.
        If given, this need not wait for the answer; then the first layer raises the errors.
        """

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Write and attend in one layer: see ``kvplane.transformers.attention.Step``."""

    def finish(self, *, is_last: bool = True) -> Sequence[Signed]:
        """Return all shards' receipts, after the last layer and all checkpoints; none unless the
        pass was the last.
        """

    def read_states(self, sequence_ids: Sequence[int], entries: Sequence[int]) -> torch.Tensor:
        """Read checkpoints of states: for each sequence, that at the end of its block
        ``entries[i]``. Returns uint8 [num_state_layers, num, page_bytes]. Raises
        BlockNotWrittenError for one that is not written.
        """

    def write_states(
        self, sequence_ids: Sequence[int], entries: Sequence[int], states: torch.Tensor
    ) -> None:
        """Write checkpoints that the plan keeps, in the shape of ``read_states``, after ``start``
        and before ``finish``: there is no receipt before all are written.
        """

    def close(self) -> None:
        """Stop running the session's plans; another may be opened. Harmless when called again."""

    def stop(self) -> None:
        """Release everything; no session can be opened afterwards."""


class RemoteBackend:
    """Runs plans on data planes in other processes: tensors travel by shared memory to those on
    this machine, and to others as bytes on an Execute stream to each.
    """

    def __init__(
        self,
        loop: LoopThread,
        timeout_s: float,
        tls: Tls | None = None,
        *,
        shared_memory: bool = True,
    ) -> None:
        """``shared_memory``: whether to use shared memory where it is available."""
        self._loop = loop
        self._executions = Executions(tls=tls, timeout_s=timeout_s, shared_memory=shared_memory)
        self._execution: Execution | None = None
        self.latent_layers: frozenset[int] = frozenset()
        self._layers: RegionLayers | None = None  # only for a pool of one shard
        self._states: StateShards | None = None  # only for a pool with states

    def open(self, session: OpenedSession) -> None:
        """Open an Execute stream to each of the session's data planes."""
        self.close()

        async def opened() -> Execution:
            return await self._executions.open(
                session.grant,
                [info.address for info in session.shards],
                [info.shard for info in session.shards],
                session.layout,
            )

        self._execution = self._loop.run(opened())
        self.latent_layers = session.layout.latent_layers
        shards = shards_of(self._execution)
        self._layers = RegionLayers(shards[0]) if len(shards) == 1 else None
        if session.layout.state_group is not None:
            parts = [info.shard for info in session.shards]
            self._states = StateShards(shards, parts, session.layout)

    has_passes = True

    def start(
        self, plan: Signed, num_tokens: int = 0, pass_index: int | None = None
    ) -> PlanStarted:
        """Send the plan, or its next pass, to the data planes."""
        execution = self._open_execution()
        if num_tokens:
            if self._layers is None or not self._layers.begin(plan, num_tokens, pass_index):
                self._loop.run(execution.begin(plan, num_tokens, pass_index=pass_index))
            return PlanStarted(num_tokens)
        self._loop.run(execution.start(plan))
        return PlanStarted(execution.num_tokens, execution.receipts if execution.has_run else ())

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Send one layer's new tokens and wait for its attention."""
        if self._layers is not None:
            output = self._layers.layer(index, query, key, value, options)
            if output is not None:
                return output
        # A single shard takes the tensors undivided, even if they have a part of the model's heads.
        out = self._loop.run(
            self._open_execution().layer(
                index,
                _to_wire(query),
                _to_wire(key),
                None if value is None else _to_wire(value),
                options=options,
            )
        )
        there: torch.Tensor = out.torch().to(query.device)
        return there

    def finish(self, *, is_last: bool = True) -> Sequence[Signed]:
        """Return the receipts, which follow the last layer. Raises InternalError without one."""
        execution = self._open_execution()
        if not is_last:
            return ()
        if not execution.has_run:
            raise InternalError("no receipt came after the last layer")
        return execution.receipts

    def read_states(self, sequence_ids: Sequence[int], entries: Sequence[int]) -> torch.Tensor:
        """Read the checkpoints from the data planes."""
        return self._loop.run(self._open_states().read(sequence_ids, entries))

    def write_states(
        self, sequence_ids: Sequence[int], entries: Sequence[int], states: torch.Tensor
    ) -> None:
        """Send the checkpoints to the data planes."""
        self._loop.run(self._open_states().write(sequence_ids, entries, states))

    def close(self) -> None:
        """Close the session's streams and channels."""
        execution, self._execution, self._layers = self._execution, None, None
        self._states = None
        if execution is not None:
            self._loop.run(execution.close())

    def stop(self) -> None:
        """Close the session, as there is nothing else to release."""
        self.close()

    def _open_execution(self) -> Execution:
        if self._execution is None:
            raise InternalError("no session is open")
        return self._execution

    def _open_states(self) -> StateShards:
        if self._states is None:
            raise InternalError("no session of a pool with states is open")
        return self._states


def _to_wire(tensor: torch.Tensor) -> Tensor:
    return Tensor.from_array(tensor.detach().cpu().contiguous())
