"""All workspaces together, those of fixed steps and those of calls, stay within the memory that a
pool of measured size leaves free.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from backends import DeviceBackend
from kernel_cases import Case, assert_same_bits, build

from data_plane.kernels.arguments import AttentionArguments, HostLengths
from data_plane.kernels.backends.cuda import CudaKernels, StepMemory
from kvplane.errors import InvalidRequestError

BFLOAT = torch.bfloat16
MAX_BYTES = 64_000
LENS = ((1, 300),) * 6


class Counted(CudaKernels):
    """Counts what it allocates for plans and workspaces."""

    def __init__(self, device: DeviceBackend, max_workspace_bytes: int = MAX_BYTES) -> None:
        self.peak_bytes = 0
        self._made: list[weakref.ref[torch.Tensor]] = []
        super().__init__(
            device.native,
            device.torch_device,
            split_tokens=64,
            max_workspace_bytes=max_workspace_bytes,
        )

    def empty(self, num_bytes: int) -> torch.Tensor:
        assert num_bytes <= self.scratch_bytes
        made = super().empty(num_bytes)
        self._made.append(weakref.ref(made))
        there = (tensor() for tensor in self._made)
        total = sum(tensor.numel() for tensor in there if tensor is not None)
        self.peak_bytes = max(self.peak_bytes, total)
        return made


def test_steps_and_calls_together_take_what_a_pool_leaves_free(device: DeviceBackend) -> None:
    kernels = Counted(device)
    batches = [
        build(Case(lens=LENS, heads=heads, head_size=size, dtype=BFLOAT))
        for heads, size in (((4, 2), 32), ((8, 2), 32), ((4, 2), 64), ((8, 2), 64))
    ]
    expected = [batch.attend()[0] for batch in batches]
    plan_bytes = 0
    steps: list[StepMemory] = []
    for _session in range(3):
        for batch in batches:  # As the layer groups of a model have memories of their own.
            memory = StepMemory(kernels)
            memory.begin()
            # Without room its kernels report a fault, which nobody asks for here.
            memory.attend(device._all_there(batch.to_attend()), None)
            steps.append(memory)
            plan_bytes += kernels.plan_bytes(batch.to_attend())
    assert kernels.peak_bytes <= MAX_BYTES // 2 + plan_bytes
    for batch, right in zip(batches, expected, strict=True):
        arguments = device._all_there(batch.with_lengths())
        assert_same_bits(kernels.paged_attention(arguments).cpu(), right)
    assert kernels.peak_bytes <= MAX_BYTES + plan_bytes < kernels.scratch_bytes


def test_a_step_has_the_bits_of_a_call_in_memory_that_it_shares(device: DeviceBackend) -> None:
    kernels = Counted(device, 1 << 20)
    batches = [
        build(Case(lens=LENS, heads=(heads, 2), head_size=32, dtype=BFLOAT)) for heads in (8, 4)
    ]
    steps = [StepMemory(kernels) for _ in batches]
    for _ in range(2):
        for step, batch in zip(steps, batches, strict=True):
            step.begin()
            out = step.attend(device._all_there(batch.to_attend()), None)
            kernels.check_faults()
            assert_same_bits(out.cpu(), batch.attend()[0])
    first, second = (kernels.attention_workspace_bytes(b.to_attend()) for b in batches)
    assert kernels.peak_bytes < first + second


def test_what_a_step_has_no_room_for_is_refused_before_it_runs(device: DeviceBackend) -> None:
    kernels = Counted(device)
    memories = []
    for heads in (4, 8):
        batch = build(Case(lens=LENS, heads=(heads, 2), head_size=32, dtype=BFLOAT))
        memory = StepMemory(kernels)
        memory.begin()
        memory.attend(device._all_there(batch.to_attend()), None)
        memories.append(memory)
    starts = np.arange(7, dtype=np.int64)
    lengths = HostLengths(starts, np.full(6, 300, dtype=np.int64), False)
    memories[0].check_room(lengths)
    with pytest.raises(InvalidRequestError, match="run the plan layer by layer"):
        memories[1].check_room(lengths)
    memories[1].check_room(HostLengths(starts, np.full(6, 70, dtype=np.int64), False))


def test_the_memory_of_steps_that_are_gone_is_there_again(device: DeviceBackend) -> None:
    kernels = Counted(device)
    batch = build(Case(lens=LENS, heads=(4, 2), head_size=32, dtype=BFLOAT))
    arguments = device._all_there(batch.to_attend())
    room, step_room = kernels.room(arguments), kernels.step_room(arguments)
    assert 0 < step_room < room
    memory = StepMemory(kernels)
    memory.begin()
    memory.attend(arguments, None)
    assert kernels.room(arguments) < room
    del memory
    gc.collect()
    assert (kernels.room(arguments), kernels.step_room(arguments)) == (room, step_room)


def test_lengths_that_may_need_too_much_memory_are_refused_before_it_is_taken(
    device: DeviceBackend,
) -> None:
    """64 speculative steps and a prefill, where tables have room for 128k tokens: 4.6 GiB."""
    kernels = Counted(device, 1 << 30)
    num_tokens, num_sequences = 64 * 8 + 2048, 65
    query = torch.empty((num_tokens, 32, 128), dtype=BFLOAT, device=device.torch_device)
    pages = torch.empty((9, 2, 8, 16, 128), dtype=BFLOAT, device=device.torch_device)
    tables = torch.empty((num_sequences, 8192), dtype=torch.int32, device=device.torch_device)
    starts = np.append(np.arange(num_sequences) * 8, num_tokens)
    contexts = np.full(num_sequences, 4096)
    there = [torch.from_numpy(numbers).to(device.torch_device) for numbers in (starts, contexts)]
    arguments = AttentionArguments(query, pages, tables, *there)
    for attend in (kernels.paged_attention, kernels.plan):
        with pytest.raises(InvalidRequestError, match="more than the 1073741824") as caught:
            attend(arguments)
        assert caught.value.field == "lengths"
    assert kernels.peak_bytes == 0
    known = replace(arguments, lengths=HostLengths(starts, contexts, False))
    assert 0 < int(kernels.count_partials(known).sum()) < kernels.room(known)
