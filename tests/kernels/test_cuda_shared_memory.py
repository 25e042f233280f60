"""Memory of a GPU that two processes have: csrc/cuda/device/shared_memory.cu."""

from __future__ import annotations

import os
import re
import select
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from backends import chosen_backend

from tests.helpers.data.gpu_peer import MemoryUser, OtherProcess, num_gpu_maps

NUM_BYTES = 3 << 20
BLOCK_BYTES = 2 << 20


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return chosen_backend().native


def is_emulated(native: ModuleType) -> bool:
    return hasattr(native, "num_early_frees")


def bytes_of(memory: Any) -> torch.Tensor:
    whole: torch.Tensor = torch.utils.dlpack.from_dlpack(memory.dlpack())
    return whole


@pytest.fixture(scope="module")
def other() -> Iterator[OtherProcess]:
    engine = OtherProcess(MemoryUser)
    yield engine
    engine.kill()


@pytest.fixture(autouse=True)
def nothing_is_freed_early(native: ModuleType) -> Iterator[None]:
    before = native.num_early_frees() if is_emulated(native) else 0
    yield
    assert not is_emulated(native) or native.num_early_frees() == before


def test_bytes_that_one_process_writes_the_other_reads(
    native: ModuleType, other: OtherProcess
) -> None:
    memory = native.allocate_shared(device=0, num_bytes=NUM_BYTES)
    assert len(memory.handle()) == 64
    whole = bytes_of(memory)
    assert (whole.dtype, whole.shape) == (torch.uint8, (NUM_BYTES,))
    whole[:16] = torch.arange(16)
    if whole.is_cuda:
        torch.cuda.synchronize()
    assert other.call("open_memory", memory.handle(), NUM_BYTES) == bytes(range(16))
    assert whole[-1] == 7
    other.call("let_go")


def test_new_memory_holds_nothing_of_anybody(native: ModuleType, other: OtherProcess) -> None:
    for _ in range(2):
        memory = native.allocate_shared(device=0, num_bytes=NUM_BYTES)
        assert not bytes_of(memory).any()
        bytes_of(memory).fill_(1)


@pytest.mark.parametrize("num_bytes", [1, 64, BLOCK_BYTES - 1, BLOCK_BYTES + 1])
def test_a_handle_opens_nothing_but_its_own_memory(
    native: ModuleType, other: OtherProcess, num_bytes: int
) -> None:
    """Smaller allocations share a block with others, all of which a handle opens."""
    memory = native.allocate_shared(device=0, num_bytes=num_bytes)
    whole = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
    other.call("open_memory", memory.handle(), whole)
    with pytest.raises(ValueError, match=f"has {whole} bytes, not {whole + 1}"):
        other.call("open_memory", memory.handle(), whole + 1)
    other.call("let_go")
    assert other.call("num_maps") == 0


@pytest.mark.parametrize("handle", [b"", bytes(63), bytes(65), b"x" * 1000])
def test_a_handle_of_another_length_is_refused(
    native: ModuleType, other: OtherProcess, handle: bytes
) -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        other.call("open_memory", handle, NUM_BYTES)


def test_what_is_no_handle_and_what_was_freed_is_refused(
    native: ModuleType, other: OtherProcess
) -> None:
    memory = native.allocate_shared(device=0, num_bytes=NUM_BYTES)
    handle = memory.handle()
    del memory
    for bad in (bytes(64), b"x" * 64, handle):
        with pytest.raises(RuntimeError, match="cudaIpcOpenMemHandle"):
            other.call("open_memory", bad, NUM_BYTES)
    assert other.call("num_maps") == 0


def test_a_process_cannot_open_its_own(native: ModuleType, other: OtherProcess) -> None:
    memory = native.allocate_shared(device=0, num_bytes=NUM_BYTES)
    with pytest.raises(RuntimeError, match="cudaIpcOpenMemHandle"):
        native.open_shared(device=0, handle=memory.handle(), num_bytes=NUM_BYTES, file=-1)


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_no_memory_and_more_than_there_is_are_refused(native: ModuleType, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="above 0"):
        native.allocate_shared(device=0, num_bytes=num_bytes)
    with pytest.raises(ValueError, match="above 0"):
        native.open_shared(device=0, handle=bytes(64), num_bytes=num_bytes, file=-1)
    with pytest.raises(RuntimeError, match="cudaMalloc"):
        native.allocate_shared(device=0, num_bytes=1 << 45)


def test_memory_lives_as_long_as_its_tensors(native: ModuleType) -> None:
    memory = native.allocate_shared(device=0, num_bytes=NUM_BYTES)
    capsule = memory.dlpack()
    part = bytes_of(memory)[100:200]
    del memory, capsule  # which nobody took
    part.fill_(3)
    assert part.sum() == 300
    num_maps = num_gpu_maps()
    del part
    assert not is_emulated(native) or num_gpu_maps() == num_maps - 1


def test_the_file_is_closed_after_the_memory(native: ModuleType, other: OtherProcess) -> None:
    """The other process tells by it that it is done."""
    own, given = os.pipe()
    poll = select.poll()
    poll.register(own, 0)
    memory = native.allocate_shared(device=0, num_bytes=NUM_BYTES)
    there = f"/proc/{os.getpid()}/fd/{given}"
    other.call("open_memory_with_file", memory.handle(), NUM_BYTES, there)
    os.close(given)
    assert not poll.poll(0)
    other.call("let_go")
    assert poll.poll(10_000) and other.call("num_maps") == 0
    os.close(own)


def test_uuids_are_as_tools_of_the_driver_write_them(native: ModuleType) -> None:
    uuid = native.device_uuid(0)
    assert re.fullmatch("GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid)
    assert not is_emulated(native) or uuid == "GPU-e0e1e2e3-e4e5-e6e7-e8e9-eaebecedeeef"
    with pytest.raises(RuntimeError, match="cudaGetDeviceProperties"):
        native.device_uuid(1000)
