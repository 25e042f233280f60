"""Loads named chunks into memory of just their size, where the pages of the pool may be larger."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from .cache import ChunkCache, Found


def load_whole(
    cache: ChunkCache,
    found: Found,
    items: Sequence[int],
    into: Sequence[memoryview],
    keys: Sequence[bytes] = (),
) -> Future[list[bool]]:
    """Load chunks that were found by name. ``items``, ``keys``: as of ``ChunkCache.load_named``.
    ``into``: of at most a page each, writable until the future has its result: whether each chunk
    came whole and has the size of its memory. What a chunk that did not come leaves is undefined.
    """
    page_bytes = cache.layout.groups[0].page_bytes
    rooms = [
        room if len(room) == page_bytes else memoryview(bytearray(page_bytes)) for room in into
    ]
    whole: Future[list[bool]] = Future()

    def finish(loading: Future[list[int]]) -> None:
        done = [size == len(chunk) for size, chunk in zip(loading.result(), into, strict=True)]
        for chunk, room, is_whole in zip(into, rooms, done, strict=True):
            if is_whole and room is not chunk:
                chunk[:] = room[: len(chunk)]
        whole.set_result(done)

    cache.load_named(found, items, rooms, keys).add_done_callback(finish)
    return whole
