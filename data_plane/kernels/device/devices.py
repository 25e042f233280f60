"""Chooses the device that a data plane runs on: one given by name, or the first usable GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from kvplane.errors import InvalidRequestError

AUTO: Final = "auto"
_CUDA: Final = re.compile(r"cuda(?::(0|[1-9]\d*))?")
_OLDEST: Final = (8, 0)

Capability = tuple[int, int]
"""A GPU's compute capability: (9, 0) is sm_90."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs of this machine, and which of torch and the kernels are built for them."""

    has_cuda_kernels: bool
    torch_has_cuda: bool
    gpus: tuple[Capability, ...]
    """The GPUs that both the kernels and torch can use."""


def this_machine() -> Machine:
    """Describe this machine. Needs no driver."""
    import kvplane_kernels  # a model whose pool is elsewhere needs none

    has_kernels = kvplane_kernels.has_cuda_build()
    num_gpus = kvplane_kernels.cuda_device_count() if has_kernels else 0
    machine = machine_of_torch()
    return Machine(has_kernels, machine.torch_has_cuda, machine.gpus[:num_gpus])


def machine_of_torch() -> Machine:
    """Describe this machine to a process that runs no kernels but torch's."""
    torch_has_cuda = torch.version.cuda is not None
    num_gpus = torch.cuda.device_count() if torch_has_cuda and torch.cuda.is_available() else 0
    gpus = tuple(torch.cuda.get_device_capability(i) for i in range(num_gpus))
    return Machine(True, torch_has_cuda, gpus)


def choose_device(name: str, look: Callable[[], Machine]) -> torch.device:
    """Return the device for ``name``: "auto", "cpu", "cuda" (the first GPU) or "cuda:N".

    ``look``: the function ``this_machine``. It is called only where a GPU may be meant, so that a
    slow or broken driver does not affect a pool on the CPU. Raises InvalidRequestError saying what
    is missing.
    """
    if name == "cpu":
        return torch.device("cpu")
    asked = _CUDA.fullmatch(name)
    if asked is None and name != AUTO:
        raise _refused(f'must be "auto", "cpu", "cuda" or "cuda:N", is {name!r}')
    machine = look()
    if asked is None:
        new_enough = (i for i, gpu in enumerate(machine.gpus) if gpu >= _OLDEST)
        index = next(new_enough, None)
        return torch.device("cpu") if index is None else torch.device("cuda", index)
    if not machine.has_cuda_kernels:
        raise _refused(
            "the kernels were built without CUDA: build them with "
            "`KVPLANE_CUDA=ON pip install ./csrc`"
        )
    if not machine.torch_has_cuda:
        raise _refused("torch was built without CUDA: install a build of torch with CUDA")
    index = int(asked[1] or 0)
    if index >= len(machine.gpus):
        raise _refused(f"there is no GPU {index}: this machine has {len(machine.gpus)} to use")
    if machine.gpus[index] < _OLDEST:
        major, minor = machine.gpus[index]
        raise _refused(f"GPU {index} is sm_{major}{minor}: the kernels need sm_80 or later")
    return torch.device("cuda", index)


def _refused(why: str) -> InvalidRequestError:
    return InvalidRequestError(why, field="device")


def with_index(device: torch.device) -> torch.device:
    """Return the device as its tensors name it: "cuda" is "cuda:0"."""
    return torch.device("cuda", 0) if str(device) == "cuda" else device
