"""Which device a data plane runs on: asked for by name, or the first GPU that there is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import kvplane_kernels
import torch

from kvplane.errors import InvalidRequestError

AUTO: Final = "auto"
_CUDA: Final = re.compile(r"cuda(?::(0|[1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class Machine:
    """What running on a GPU takes."""

    has_cuda_kernels: bool
    torch_has_cuda: bool
    num_gpus: int
    """Those that both can use."""


def this_machine() -> Machine:
    """What there is here. Needs no driver."""
    has_kernels = kvplane_kernels.has_cuda_build()
    torch_has_cuda = torch.version.cuda is not None
    num_gpus = 0
    if has_kernels and torch_has_cuda and torch.cuda.is_available():
        num_gpus = min(kvplane_kernels.cuda_device_count(), torch.cuda.device_count())
    return Machine(has_kernels, torch_has_cuda, num_gpus)


def choose_device(name: str, machine: Machine) -> torch.device:
    """The device that ``name`` stands for: "auto", "cpu", "cuda" (the first GPU) or "cuda:N".

    Raises InvalidRequestError that says what is missing.
    """
    if name == AUTO:
        return torch.device("cuda", 0) if machine.num_gpus > 0 else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    asked = _CUDA.fullmatch(name)
    if asked is None:
        raise InvalidRequestError(
            f'must be "auto", "cpu", "cuda" or "cuda:N", is {name!r}', field="device"
        )
    if not machine.has_cuda_kernels:
        raise InvalidRequestError(
            "the kernels were built without CUDA: KVPLANE_CUDA=ON pip install ./csrc builds them",
            field="device",
        )
    if not machine.torch_has_cuda:
        raise InvalidRequestError("torch was built without CUDA", field="device")
    index = int(asked[1] or 0)
    if index >= machine.num_gpus:
        raise InvalidRequestError(
            f"there is no GPU {index}: {machine.num_gpus} can be used here", field="device"
        )
    return torch.device("cuda", index)


def with_index(device: torch.device) -> torch.device:
    """The device as its tensors name it: "cuda" is "cuda:0"."""
    return torch.device("cuda", 0) if str(device) == "cuda" else device
