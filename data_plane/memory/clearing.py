"""Whole blocks set to zero, whatever type of numbers is stored in them."""

from __future__ import annotations

import torch

from data_plane.memory.upload import upload


def clear_blocks(pool: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Zero whole blocks of a contiguous pool, on the caller's stream when it is on a GPU.

    pool: [num_blocks, ...], at least 8 elements in the last dimension. block_ids: int64, CPU.
    """
    words = pool.view(torch.int64).flatten(1)
    if pool.device.type == "cpu":
        # For torch each block would be work for all of its threads.
        words.numpy()[block_ids.numpy()] = 0
    else:
        words.index_fill_(0, upload([block_ids], pool.device)[0], 0)
