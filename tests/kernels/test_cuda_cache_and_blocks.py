"""Caching and copies by the CUDA kernels: the tests of the CPU's, on another backend.

One of them is left out: when two tokens of a call have the same slot, a device may keep either.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import test_block_copies as copies
import test_huge_pools as huge_pools
import test_reshape_and_cache as caching
import torch
from device_backends import DeviceBackend, chosen_backend, in_place_of_the_cpu
from kernel_cases import FLOATS, assert_same_bits

from data_plane.kernels.arguments import WriteArguments
from kvplane.errors import InvalidRequestError

test_tokens_land_in_their_slots = caching.test_tokens_land_in_their_slots
test_conversion_rounds_as_torch_does = caching.test_conversion_rounds_as_torch_does
test_every_number_survives = caching.test_every_number_of_16_bits_survives_the_way_to_fp32
test_nan_stays_nan = caching.test_nan_stays_nan
test_negative_slots_are_skipped = caching.test_negative_slots_are_skipped
test_strided_tensors_are_written = caching.test_strided_tensors_are_read_and_written_in_place
test_no_tokens_write_nothing = caching.test_no_tokens_write_nothing

test_copies_are_done_in_order = copies.test_copies_inside_a_pool_are_done_in_order
test_a_later_pair_reads = copies.test_a_later_pair_reads_what_an_earlier_one_wrote
test_a_block_copied_to_itself_stays = copies.test_a_block_copied_to_itself_stays
test_swaps_move_blocks = copies.test_swaps_move_blocks_between_pools_of_other_sizes
test_a_swap_there_and_back = copies.test_a_swap_there_and_back_gives_the_same_bits
test_gather_and_scatter = copies.test_gather_is_layer_major_and_scatter_its_inverse
test_pools_with_room_between_blocks = copies.test_pools_may_have_room_between_blocks
test_no_pairs_and_no_ids_do_nothing = copies.test_no_pairs_and_no_ids_do_nothing
test_an_empty_pool_takes_no_ids = copies.test_an_empty_pool_takes_no_ids

huge = huge_pools.huge
test_far_blocks_are_attended_to = (
    huge_pools.test_attention_over_far_blocks_gives_the_bits_of_near_ones
)
test_far_blocks_are_copied_and_swapped = huge_pools.test_far_blocks_are_copied_and_swapped


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceBackend]:
    with in_place_of_the_cpu(chosen_backend()) as backend:
        for module in (caching, copies, huge_pools):
            monkeypatch.setattr(module, "kernels", backend)
        yield backend


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_many_scattered_copies_take_many_launches(
    backend: DeviceBackend, dtype: torch.dtype
) -> None:
    pool = torch.randn(700, 1, 2, 1, 3, 8).to(dtype)
    ids = torch.randperm(700)
    pairs = torch.stack((ids[:300], ids[300:600]), dim=1)
    expected = pool.clone()
    expected[pairs[:, 1]] = pool[pairs[:, 0]]
    backend.copy_blocks(pool, pairs)
    assert_same_bits(pool, expected)
    blocks = backend.gather_blocks(pool, ids)
    assert_same_bits(blocks[0], pool[ids, 0])
    other = torch.zeros_like(pool)
    backend.scatter_blocks(other, ids, blocks)
    assert_same_bits(other, pool)


def test_of_equal_ids_the_last_block_stays(backend: DeviceBackend) -> None:
    pool = torch.zeros(3, 2, 2, 1, 4, 8)
    blocks = torch.randn(2, 3, 2, 1, 4, 8)
    backend.scatter_blocks(pool, torch.tensor([1, 1, 1]), blocks)
    assert_same_bits(pool[1], blocks[:, 2])


def test_runs_of_neighbours_are_swapped_as_singles_are(backend: DeviceBackend) -> None:
    source, destination = torch.randn(2, 12, 1, 2, 1, 4, 8).unbind()
    pairs = torch.tensor([[0, 4], [1, 5], [2, 6], [9, 7], [10, 8], [11, 0], [5, 1]])
    expected = destination.clone()
    expected[pairs[:, 1]] = source[pairs[:, 0]]
    backend.swap_blocks(source, destination, pairs)
    assert_same_bits(destination, expected)


@pytest.mark.parametrize("pairs", ([[0, 1], [5, 0]], [[0, 1], [0, -1]]), ids=str)
def test_copies_refuse_bad_pairs_and_copy_nothing(
    backend: DeviceBackend, pairs: list[list[int]]
) -> None:
    pool, other = torch.randn(2, 5, 3, 2, 2, 4, 8).unbind()
    before, other_before = pool.clone(), other.clone()
    for run in (
        lambda: backend.copy_blocks(pool, torch.tensor(pairs)),
        lambda: backend.swap_blocks(pool, other, torch.tensor(pairs)),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            run()
        assert caught.value.field is not None and caught.value.field.startswith("pairs[1, ")
    assert_same_bits(pool, before)
    assert_same_bits(other, other_before)


def test_slots_outside_the_pages_are_not_written_and_told(backend: DeviceBackend) -> None:
    pages = torch.ones(2, 2, 1, 4, 8)
    key = torch.zeros(2, 1, 8)
    for slot in (8, 2**62):
        with pytest.raises(InvalidRequestError) as caught:
            backend.reshape_and_cache(WriteArguments(key, key, pages, torch.tensor([-1, slot])))
        assert caught.value.field == "slots"
    assert (pages == 1).all()
