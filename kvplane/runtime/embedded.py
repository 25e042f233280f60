"""Planes in the model's own process: tensors are not copied to another process.

The pool registers with the control plane and serves gRPC to others like any other. This process
holds its key, so it is for one tenant.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from control_plane.server.config import ControlPlaneSettings
from control_plane.server.server import ControlPlaneServer
from data_plane.kernels.backend import cache_kinds_of
from data_plane.kernels.device.cuda_streams import device_errors
from data_plane.kernels.device.devices import choose_device, this_machine
from data_plane.plans.batches.fixed_rows import StepBounds
from data_plane.server.config import DataPlaneSettings
from data_plane.server.embedded import EmbeddedDataPlane
from data_plane.server.embedded_execution import EmbeddedExecution, ExecutionStep
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InternalError
from kvplane.layout import LATENT, Layout
from kvplane.results import Signed
from kvplane.runtime.backend import OpenedSession, PlanStarted
from kvplane.sync.loop_thread import LoopThread

_GRACE_S = 1.0  # for other processes' calls, when the planes are stopped


def start_planes(
    closing: ExitStack,
    layout: Layout,
    *,
    device: str,
    pool_id: str,
    num_device_blocks: int,
    num_threads: int,
    start_timeout_s: float,
) -> tuple[str, EmbeddedBackend]:
    """Start both planes in this process, with the pool on ``device``; ``closing`` stops them.
    Returns the control plane's address, on the loopback interface, and the data plane's backend.
    """
    loop = LoopThread("kvplane-control-plane")
    closing.callback(loop.close)
    config = ControlPlaneSettings(bind="127.0.0.1:0", metrics_port=-1, grace_s=_GRACE_S)
    server = loop.run(ControlPlaneServer.start(config))
    closing.callback(lambda: loop.run(server.stop()))
    backend = EmbeddedBackend(
        layout,
        start_timeout_s,
        control_plane=server.address,
        device=device,
        pool_id=pool_id,
        num_device_blocks=num_device_blocks,
        num_threads=num_threads,
        grace_s=_GRACE_S,
    )
    closing.callback(backend.stop)
    return server.address, backend


def device_for(model_device: torch.device) -> str:
    """Return the device of a model's pool: its GPU where the kernels run on one, otherwise the CPU.
    To another device the tensors of a layer would cross the link twice.
    """
    is_served = model_device.type == "cuda" and chosen_device() == "cuda"
    return str(model_device) if is_served else "cpu"


def chosen_device() -> str:
    """Return the type of the device on which a pool is put that is not told where."""
    return choose_device("auto", this_machine).type


def serves_latents(device: str = "auto") -> bool:
    """Return whether the kernels of a pool on ``device`` attend to latents."""
    return LATENT in cache_kinds_of(choose_device(device, this_machine))


class EmbeddedBackend:
    """Starts a data plane of ``layout`` in this process, and runs plans on its executor.
    ``settings``: fields of DataPlaneSettings. Raises UnavailableError when it cannot register in
    time.
    """

    def __init__(self, layout: Layout, start_timeout_s: float, **settings: Any) -> None:
        config = DataPlaneSettings(bind="127.0.0.1:0", metrics_port=-1, **settings)
        self._plane = EmbeddedDataPlane(config, layout)
        self._executor = self._plane.start(start_timeout_s)
        self._execution: EmbeddedExecution | None = None
        self.latent_layers: frozenset[int] = frozenset()

    has_passes = True
    takes_model_shapes = True
    """Says that ``layer`` takes tensors in transformers' shapes: see ``Step``."""

    def open(self, session: OpenedSession) -> None:
        """Open the session at the executor, by its grant."""
        self._execution = EmbeddedExecution(self._executor, session.grant)
        self.latent_layers = session.layout.latent_layers

    def start(
        self, plan: Signed, num_tokens: int = 0, pass_index: int | None = None
    ) -> PlanStarted:
        """Start a plan or its next pass on the executor."""
        execution = self._open_execution()
        execution.start(plan, pass_index=pass_index)
        return PlanStarted(execution.num_tokens, execution.receipts)

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Write and attend in this thread, on the pool's device."""
        execution, device = self._open_execution(), self._executor.device
        if query.device == device:
            there = query, key, value
        else:
            with device_errors():
                there = (
                    query.to(device),
                    key.to(device),
                    None if value is None else value.to(device),
                )
        out = execution.layer(index, *there, options=options)
        if out.device == query.device:
            return out
        with device_errors():
            return out.to(query.device)

    def fixed_step(self, num_tokens: int, context_tokens: int) -> ExecutionStep:
        """Return the open session's step for CUDA graphs, which are replayed for its plans: see
        ``StepBounds``. A context is of no more tokens than the pool has room for.
        """
        pools = self._executor.pools
        most = max(pools.num_blocks.values()) * self._executor.layout.block_size_tokens
        bounds = StepBounds(num_tokens, min(context_tokens, most))
        return self._open_execution().fixed_step(bounds)

    def finish(self, *, is_last: bool = True) -> Sequence[Signed]:
        """Return the receipt after the last layer."""
        execution = self._open_execution()
        if not is_last and self._executor.device.type == "cpu":
            return ()  # its kernels have raised what was wrong
        receipts = execution.finish()
        if is_last and not receipts:
            raise InternalError("no receipt came after the last layer")
        return receipts if is_last else ()

    def read_states(self, sequence_ids: Sequence[int], entries: Sequence[int]) -> torch.Tensor:
        """Read the checkpoints, on the pool's device."""
        return self._open_execution().read_states(sequence_ids, entries)

    def write_states(
        self, sequence_ids: Sequence[int], entries: Sequence[int], states: torch.Tensor
    ) -> None:
        """Write the checkpoints, from any device."""
        self._open_execution().write_states(sequence_ids, entries, states)

    def close(self) -> None:
        """Stop running the session's plans; the pool stays, for others and for the next session."""
        self._execution = None

    def stop(self) -> None:
        """Stop the data plane."""
        self._plane.stop()

    def _open_execution(self) -> EmbeddedExecution:
        if self._execution is None:
            raise InternalError("no session is open")
        return self._execution
