"""Copies small tensors to a device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT_BYTES: Final = 16


def upload(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy contiguous CPU tensors to ``device``, by one copy on the caller's stream.

    The copy is from pinned memory: any other would wait for all work queued on the stream before.
    """
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    packed = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for offset, tensor in zip(offsets, tensors, strict=True):
        # By numpy: torch would wake its threads to copy a large batch's block tables.
        _bytes(packed)[offset : offset + tensor.nbytes] = _bytes(tensor)
    there = packed.to(device, non_blocking=True, copy=True)
    return [_part(there, offset, t) for offset, t in zip(offsets, tensors, strict=True)]


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return a view of a contiguous CPU tensor's memory."""
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    there: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return there


def _part(packed: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return packed[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
