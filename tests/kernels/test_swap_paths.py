"""Swaps by the copy engine and by the kernel that reaches pinned memory give the same blocks.

The emulator says how many kernels were launched, and can be told that host memory is not mapped.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from emulated_build import emulated_module

from data_plane.kernels.backends.cuda import CudaKernels

# kMinBytesOfEngine and kMinBytesOfBatch of csrc/cuda/cache/blocks.cu
ENGINE_BYTES, BATCH_BYTES = 1 << 20, 32 << 10
MAPPED = (True, False)
# CUDA 12.1 brought large parameters of launches, CUDA 12.8 copies in batches.
NEW_DRIVER, DRIVER_WITHOUT_BATCHES, OLD_DRIVER = 13000, 12070, 12000


@pytest.fixture
def native() -> Iterator[ModuleType]:
    module = emulated_module()
    module.set_seed(0)
    yield module
    module.set_host_memory_is_mapped(True)
    module.set_driver_version(NEW_DRIVER)


class Pool:
    """Blocks of any number of bytes, with room between them and before the first."""

    def __init__(self, num_blocks: int, block_bytes: int, room: int = 0, shift: int = 0) -> None:
        self.stride = block_bytes + room
        self.whole = torch.randint(256, (shift + num_blocks * self.stride,), dtype=torch.uint8)
        self.blocks = self.whole[shift:].view(num_blocks, self.stride)
        self.block_bytes = block_bytes

    def copy(self, start: int, num_blocks: int) -> torch.Tensor:
        return self.blocks[start : start + num_blocks, : self.block_bytes].clone()


def swap(native: ModuleType, source: Pool, destination: Pool, pairs: torch.Tensor) -> int:
    """Returns how many kernels it took."""
    before = native.num_launches()
    native.swap_blocks(
        source=source.blocks.data_ptr(),
        destination=destination.blocks.data_ptr(),
        pairs=pairs.data_ptr(),
        num_pairs=len(pairs),
        source_num_blocks=len(source.blocks),
        destination_num_blocks=len(destination.blocks),
        source_block_bytes=source.stride,
        destination_block_bytes=destination.stride,
        copy_bytes=source.block_bytes,
        stream=0,
    )
    return int(native.num_launches() - before)


def swap_one_by_one(source: Pool, destination: Pool, pairs: torch.Tensor) -> torch.Tensor:
    """What the destination's memory must hold afterwards, done on a copy."""
    before = destination.whole.clone()
    for from_block, to_block in pairs.tolist():
        destination.blocks[to_block, : destination.block_bytes] = source.copy(from_block, 1)[0]
    expected = destination.whole.clone()
    destination.whole.copy_(before)
    return expected


def random_pairs(rng: random.Random, num_from: int, num_to: int) -> torch.Tensor:
    """Runs of neighbours among scattered pairs; blocks are read and written more than once."""
    pairs: list[tuple[int, int]] = []
    for _ in range(rng.randrange(1, 9)):
        length = rng.choice((1, 1, 2, 5))
        start, to = rng.randrange(num_from - length), rng.randrange(num_to - length)
        pairs += [(start + i, to + i) for i in range(length)]
    rng.shuffle(pairs)
    return torch.tensor(pairs)


@pytest.mark.parametrize("driver", (NEW_DRIVER, DRIVER_WITHOUT_BATCHES))
@pytest.mark.parametrize("mapped", MAPPED)
@pytest.mark.parametrize("seed", range(24))
def test_random_swaps_give_what_one_by_one_gives(
    native: ModuleType, seed: int, mapped: bool, driver: int
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    native.set_host_memory_is_mapped(mapped)
    native.set_driver_version(driver)
    # 40 KiB: without batches a run of four or more is the copy engine's, the others the kernel's.
    block_bytes = rng.choice((1, 7, 8, 24, 16, 256, 4096 + 8, 40 << 10))
    num_from, num_to = rng.randrange(6, 30), rng.randrange(6, 30)
    source = Pool(num_from, block_bytes, rng.choice((0, 0, 8, 3)), rng.choice((0, 0, 8, 1)))
    destination = Pool(num_to, block_bytes, rng.choice((0, 0, 16)), rng.choice((0, 0, 8)))
    pairs = random_pairs(rng, num_from, num_to)
    expected = swap_one_by_one(source, destination, pairs)
    source_before = source.whole.clone()
    num_launches = swap(native, source, destination, pairs)
    assert torch.equal(destination.whole, expected)
    assert torch.equal(source.whole, source_before)
    if not mapped:
        assert num_launches == 0
    elif block_bytes < BATCH_BYTES // len(pairs):
        assert num_launches == 1


@pytest.mark.parametrize(
    ("driver", "least_bytes"), ((NEW_DRIVER, BATCH_BYTES), (DRIVER_WITHOUT_BATCHES, ENGINE_BYTES))
)
def test_the_path_depends_on_the_bytes_of_a_run(
    native: ModuleType, driver: int, least_bytes: int
) -> None:
    native.set_driver_version(driver)
    block_bytes = least_bytes // 4
    scattered = torch.tensor([[0, 1], [2, 3], [4, 5]])
    for pairs, num_kernels in (
        (scattered, 1),
        (torch.tensor([[0, 1], [1, 2], [2, 3]]), 1),
        (torch.tensor([[3, 4], [1, 2], [0, 1], [2, 3]]), 0),  # Neighbours, once put in order.
        (torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4], [9, 9]]), 1),
    ):
        source, destination = Pool(10, block_bytes), Pool(10, block_bytes)
        expected = swap_one_by_one(source, destination, pairs)
        assert swap(native, source, destination, pairs) == num_kernels
        assert torch.equal(destination.whole, expected)
    one_large = Pool(10, least_bytes), Pool(10, least_bytes)
    assert swap(native, *one_large, scattered) == 0
    # With room between the blocks a run is not contiguous.
    apart = Pool(10, block_bytes, 16), Pool(10, block_bytes)
    assert swap(native, *apart, torch.tensor([[0, 0], [1, 1], [2, 2], [3, 3]])) == 1


@pytest.mark.parametrize(
    ("driver", "mapped", "num_batches"),
    ((NEW_DRIVER, True, 1), (NEW_DRIVER, False, 0), (DRIVER_WITHOUT_BATCHES, True, 0)),
)
@pytest.mark.parametrize("room", (0, 16))
def test_scattered_blocks_are_one_batch_where_the_driver_takes_it(
    native: ModuleType, room: int, driver: int, mapped: bool, num_batches: int
) -> None:
    """Of pinned memory only; with and without room between the blocks."""
    native.set_driver_version(driver)
    native.set_host_memory_is_mapped(mapped)
    source, destination = Pool(10, ENGINE_BYTES, room), Pool(10, ENGINE_BYTES)
    pairs = torch.tensor([[7, 1], [0, 4], [1, 5], [9, 8]])
    expected = swap_one_by_one(source, destination, pairs)
    before = native.num_batch_copies()
    assert swap(native, source, destination, pairs) == 0
    assert torch.equal(destination.whole, expected)
    assert native.num_batch_copies() - before == num_batches


@pytest.mark.parametrize(
    ("driver", "num_pairs", "num_launches"),
    (
        *((NEW_DRIVER, *row) for row in ((224, 1), (225, 1), (2016, 1), (2240, 2), (2241, 2))),
        *((OLD_DRIVER, *row) for row in ((224, 1), (225, 2), (2241, 11))),  # smaller launches
    ),
)
def test_many_small_blocks_take_few_launches(
    native: ModuleType, driver: int, num_pairs: int, num_launches: int
) -> None:
    native.set_driver_version(driver)
    source, destination = Pool(num_pairs, 48), Pool(num_pairs, 48)
    pairs = torch.stack((torch.randperm(num_pairs), torch.randperm(num_pairs)), dim=1)
    assert swap(native, source, destination, pairs) == num_launches
    assert torch.equal(destination.blocks[pairs[:, 1]], source.blocks[pairs[:, 0]])


def test_many_pages_are_gathered_and_scattered(native: ModuleType) -> None:
    kernels = CudaKernels(native, torch.device("cpu"))
    pool = torch.randn(2300, 1, 2, 1, 1, 8)
    ids = torch.randperm(2300)
    before = native.num_launches()
    blocks = kernels.gather_blocks(pool, ids)
    assert native.num_launches() == before + 2
    assert torch.equal(blocks, pool[ids].transpose(0, 1))
    other = torch.zeros_like(pool)
    kernels.scatter_blocks(other, ids, blocks)
    assert torch.equal(other, pool)


@pytest.mark.parametrize("mapped", MAPPED)
def test_the_last_of_several_pairs_into_a_block_stays(native: ModuleType, mapped: bool) -> None:
    native.set_host_memory_is_mapped(mapped)
    source, destination = Pool(4, 64), Pool(4, 64)
    # Only the last pair is copied: others would take a second launch, or leave the order open.
    pairs = torch.tensor([[0, 2], [3, 2]] * 1200 + [[1, 2], [0, 1]])
    assert swap(native, source, destination, pairs) == int(mapped)
    assert torch.equal(destination.blocks[2], source.blocks[1])
    assert torch.equal(destination.blocks[1], source.blocks[0])


@pytest.mark.parametrize("mapped", MAPPED)
def test_inside_one_pool_a_later_pair_reads_what_an_earlier_one_wrote(
    native: ModuleType, mapped: bool
) -> None:
    native.set_host_memory_is_mapped(mapped)
    pool = Pool(5, 64)
    first = pool.copy(0, 1)[0]
    assert swap(native, pool, pool, torch.tensor([[0, 1], [1, 2], [2, 4]])) == 0
    assert torch.equal(pool.blocks[4], first)


def test_a_block_is_not_copied_onto_itself(native: ModuleType) -> None:
    """CUDA does not define what a copy engine does then, and the emulated one refuses."""
    pool = Pool(5, ENGINE_BYTES)
    before = pool.copy(0, 5)
    assert swap(native, pool, pool, torch.tensor([[1, 1], [0, 2], [2, 2]])) == 0
    assert torch.equal(pool.copy(0, 5), before[[0, 1, 0, 3, 4]])


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.float8_e5m2), ids=str)
def test_fp8_blocks_with_room_of_8_bytes_between_them_are_copied(
    native: ModuleType, dtype: torch.dtype
) -> None:
    shape = (2, 2, 1, 3, 8)  # 96 bytes; the next block begins 104 bytes on
    room = torch.randint(120, (7, 104), dtype=torch.uint8)
    pool = room[:, :96].view(dtype).unflatten(1, shape)
    kernels = CudaKernels(native, torch.device("cpu"))
    expected = room.clone()
    expected[[5, 6], :96] = room[[1, 2], :96]
    kernels.copy_blocks(pool, torch.tensor([[1, 5], [2, 6]]))
    assert torch.equal(room, expected)
    ids = torch.tensor([6, 0, 3])
    blocks = kernels.gather_blocks(pool, ids)
    other = torch.zeros_like(room)
    kernels.scatter_blocks(other[:, :96].view(dtype).unflatten(1, shape), ids, blocks)
    assert torch.equal(other[ids, :96], room[ids, :96])
    assert not other[[1, 2, 4, 5]].any() and not other[:, 96:].any()
