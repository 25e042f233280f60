"""What a data plane and its agent process say to each other: packets of a Unix socket.

A request is its kind, a number and a body; an answer is the request's number, whether it was done,
and a body, or why not. The agent's first packet is an answer to the request 0, which nobody makes.
"""

from __future__ import annotations

import struct
from typing import Final

# Requests, each with the fields of its body.
LEASE: Final = 1  # share; answers ADDRESS and the metadata of the share's registration
RELEASE: Final = 2  # share
CONNECT: Final = 3  # a peer's metadata; answers the name of its agent
FORGET: Final = 4  # name of an agent
WRITE: Final = 5  # WRITE_BODY, then the name of an agent; answered when it has ended
PING: Final = 6  # whether the process answers

MAX_METADATA_BYTES: Final = 64 * 1024
MAX_PACKET_BYTES: Final = MAX_METADATA_BYTES + 1024
HEADER: Final = struct.Struct("<BI")
SHARE: Final = struct.Struct("<I")
ADDRESS: Final = struct.Struct("<Q")
WRITE_BODY: Final = struct.Struct("<QQQ")  # offset in the staging memory, bytes, address there


def packed(first: int, number: int, body: bytes = b"") -> bytes:
    """A packet. ``first``: kind of a request; of an answer, 1 if it was done."""
    return HEADER.pack(first, number) + body


def unpacked(packet: bytes) -> tuple[int, int, bytes]:
    """What ``packed`` was given."""
    first, number = HEADER.unpack_from(packet)
    return first, number, packet[HEADER.size :]
