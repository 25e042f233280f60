"""Devices whose blocks have less shared memory than an H100's 227 KiB: an A100's (sm_80) have 163,
those of sm_86, sm_89 and sm_120 have 99.

The emulator refuses a launch that asks for more than the block it is told to have.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from backends import DeviceBackend, used
from kernel_cases import (
    FP8,
    Case,
    assert_as_exact_as_torch,
    assert_same_bits,
    build,
    with_pages,
)
from launched import launched_kernels
from test_oracle_bits import assert_same, rows_of

E4M3, E5M2 = FP8
HALF, BFLOAT = torch.float16, torch.bfloat16
SMALL_BYTES, A100_BYTES, LARGE_BYTES = 99 << 10, 163 << 10, 227 << 10
LENS = ((1, 150), (40, 45), (3, 70))


@pytest.fixture(autouse=True)
def backend() -> Iterator[DeviceBackend]:
    with used("emulated") as backend:
        yield backend
        backend.native.set_shared_bytes_of_block(LARGE_BYTES)


@pytest.mark.parametrize(
    ("dtype", "pages_dtype", "head_size", "group"),
    (
        (BFLOAT, BFLOAT, 128, 2),
        (torch.float32, torch.float32, 512, 2),
        (BFLOAT, E4M3, 192, 16),
        *(
            pytest.param(*kind, marks=pytest.mark.nightly)
            for kind in (
                (BFLOAT, BFLOAT, 64, 1),
                (HALF, HALF, 128, 16),
                (BFLOAT, BFLOAT, 192, 2),
                (BFLOAT, BFLOAT, 512, 2),
                (HALF, HALF, 256, 2),
                (HALF, E5M2, 256, 2),
            )
        ),
    ),
    ids=str,
)
def test_attention_is_right_where_a_block_has_99_kib(
    backend: DeviceBackend,
    dtype: torch.dtype,
    pages_dtype: torch.dtype,
    head_size: int,
    group: int,
) -> None:
    backend.native.set_shared_bytes_of_block(SMALL_BYTES)
    case = Case(lens=LENS, heads=(group, 1), head_size=head_size, dtype=dtype)
    assert_as_exact_as_torch(with_pages(case, pages_dtype))


@pytest.mark.parametrize(
    ("pages_dtype", "head_size", "group"),
    ((BFLOAT, 128, 1), (BFLOAT, 128, 16), (E4M3, 256, 1), (E5M2, 128, 1)),
    ids=str,
)
def test_a_shorter_ring_of_tiles_gives_the_same_bits(
    backend: DeviceBackend, pages_dtype: torch.dtype, head_size: int, group: int
) -> None:
    case = Case(lens=LENS, heads=(group, 1), head_size=head_size, dtype=BFLOAT)
    batch = build(with_pages(case, pages_dtype))
    expected, expected_lse = batch.attend()
    for shared_bytes in (A100_BYTES, SMALL_BYTES):
        backend.native.set_shared_bytes_of_block(shared_bytes)
        out, lse = batch.attend()
        assert_same_bits(out, expected)
        assert_same_bits(lse, expected_lse)


# Tiles in a ring on a device with 227, 163 and 99 KiB; 0: attend_fma takes the call.
@pytest.mark.parametrize(
    ("pages_dtype", "head_size", "stages"),
    (
        (BFLOAT, 64, (4, 4, 4)),
        (BFLOAT, 128, (3, 2, 2)),  # with two, a second block fits on an A100
        (BFLOAT, 192, (2, 3, 0)),
        (BFLOAT, 256, (3, 2, 0)),  # three do not fit on an A100
        (BFLOAT, 512, (3, 2, 0)),
        (E4M3, 128, (4, 4, 4)),
        (E4M3, 256, (3, 2, 2)),
        (E5M2, 512, (3, 2, 0)),
    ),
    ids=str,
)
def test_a_ring_has_the_tiles_that_a_device_has_room_for(
    backend: DeviceBackend, pages_dtype: torch.dtype, head_size: int, stages: tuple[int, ...]
) -> None:
    case = Case(lens=((1, 150),), heads=(2, 1), head_size=head_size, dtype=BFLOAT)
    batch = build(with_pages(case, pages_dtype))
    found = []
    for shared_bytes in (LARGE_BYTES, A100_BYTES, SMALL_BYTES):
        backend.native.set_shared_bytes_of_block(shared_bytes)
        launched_kernels(backend.native)
        batch.attend()
        short = [k for k in launched_kernels(backend.native) if k.kernel == "attend_short"]
        found.append(int(short[0].arguments[3]) if short else 0)
    assert tuple(found) == stages


def test_a_row_has_the_bits_of_its_sequence_alone_on_a_small_device(
    backend: DeviceBackend,
) -> None:
    backend.native.set_shared_bytes_of_block(SMALL_BYTES)
    batch = build(Case(lens=LENS, heads=(2, 1), head_size=256, dtype=BFLOAT))
    answer = batch.attend()
    for s in range(len(LENS)):
        assert_same(batch.only([s]).attend(), rows_of(batch, answer, [s]))
