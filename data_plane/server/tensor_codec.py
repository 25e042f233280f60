"""Converts tensors from messages and back. On the CPU each direction copies the data once; a GPU
needs another copy.
"""

from __future__ import annotations

import torch

from data_plane.kernels.device.cuda_streams import device_errors
from data_plane.memory.pool import TORCH_DTYPES
from data_plane.memory.upload import upload
from kvplane.errors import InvalidRequestError
from kvplane.tensor import Tensor
from kvplane.wire.dtypes import dtype_to_wire
from kvplane.wire.v1 import types_pb2 as pb

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def tensor_from_message(message: pb.Tensor, device: torch.device, *, field: str) -> torch.Tensor:
    """Copy a message's tensor into a contiguous tensor on ``device``.

    Raises InvalidRequestError naming the part of ``field`` that is malformed, or its ``memory`` for
    shared memory, and InternalError when the device failed.
    """
    tensor = Tensor.from_proto(message, field=field)
    dtype = TORCH_DTYPES[tensor.dtype]
    if tensor.num_elements == 0:
        if any(extent >= 2**31 for extent in tensor.shape):
            raise InvalidRequestError(
                f"must have no extent above {2**31 - 1}, is {list(tensor.shape)}",
                field=f"{field}.shape",
            )
        with device_errors():
            return torch.empty(tensor.shape, dtype=dtype, device=device)
    here = torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(tensor.shape)
    if device.type == "cpu":
        return here
    with device_errors():
        return upload([here], device)[0]


def tensor_to_message(tensor: torch.Tensor) -> pb.Tensor:
    """Copy a tensor to a message, once it is computed. Raises InternalError if the device
    failed.
    """
    message = without_data(tensor)
    message.data = bytes(data_of(tensor))
    return message


def without_data(tensor: torch.Tensor) -> pb.Tensor:
    """Return a message that says the tensor's type and shape."""
    return pb.Tensor(dtype=dtype_to_wire(_NAMES[tensor.dtype]), shape=tensor.shape)


def data_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's data, once it is computed: its own memory on the CPU, a copy of a GPU's.
    Raises InternalError if the device failed.
    """
    with device_errors():
        dense = tensor.detach().cpu().contiguous()
    return dense.view(-1).view(torch.uint8).numpy().data
