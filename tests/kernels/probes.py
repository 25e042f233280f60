"""Single steps of the CUDA kernels (csrc/cuda/probe/probe.cu), and inputs that show them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Final

import torch

NUM_WARPS: Final = 16
_U8, _U16, _U32, _F32 = torch.uint8, torch.uint16, torch.uint32, torch.float32


@dataclass(frozen=True)
class Step:
    """``inputs``: [count, ...], of what one thread or warp takes. ``shape``, ``dtype``: of what it
    gives. ``as_floats``: the type in which NaNs are NaNs, whatever their bits.
    """

    inputs: Callable[[], torch.Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    as_floats: torch.dtype | None = None

    def run(self, native: ModuleType, device: torch.device, name: str) -> torch.Tensor:
        inputs = self.inputs().to(device)
        outputs = torch.zeros((len(inputs), *self.shape), dtype=self.dtype, device=device)
        native.probe(
            name=name,
            inputs=inputs.data_ptr(),
            outputs=outputs.data_ptr(),
            count=len(inputs),
            stream=0,
        )
        return outputs.cpu()


def random_bits(*shape: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(7)
    return torch.randint(-(2**31), 2**31, shape, generator=rng).int()


def all_of_16_bits() -> torch.Tensor:
    return torch.arange(2**16).to(torch.uint16)


def all_bfloats() -> torch.Tensor:
    """Every bf16 number, as fp32."""
    return all_of_16_bits().view(torch.bfloat16).float()


def floats() -> torch.Tensor:
    """Of all magnitudes: every bf16 number, its neighbours in fp32, and some between them."""
    numbers = all_bfloats()
    bits = numbers.view(torch.int32)
    return torch.cat((bits, bits + 1, bits - 1, bits + 0x8000, random_bits(4096))).view(_F32)


def all_codes_in_fours() -> torch.Tensor:
    """Every pair of 8-bit numbers, beside a pair that is another one."""
    low = torch.arange(2**16)
    return (low | (low * 40503 + 7) % 2**16 << 16).to(_U32)


def small_exponents() -> torch.Tensor:
    """What exp2 is asked for: up to 0, and far below."""
    return torch.cat((-torch.linspace(0, 150, 20000), torch.tensor([0.0, -torch.inf])))


def matrices() -> torch.Tensor:
    return random_bits(NUM_WARPS, 32, 4).view(_U16).reshape(NUM_WARPS, 32, 8)


def factors(dtype: torch.dtype) -> torch.Tensor:
    """Of each lane: four sums, then four registers of A and two of B; small integers, so that no
    order of additions rounds."""
    rng = torch.Generator().manual_seed(8)
    sums = torch.randint(-99, 99, (NUM_WARPS, 32, 4), generator=rng).float()
    numbers = torch.randint(-16, 17, (NUM_WARPS, 32, 12), generator=rng).to(dtype)
    return torch.cat((sums.view(torch.int32), numbers.view(torch.int32)), dim=-1)


_FOURS: Final = ((4,), _U32)
STEPS: Final = {
    "half_to_float": Step(all_of_16_bits, (), _F32, _F32),
    "bfloat_to_float": Step(all_of_16_bits, (), _F32, _F32),
    "e4m3_to_float": Step(lambda: torch.arange(256).to(_U8), (), _F32, _F32),
    "e5m2_to_float": Step(lambda: torch.arange(256).to(_U8), (), _F32, _F32),
    "float_to_half": Step(floats, (), _U16, torch.float16),
    "float_to_bfloat": Step(floats, (), _U16, torch.bfloat16),
    "float_to_e4m3": Step(floats, (), _U8),
    "float_to_e5m2": Step(floats, (), _U8),
    "pack_half": Step(lambda: floats().view(-1, 2), (), _U32, torch.float16),
    "pack_bfloat": Step(lambda: floats().view(-1, 2), (), _U32, torch.bfloat16),
    "exp2": Step(small_exponents, (), _F32, _F32),
    "e4m3_to_halves": Step(all_codes_in_fours, *_FOURS, torch.float16),
    "e5m2_to_halves": Step(all_codes_in_fours, *_FOURS, torch.float16),
    "e4m3_to_halves_computed": Step(all_codes_in_fours, *_FOURS, torch.float16),
    "e5m2_to_halves_computed": Step(all_codes_in_fours, *_FOURS, torch.float16),
    "load_matrices": Step(matrices, (32, 4), _U32),
    "load_matrices_transposed": Step(matrices, (32, 4), _U32),
    "transpose": Step(lambda: random_bits(NUM_WARPS, 32), (32,), _U32),
    "multiply_add_half": Step(lambda: factors(torch.float16), (32, 4), _F32),
    "multiply_add_bfloat": Step(lambda: factors(torch.bfloat16), (32, 4), _F32),
    "copy_async": Step(lambda: random_bits(NUM_WARPS, 32, 4), (32, 4), _U32),
}


def assert_same_numbers(actual: torch.Tensor, expected: torch.Tensor, step: Step) -> None:
    """The same bits, but that one NaN is as good as another."""
    if step.as_floats is not None:
        actual, expected = actual.view(step.as_floats), expected.view(step.as_floats)
        assert actual.isnan().equal(expected.isnan())
        actual, expected = actual.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0)
    assert actual.view(_U8).equal(expected.view(_U8))
