"""Opaque pages: blocks of bytes that only the caller understands.

    bytes 0 to 3     int32: how many leading bytes of the page hold something
    bytes 4 to 7     int32: the length of the key
    bytes 8 to 71    the caller's own key of the block, such as an engine's hash; then zeros
    bytes 128 on     the page

All of this is the block's memory, so it goes where the block goes: to copies, the host tier, files
and other data planes, under their checksums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from data_plane.kernels.arguments import check_tensor, require
from kvplane.layout import OPAQUE_HEADER_BYTES

MAX_KEY_BYTES: Final = 64
_KEY_AT: Final = 8


def pack(
    pages: torch.Tensor, page_bytes: int, num_bytes: Sequence[int], keys: Sequence[bytes]
) -> torch.Tensor:
    """Return blocks as they are stored, uint8 [1, num_blocks, header and page], of ``pages`` uint8
    [1, num_blocks, page_bytes]. ``num_bytes`` and ``keys``: for each block, or empty.

    Raises InvalidRequestError naming blocks, num_bytes or keys.
    """
    wanted = f"[1, num_blocks, {page_bytes}]"
    check_tensor("blocks", pages, wanted, (1, None, page_bytes), (torch.uint8,), pages.device)
    num_blocks = pages.shape[1]
    _check_keys(keys, num_blocks)
    for i, num in enumerate(num_bytes):
        require(0 <= num <= page_bytes, f"must be 0 to {page_bytes}, is {num}", f"num_bytes[{i}]")
    header = np.zeros((num_blocks, OPAQUE_HEADER_BYTES), np.uint8)
    sizes = header[:, :_KEY_AT].view("<i4")
    sizes[:, 0] = page_bytes if not len(num_bytes) else num_bytes
    for i, key in enumerate(keys):
        sizes[i, 1] = len(key)
        header[i, _KEY_AT : _KEY_AT + len(key)] = np.frombuffer(key, np.uint8)
    blocks = torch.cat((torch.from_numpy(header).to(pages.device)[None], pages), dim=2)
    for i, num in enumerate(num_bytes):
        blocks[0, i, OPAQUE_HEADER_BYTES + num :] = 0
    return blocks


def unpack(blocks: torch.Tensor, keys: Sequence[bytes]) -> tuple[torch.Tensor, list[int]]:
    """Do the inverse of ``pack``. Returns the pages, and how many leading bytes of each page hold
    something. ``keys``: one for each block, and a page whose own key differs is returned as 0
    bytes; an empty list compares nothing.

    Raises InvalidRequestError naming keys.
    """
    _check_keys(keys, blocks.shape[1])
    header = blocks[0, :, :OPAQUE_HEADER_BYTES].cpu().contiguous().numpy()
    sizes = header[:, :_KEY_AT].view("<i4")
    pages = blocks[:, :, OPAQUE_HEADER_BYTES:]
    num_bytes = np.clip(sizes[:, 0], 0, pages.shape[2]).tolist()
    for i, key in enumerate(keys):
        if header[i, _KEY_AT : _KEY_AT + sizes[i, 1]].tobytes() != key:
            num_bytes[i] = 0
            pages[0, i] = 0
    return pages, num_bytes


def _check_keys(keys: Sequence[bytes], num_blocks: int) -> None:
    require(len(keys) in (0, num_blocks), f"must be one for each of {num_blocks} entries", "keys")
    for i, key in enumerate(keys):
        wanted = f"must be at most {MAX_KEY_BYTES} bytes, is {len(key)}"
        require(len(key) <= MAX_KEY_BYTES, wanted, f"keys[{i}]")
