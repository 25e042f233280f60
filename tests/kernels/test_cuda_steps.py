"""Each single step of the CUDA kernels does what the instruction's definition says.

On the emulator these are its twins, on a GPU the instructions.
"""

from __future__ import annotations

import oracle
import pytest
import torch
from backends import DeviceBackend
from probes import STEPS, all_codes_in_fours, assert_same_numbers, factors, floats, matrices

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TYPES = {"half": torch.float16, "bfloat": torch.bfloat16, "e4m3": E4M3, "e5m2": E5M2}
LANES = torch.arange(32)
G, T = LANES // 4, LANES % 4


def check(device: DeviceBackend, name: str, expected: torch.Tensor) -> None:
    step = STEPS[name]
    actual = step.run(device.native, device.torch_device, name)
    assert_same_numbers(actual, expected.view(step.dtype).reshape(actual.shape), step)


@pytest.mark.parametrize("name", TYPES)
def test_every_number_becomes_the_fp32_number_that_it_is(device: DeviceBackend, name: str) -> None:
    codes = STEPS[f"{name}_to_float"].inputs()
    check(device, f"{name}_to_float", codes.view(TYPES[name]).float())


@pytest.mark.parametrize("name", TYPES)
def test_numbers_of_all_magnitudes_round_as_torch_rounds(device: DeviceBackend, name: str) -> None:
    numbers = floats()
    rounded = oracle.rounded(numbers, None, TYPES[name])
    check(device, f"float_to_{name}", rounded)
    if name in ("half", "bfloat"):
        check(device, f"pack_{name}", rounded)


@pytest.mark.parametrize("way", ("to_halves", "to_halves_computed"))
@pytest.mark.parametrize("name", ("e4m3", "e5m2"))
def test_pairs_of_8_bit_numbers_become_pairs_of_fp16(
    device: DeviceBackend, name: str, way: str
) -> None:
    numbers = all_codes_in_fours().view(torch.uint8).view(-1, 4).view(TYPES[name]).half()
    check(device, f"{name}_{way}", numbers[:, [0, 1, 2, 3, 0, 2, 1, 3]].contiguous())


def test_exp2_is_exact_to_two_units_in_the_last_place(device: DeviceBackend) -> None:
    step = STEPS["exp2"]
    x = step.inputs()
    exact = x.double().exp2()
    error = (step.run(device.native, device.torch_device, "exp2").double() - exact).abs()
    # Subnormal results may be flushed to zero.
    assert (error <= 2 * 2**-23 * exact + 2**-126).all()


def test_matrices_are_read_by_rows_and_by_columns(device: DeviceBackend) -> None:
    by_rows = matrices().view(torch.int16).view(-1, 4, 8, 8)  # warp, matrix, row, column
    columns = torch.stack((2 * T, 2 * T + 1))
    for name, read in (("", by_rows), ("_transposed", by_rows.mT)):
        expected = read[:, :, G, columns]  # warp, matrix, half, lane
        check(device, f"load_matrices{name}", expected.permute(0, 3, 1, 2).contiguous())


def test_a_matrix_is_transposed(device: DeviceBackend) -> None:
    halves = STEPS["transpose"].inputs().view(torch.int16).view(-1, 32, 2)
    matrix = torch.zeros(len(halves), 8, 8, dtype=torch.int16)
    matrix[:, G, 2 * T], matrix[:, G, 2 * T + 1] = halves[:, :, 0], halves[:, :, 1]
    expected = torch.stack((matrix.mT[:, G, 2 * T], matrix.mT[:, G, 2 * T + 1]), dim=-1)
    check(device, "transpose", expected)


@pytest.mark.parametrize("name", ("half", "bfloat"))
def test_products_of_matrices_are_added(device: DeviceBackend, name: str) -> None:
    given = factors(TYPES[name])
    sums = given[:, :, :4].contiguous().view(torch.float32)
    numbers = given[:, :, 4:].contiguous().view(TYPES[name]).float().view(-1, 32, 6, 2)
    a = torch.zeros(len(given), 16, 16)
    b, c = torch.zeros(2, len(given), 16, 8)
    for i in range(4):
        row, column = G + 8 * (i % 2), 2 * T + 8 * (i // 2)
        a[:, row, column], a[:, row, column + 1] = numbers[:, :, i, 0], numbers[:, :, i, 1]
        c[:, G + 8 * (i // 2), 2 * T + i % 2] = sums[:, :, i]
    for i in range(2):
        b[:, 2 * T + 8 * i, G] = numbers[:, :, 4 + i, 0]
        b[:, 2 * T + 8 * i + 1, G] = numbers[:, :, 4 + i, 1]
    d = a @ b + c
    expected = [d[:, G + 8 * (i // 2), 2 * T + i % 2] for i in range(4)]
    check(device, f"multiply_add_{name}", torch.stack(expected, dim=-1))


def test_copies_that_are_not_wanted_are_zeros(device: DeviceBackend) -> None:
    expected = STEPS["copy_async"].inputs()
    expected[:, 1::2] = 0
    check(device, "copy_async", expected)


def test_a_step_of_another_name_is_refused(device: DeviceBackend) -> None:
    with pytest.raises(IndexError, match="name must be that of a step, is half_to_double"):
        device.native.probe(name="half_to_double", inputs=0, outputs=0, count=0, stream=0)
