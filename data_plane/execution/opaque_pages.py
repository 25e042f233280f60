"""Opaque pages: blocks of bytes that only the caller understands.

    bytes 0 to 3     int32: how many leading bytes of the page hold something
    bytes 4 to 7     int32: the length of the key
    bytes 8 to 71    the caller's own key of the block, such as an engine's hash; then zeros
    bytes 128 on     the page

All of this is the block's memory, so it goes where the block goes: to copies, the host tier, files
and other data planes, under their checksums.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from data_plane.kernels.arguments import check_tensor, require
from kvplane.layout import OPAQUE_HEADER_BYTES

MAX_KEY_BYTES: Final = 64
_SIZES: Final = struct.Struct("<2i")  # of the page and its key
_KEY_AT: Final = _SIZES.size


class Pages:
    """Pages to be written: uint8 [1, num_blocks, page_bytes], on any device, each with the number
    of its leading bytes that hold something, and a key. ``num_bytes`` and ``keys``: for each page,
    or empty. Raises InvalidRequestError naming blocks, num_bytes or keys.
    """

    def __init__(
        self,
        pages: torch.Tensor,
        page_bytes: int,
        num_bytes: Sequence[int],
        keys: Sequence[bytes],
    ) -> None:
        wanted = f"[1, num_blocks, {page_bytes}]"
        check_tensor("blocks", pages, wanted, (1, None, page_bytes), (torch.uint8,), pages.device)
        num_blocks = pages.shape[1]
        check_keys(keys, num_blocks)
        for i, num in enumerate(num_bytes):
            wanted = f"must be 0 to {page_bytes}, is {num}"
            require(0 <= num <= page_bytes, wanted, f"num_bytes[{i}]")
        headers = np.zeros((num_blocks, OPAQUE_HEADER_BYTES), np.uint8)
        sizes = headers[:, :_KEY_AT].view("<i4")
        sizes[:, 0] = num_bytes if len(num_bytes) else page_bytes
        for i, key in enumerate(keys):
            sizes[i, 1] = len(key)
            headers[i, _KEY_AT : _KEY_AT + len(key)] = np.frombuffer(key, np.uint8)
        self._num_bytes: list[int] = sizes[:, 0].tolist()
        self._headers = headers
        self._pages = pages[0].cpu().numpy()

    def write(self, first: int, rows: Sequence[torch.Tensor]) -> None:
        """Write the pages from ``first`` on to the memory of blocks, ``rows``. What a page does not
        hold is 0.
        """
        # numpy copies with this thread alone. torch would take several, which on a busy machine
        # wait for each other longer than one of them copies a page.
        for i, row in enumerate(rows, first):
            block = row.numpy() if row.is_cpu else np.empty(len(row), np.uint8)
            end = OPAQUE_HEADER_BYTES + self._num_bytes[i]
            block[:OPAQUE_HEADER_BYTES] = self._headers[i]
            block[OPAQUE_HEADER_BYTES:end] = self._pages[i, : self._num_bytes[i]]
            block[end:] = 0
            if not row.is_cpu:
                row.copy_(torch.from_numpy(block))


def read(rows: Sequence[torch.Tensor], keys: Sequence[bytes]) -> list[memoryview]:
    """Return the leading bytes that hold something of the page in each block's memory, ``rows``:
    views of that memory on the CPU, copies of a GPU's. ``keys``: checked ones for each page, of
    which one whose own key differs is read as no bytes; empty to compare nothing.
    """
    pages = []
    for i, row in enumerate(rows):
        block = row.cpu().numpy().data
        num_bytes, key_bytes = _SIZES.unpack_from(block)
        if keys and block[_KEY_AT : _KEY_AT + key_bytes] != keys[i]:
            num_bytes = 0
        pages.append(block[OPAQUE_HEADER_BYTES:][: max(num_bytes, 0)])
    return pages


def check_keys(keys: Sequence[bytes], num_blocks: int) -> None:
    """Raise InvalidRequestError unless there are no keys, or one of at most ``MAX_KEY_BYTES`` for
    each block.
    """
    require(len(keys) in (0, num_blocks), f"must be one for each of {num_blocks} entries", "keys")
    for i, key in enumerate(keys):
        wanted = f"must be at most {MAX_KEY_BYTES} bytes, is {len(key)}"
        require(len(key) <= MAX_KEY_BYTES, wanted, f"keys[{i}]")
