"""Checks of what callers hand to the executor. Each failure names the field."""

from __future__ import annotations

import torch

from kvplane.errors import InvalidRequestError


def require(ok: bool, wanted: str, field: str) -> None:
    """Raise InvalidRequestError naming ``field`` unless ``ok``."""
    if not ok:
        raise InvalidRequestError(wanted, field=field)


def check_tensor(
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    field: str,
) -> None:
    """Raise InvalidRequestError naming ``field`` unless the tensor is as the kernels take it."""
    require(tensor.dtype == dtype, f"is {tensor.dtype}, not {dtype}", field)
    require(tuple(tensor.shape) == shape, f"is {list(tensor.shape)}, not {list(shape)}", field)
    require(tensor.device == device, f"is on {tensor.device}, not on {device}", field)
    dense = tensor.numel() == 0 or tensor.stride(-1) == 1
    require(dense, "must have a last stride of 1", field)
