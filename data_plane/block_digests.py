"""Digests of what a data plane holds, by ranges of blocks (``kvplane/wire/block_digests.py``).

A range's digest is kept until a plan allocates one of its blocks, or one is published or withdrawn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from data_plane.commands import Commands
from data_plane.places import Place, group_of, tier_of
from data_plane.plans.tables.block_tables import BlockTables
from kvplane.v1 import control_pb2
from kvplane.v1 import types_pb2 as pb
from kvplane.wire import block_digests as wire


class BlockDigests:
    """Of the blocks of one data plane. ``command``: within which a call is made."""

    def __init__(self, tables: BlockTables, command: Commands) -> None:
        self._tables = tables
        self._command = command
        self._salt = os.urandom(wire.SALT_BYTES)
        sizes = {place: len(changed) for place, changed in tables.changed_ranges.items()}
        self._digests = {
            place: np.zeros((n, wire.DIGEST_BYTES), np.uint8) for place, n in sizes.items()
        }
        # The refresh that computed each.
        self._computed = {place: np.zeros(n, np.int64) for place, n in sizes.items()}
        self._num_refreshes = 0

    def refresh(self, max_ranges: int) -> bool:
        """Compute digests that are out of date, at most so many. Returns whether some are left."""
        with self._command.lock, self._command("digests"):
            return self._refresh(max_ranges)

    def _refresh(self, max_ranges: int) -> bool:
        for place, changed in self._tables.changed_ranges.items():
            stale = np.flatnonzero(changed)
            if len(stale):
                self._num_refreshes += 1
                for run in _runs(stale[:max_ranges]):
                    self._compute(place, run)
                return True
        return False

    def messages(self, since: int) -> tuple[int, list[control_pb2.BlockDigests]]:
        """The digests of which some were computed after ``since``, 0 for all, the last message
        marked; and what to give next time.
        """
        with self._command.lock, self._command("digests"):
            found = [message for place in self._digests for message in self._of_place(place, since)]
            if not found:
                found.append(control_pb2.BlockDigests(salt=self._salt, tier=pb.TIER_DEVICE))
            found[-1].last = True
            return self._num_refreshes, found

    def _compute(self, place: Place, run: NDArray[np.int64]) -> None:
        num_blocks = self._tables.num_blocks[place]
        begin, _ = wire.blocks_of(int(run[0]), num_blocks)
        _, end = wire.blocks_of(int(run[-1]), num_blocks)
        is_device = tier_of(place) == pb.TIER_DEVICE
        size = wire.record_bytes(self._tables.block_size_tokens, is_device=is_device)
        digests = b"".join(wire.digests_of(self._records(place, begin, end), size, self._salt))
        self._digests[place][run] = np.frombuffer(digests, np.uint8).reshape(len(run), -1)
        self._computed[place][run] = self._num_refreshes
        self._tables.changed_ranges[place][run] = False

    def _records(self, place: Place, begin: int, end: int) -> bytes:
        """What is known of the blocks [begin, end) of a place."""
        generations = self._tables.generations[place][begin:end].astype("<i8")
        if tier_of(place) != pb.TIER_DEVICE:
            return generations.tobytes()
        return self._tables.publications[group_of(place)].records(generations, begin)

    def _of_place(self, place: Place, since: int) -> Iterator[control_pb2.BlockDigests]:
        computed, digests = self._computed[place], self._digests[place]
        for begin in range(0, len(computed), wire.MAX_DIGESTS):
            window = slice(begin, begin + wire.MAX_DIGESTS)
            if computed[window].max() > since:
                yield control_pb2.BlockDigests(
                    salt=self._salt,
                    group=group_of(place),
                    tier=tier_of(place),
                    first_range=begin,
                    digests=digests[window].tobytes(),
                )


def _runs(numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Runs of consecutive numbers."""
    return np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
