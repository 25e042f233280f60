"""Compares what a data plane holds with what it has reported, by digests of ranges of blocks.

A range whose digest differs is forgotten, and the data plane reports it again: see
``kvplane/wire/block_digests.py``.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import compress
from typing import Final

from kvplane_blocks import Rebuild

from kvplane.errors import InvalidRequestError
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import block_digests as wire
from kvplane.wire import columns
from kvplane.wire.columns import INT32

_NOT_COMPARED: Final = 0
_DIFFERENT: Final = 1
_EQUAL: Final = 2

# A layer group and a tier.
_Place = tuple[int, tpb.Tier]


class ShardDigests:
    """Of what one shard has reported. A digest is kept until its range is reported again."""

    def __init__(
        self,
        rebuilds: Sequence[Rebuild],
        shard_index: int,
        num_blocks: Sequence[dict[tpb.Tier, int]],
    ) -> None:
        """``num_blocks``: of each layer group."""
        self._rebuilds = rebuilds
        self._index = shard_index
        self._num_blocks = {
            (group, tier): num for group, of in enumerate(num_blocks) for tier, num in of.items()
        }
        self._salt = b""
        self._digests: dict[_Place, list[bytes]] = {}
        self._found: dict[_Place, bytearray] = {}
        self.start()

    def start(self) -> None:
        """Begin to compare anew: what was compared before does not count."""
        self._found = {
            place: bytearray(wire.num_ranges(num)) for place, num in self._num_blocks.items()
        }

    def compare(self, part: cpb.BlockDigests) -> None:
        """Compare some ranges, and forget those that differ. Takes some milliseconds at most.

        Raises InvalidRequestError naming a field of ``digests``.
        """
        place = (part.group, part.tier)
        found = self._found.get(place)
        _require(found is not None, "tier", "is of no tier of this data plane")
        assert found is not None
        _require(len(part.salt) == wire.SALT_BYTES, "salt", f"must be {wire.SALT_BYTES} bytes")
        told = columns.fixed(part.digests, wire.DIGEST_BYTES)
        most = wire.MAX_DIGESTS
        _require(len(told) <= most, "digests", f"must be at most {most}")
        _require(len(part.digests) % wire.DIGEST_BYTES == 0, "digests", "must be of 16 bytes each")
        begin, end = part.first_range, part.first_range + len(told)
        _require(0 <= begin <= end <= len(found), "first_range", "has ranges that are not there")
        known = self._known(place, part.salt, begin, end)
        rebuild = self._rebuilds[part.group]
        for number, (of_plane, own) in enumerate(zip(told, known, strict=True), begin):
            found[number] = _EQUAL if of_plane == own else _DIFFERENT
            if of_plane != own:
                first, last = wire.blocks_of(number, self._num_blocks[place])
                rebuild.forget(self._index, part.tier, first, last)

    def finish(self, *, all_ranges: bool) -> tuple[cpb.ReportRequest, int]:
        """What the data plane is to report, and of how many ranges. ``all_ranges``: raise
        InvalidRequestError if some were not compared.
        """
        request = cpb.ReportRequest(only_ranges=True)
        num_different = 0
        for (group, tier), found in self._found.items():
            if all_ranges and _NOT_COMPARED in found:
                raise InvalidRequestError("must be of all ranges", field="digests")
            different = found.translate(_IS_DIFFERENT)
            numbers = array(INT32, compress(range(len(found)), different))
            if numbers:
                request.ranges.add(group=group, tier=tier, ranges=columns.pack(INT32, numbers))
                num_different += len(numbers)
        self.start()
        return request, num_different

    def _known(self, place: _Place, salt: bytes, begin: int, end: int) -> list[bytes]:
        """The digests of what was reported."""
        if salt != self._salt:
            self._salt = salt
            self._digests.clear()
        num_blocks = self._num_blocks[place]
        digests = self._digests.setdefault(place, [b""] * wire.num_ranges(num_blocks))
        group, tier = place
        rebuild = self._rebuilds[group]
        changed = rebuild.take_changed(self._index, tier, begin, end)
        missing = [number for number in range(begin, end) if not digests[number]]
        for number in {*changed, *missing}:
            records = rebuild.records(self._index, tier, *wire.blocks_of(number, num_blocks))
            digests[number] = wire.digest_of(records, salt)
        return digests[begin:end]


_IS_DIFFERENT: Final = bytes(value == _DIFFERENT for value in range(256))


def _require(ok: bool, field: str, text: str) -> None:
    if not ok:
        raise InvalidRequestError(text, field=f"digests.{field}")
