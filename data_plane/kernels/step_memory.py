"""Memory at fixed addresses for the attention calls of one step after another, so that a CUDA graph
of the calls can be replayed with the rows of the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from data_plane.kernels.arguments import AttentionArguments, HostLengths
from kvplane.errors import InvalidRequestError


class PlanningKernels(Protocol):
    """The methods of ``CudaKernels`` that are used here; it documents them."""

    device: torch.device

    def plan_key(self, arguments: AttentionArguments) -> tuple[object, ...]: ...
    def plan_bytes(self, arguments: AttentionArguments) -> int: ...
    def max_partials(self, arguments: AttentionArguments) -> int: ...
    def step_room(self, arguments: AttentionArguments) -> int: ...
    def step_workspace(self, num_bytes: int) -> torch.Tensor: ...
    def partials_counter(self, arguments: AttentionArguments) -> Callable[[HostLengths], int]: ...
    def empty(self, num_bytes: int) -> torch.Tensor: ...
    def attention_workspace_bytes(
        self, arguments: AttentionArguments, num_partials: int | None = None
    ) -> int: ...
    def plan(
        self,
        arguments: AttentionArguments,
        *,
        memory: torch.Tensor | None = None,
        num_partials: int | None = None,
    ) -> Any: ...
    def paged_attention(
        self,
        arguments: AttentionArguments,
        *,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        plan: Any = None,
    ) -> torch.Tensor: ...


@dataclass(slots=True)
class _Buffers:
    """Memory of all calls that can share a plan."""

    plan_memory: torch.Tensor
    workspace: torch.Tensor
    num_partials: int
    """Partial results for which the workspace has room."""
    count: Callable[[HostLengths], int] | None
    """Counts the partial results of a batch; None where there is room for those of any batch."""
    plan: Any = None
    """The plan queued in this step; None before."""


class StepMemory:
    """Plans and workspaces of one layer group's steps. The first call of a kind allocates memory
    for every batch of its shapes, as far as ``CudaKernels.step_room`` allows; later calls allocate
    nothing.
    """

    def __init__(self, kernels: PlanningKernels) -> None:
        self._kernels = kernels
        self._buffers: dict[tuple[object, ...], _Buffers] = {}

    def begin(self) -> None:
        """Begin a step, before its first layer: its lengths are new, so plans are made again."""
        for buffers in self._buffers.values():
            buffers.plan = None

    def attend(self, arguments: AttentionArguments, out: torch.Tensor | None) -> torch.Tensor:
        """Attend as ``CudaKernels.paged_attention``. A step's first layer that needs a plan queues
        it too. Raises InvalidRequestError if memory would have to be allocated during a capture.
        """
        key = self._kernels.plan_key(arguments)
        buffers = self._buffers.get(key)
        if buffers is None:
            if is_capturing(self._kernels.device):
                raise InvalidRequestError(
                    "call each layer once with tensors like these before they are captured, so "
                    "that their memory is allocated",
                    field="query",
                )
            buffers = self._buffers[key] = self._new_buffers(arguments)
        if buffers.plan is None:
            buffers.plan = self._kernels.plan(
                arguments, memory=buffers.plan_memory, num_partials=buffers.num_partials
            )
        return self._kernels.paged_attention(
            arguments, out=out, workspace=buffers.workspace, plan=buffers.plan
        )

    def check_room(self, lengths: HostLengths) -> None:
        """Raise InvalidRequestError unless there is room for a batch of these lengths."""
        for buffers in self._buffers.values():
            count = 0 if buffers.count is None else buffers.count(lengths)
            if count > buffers.num_partials:
                raise InvalidRequestError(
                    f"the contexts need {count} partial results, and there is room for "
                    f"{buffers.num_partials}: run the plan layer by layer",
                    field="bounds.context_tokens",
                )

    def _new_buffers(self, arguments: AttentionArguments) -> _Buffers:
        kernels = self._kernels
        most = kernels.max_partials(arguments)
        num_partials = min(most, kernels.step_room(arguments))
        num_bytes = kernels.attention_workspace_bytes(arguments, num_partials)
        return _Buffers(
            kernels.empty(kernels.plan_bytes(arguments)),
            kernels.step_workspace(num_bytes),
            num_partials,
            kernels.partials_counter(arguments) if num_partials < most else None,
        )


class StepWorkspaces:
    """Workspaces of one device's fixed steps, each kept as long as a step uses it. All layer groups
    and sessions share them: the executor runs its steps one after another, on whatever streams.
    Only calls without rows can run beside a step, and these write no partial results.
    """

    def __init__(self, empty: Callable[[int], torch.Tensor]) -> None:
        self._empty = empty
        self._kept: list[weakref.ref[torch.Tensor]] = []

    @property
    def num_bytes(self) -> int:
        return sum(workspace.numel() for workspace in self._there())

    @property
    def largest(self) -> int:
        return max((workspace.numel() for workspace in self._there()), default=0)

    def of(self, num_bytes: int) -> torch.Tensor:
        """Return the smallest workspace of at least ``num_bytes``, or a new one."""
        large = [workspace for workspace in self._there() if workspace.numel() >= num_bytes]
        if large:
            return min(large, key=torch.Tensor.numel)
        workspace = self._empty(num_bytes)
        self._kept.append(weakref.ref(workspace))
        return workspace

    def _there(self) -> list[torch.Tensor]:
        there = [(kept, kept()) for kept in self._kept]
        self._kept = [kept for kept, workspace in there if workspace is not None]
        return [workspace for _, workspace in there if workspace is not None]


def is_capturing(device: torch.device) -> bool:
    """Return whether the caller's stream of the device is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
