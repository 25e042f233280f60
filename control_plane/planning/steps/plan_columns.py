"""The columns of one plan as they are filled, and the messages that they become.

Integers are collected in arrays and written to the messages as bytes, once, at the end: no object
is made per sequence or block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from kvplane import columns
from kvplane.columns import INT32, INT64, UINT8
from kvplane.v1 import types_pb2 as tpb

# A block as it was when it was allocated: tier, index, generation.
Ref = tuple[tpb.Tier, int, int]


class TableChangeColumns:
    """Changes to block tables, in order."""

    __slots__ = (
        "_allocated",
        "_first_blocks",
        "_generations",
        "_indices",
        "_kinds",
        "_num_blocks",
        "_parents",
        "_sequence_ids",
        "_tiers",
    )

    def __init__(self) -> None:
        self._kinds = array(UINT8)
        self._sequence_ids = array(INT64)
        self._tiers = array(UINT8)
        self._first_blocks = array(INT32)
        self._num_blocks = array(INT32)
        self._parents = array(INT64)
        self._indices = array(INT32)
        self._generations = array(INT64)
        self._allocated = bytearray()

    def __len__(self) -> int:
        return len(self._kinds)

    def set(
        self,
        sequence_id: int,
        tier: int,
        first_block: int,
        blocks: Sequence[int],
        generations: Sequence[int],
        allocated: bytes,
        *,
        replace: bool = False,
    ) -> None:
        """Set table entries from ``first_block`` on; a byte of ``allocated`` is 1 for a block that
        the plan allocates, else 0.
        """
        kind = tpb.TABLE_CHANGE_KIND_REPLACE if replace else tpb.TABLE_CHANGE_KIND_SET
        self._add(kind, sequence_id, tier, first_block, len(blocks))
        self._indices.extend(blocks)
        self._generations.extend(generations)
        self._allocated += allocated

    def fork(self, sequence_id: int, parent_id: int, num_blocks: int) -> None:
        """Make a table of the first entries of another sequence's table."""
        self._add(tpb.TABLE_CHANGE_KIND_FORK, sequence_id, 0, 0, num_blocks)
        self._parents.append(parent_id)

    def drop(self, sequence_id: int) -> None:
        """Remove a table."""
        self._add(tpb.TABLE_CHANGE_KIND_DROP, sequence_id, 0, 0, 0)

    def message(self) -> tpb.TableChanges | None:
        """All of them, None when there are none."""
        if not self._kinds:
            return None
        return tpb.TableChanges(
            kinds=columns.pack(UINT8, self._kinds),
            sequence_ids=columns.pack(INT64, self._sequence_ids),
            tiers=columns.pack(UINT8, self._tiers),
            first_blocks=columns.pack(INT32, self._first_blocks),
            num_blocks=columns.pack(INT32, self._num_blocks),
            parent_sequence_ids=columns.pack(INT64, self._parents),
            indices=columns.pack(INT32, self._indices),
            generations=columns.pack(INT64, self._generations),
            allocated=bytes(self._allocated),
        )

    def _add(self, kind: int, sequence_id: int, tier: int, first: int, num_blocks: int) -> None:
        self._kinds.append(kind)
        self._sequence_ids.append(sequence_id)
        self._tiers.append(tier)
        self._first_blocks.append(first)
        self._num_blocks.append(num_blocks)


class TransferColumns:
    """Copies of blocks, in order."""

    __slots__ = ("_destinations", "_sources")

    def __init__(self) -> None:
        self._sources = _RefColumns()
        self._destinations = _RefColumns()

    def __len__(self) -> int:
        return len(self._sources.tiers)

    def __iter__(self) -> Iterator[tuple[Ref, Ref]]:
        """(source, destination) of each."""
        return zip(self._sources, self._destinations, strict=True)

    def add(self, source: Ref, destination: Ref) -> None:
        """Copy one block."""
        self._sources.add(source)
        self._destinations.add(destination)

    def trace(self, origins: dict[Ref, Ref]) -> None:
        """Map each block written to the block that held its content before all transfers."""
        for source, destination in self:
            origins[destination] = origins.get(source, source)

    def message(self) -> tpb.Transfers | None:
        """All of them, None when there are none."""
        if not self:
            return None
        sources, destinations = self._sources, self._destinations
        return tpb.Transfers(
            source_tiers=columns.pack(UINT8, sources.tiers),
            source_indices=columns.pack(INT32, sources.indices),
            source_generations=columns.pack(INT64, sources.generations),
            destination_tiers=columns.pack(UINT8, destinations.tiers),
            destination_indices=columns.pack(INT32, destinations.indices),
            destination_generations=columns.pack(INT64, destinations.generations),
        )


class _RefColumns:
    __slots__ = ("generations", "indices", "tiers")

    def __init__(self) -> None:
        self.tiers = array(UINT8)
        self.indices = array(INT32)
        self.generations = array(INT64)

    def __iter__(self) -> Iterator[Ref]:
        tiers = cast(Iterable[tpb.Tier], self.tiers)
        return zip(tiers, self.indices, self.generations, strict=True)

    def add(self, ref: Ref) -> None:
        tier, index, generation = ref
        self.tiers.append(tier)
        self.indices.append(index)
        self.generations.append(generation)


class SpanColumns:
    """The tokens that a plan computes for each sequence."""

    __slots__ = ("first_positions", "num_tokens", "sequence_ids")

    def __init__(self) -> None:
        self.sequence_ids = array(INT64)
        self.first_positions = array(INT64)
        self.num_tokens = array(INT32)

    def __len__(self) -> int:
        return len(self.sequence_ids)

    def message(self) -> tpb.Spans | None:
        """All of them, None when there are none."""
        if not self:
            return None
        return tpb.Spans(
            sequence_ids=columns.pack(INT64, self.sequence_ids),
            first_positions=columns.pack(INT64, self.first_positions),
            num_tokens=columns.pack(INT32, self.num_tokens),
        )
