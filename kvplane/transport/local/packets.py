"""The Unix socket of a local execution, as both ends see it.

A packet is one message, or, where its first byte is 0, it concerns a bound layer:

    BindLayer     0, 2, binding    a RunLayerRequest that names no plan    answer: 0, 2, binding
    layer         0, 1, binding    the plan and the pass                   answer: 0, 1, binding

A layer is bound once, with its tensors' places and its options. Errors, and answers that bring a
receipt, are messages.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from kvplane.errors import InvalidRequestError

MessageT = TypeVar("MessageT", bound=Message)

MAX_PACKET_BYTES: Final = 131_072
MAX_NAMES_BYTES: Final = 64
"""Bytes of a packet, at most, beside a layer's request: names of plan, pass or binding."""
MAX_BINDINGS: Final = 1024
"""Number of bindings of one connection, counted from 0. A number may be bound again."""
LAYER: Final = 1
BIND_LAYER: Final = 2
SECRET_BYTES: Final = 32
ALIGNMENT_BYTES: Final = 64
"""Alignment in bytes of every range in a region."""
NO_WAIT: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_HEAD: Final = struct.Struct("<BBHI")  # 0, kind, 0, binding
_NAMED: Final = struct.Struct("<qiI")  # plan number, pass, whether there is a pass
_FILE: Final = struct.Struct("i")
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


def place(sizes_bytes: Sequence[int], room_bytes: int) -> list[int] | None:
    """Return the offsets of ranges of these sizes, one after another; None if they do not fit in
    ``room_bytes``.
    """
    offsets, end = [], 0
    for size_bytes in sizes_bytes:
        offsets.append(end)
        end += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets if end <= room_bytes else None


def host_id() -> str:
    """Return an id of this boot of the machine, the same in all its containers; empty where there
    is none, and on systems without memfd or SOCK_SEQPACKET, which local executions need.
    """
    if not (hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET")):
        return ""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def new_socket() -> socket.socket:
    """Make a Unix socket that does not block."""
    return socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    )


def is_same_user(peer: socket.socket) -> bool:
    """Return whether the process at the other end runs as this process's user."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def receive(peer: socket.socket) -> bytes | None:
    """Return the next packet, None when there is none yet. Raises ConnectionError at the end, and
    for a packet that is too long.
    """
    try:
        packet = peer.recv(MAX_PACKET_BYTES + 1)
    except BlockingIOError:
        return None
    if not 0 < len(packet) <= MAX_PACKET_BYTES:
        raise ConnectionError("the peer went away, or sent a packet that is too long")
    return packet


def receive_file(peer: socket.socket) -> tuple[bytes, int]:
    """Return the next packet, and a file descriptor that came with it, which child processes do not
    inherit; -1 if none came. Raises OSError.
    """
    room = socket.CMSG_LEN(_FILE.size)
    packet, brought, _, _ = peer.recvmsg(MAX_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    files = [
        file
        for level, kind, data in brought
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (file,) in _FILE.iter_unpack(data)
    ]
    return packet, files[0] if files else -1


def send(peer: socket.socket, packet: bytes) -> None:
    """Send a packet without blocking. Raises OSError, also for a peer that does not read."""
    peer.send(packet, NO_WAIT)


def head_of(kind: int, binding: int) -> bytes:
    """Return the first part of a packet that concerns a bound layer, which is also its answer."""
    return _HEAD.pack(0, kind, 0, binding)


def named(plan_number: int, pass_index: int | None) -> bytes:
    """Return the second part of a layer's packet: the plan and the pass that it belongs to."""
    return _NAMED.pack(plan_number, pass_index or 0, pass_index is not None)


def read_head(packet: bytes) -> tuple[int, int, bytes]:
    """Parse a packet that begins with 0: kind, binding, rest. Raises InvalidRequestError."""
    if len(packet) < _HEAD.size:
        raise InvalidRequestError("the packet is too short")
    _, kind, padding, binding = _HEAD.unpack_from(packet)
    if kind not in (LAYER, BIND_LAYER) or padding:
        raise InvalidRequestError("the packet is of no kind that is known here")
    if binding >= MAX_BINDINGS:
        raise InvalidRequestError(f"must be less than {MAX_BINDINGS}", field="binding")
    return kind, binding, packet[_HEAD.size :]


def read_named(rest: bytes) -> tuple[int, int | None]:
    """Parse what ``named`` returns: the plan's number and the pass. Raises InvalidRequestError."""
    if len(rest) != _NAMED.size:
        raise InvalidRequestError("the layer's packet has another length than it should")
    plan_number, pass_index, has_pass = _NAMED.unpack(rest)
    return plan_number, pass_index if has_pass else None


def parse(kind: type[MessageT], packet: bytes) -> MessageT:
    """Parse a packet as a message of this kind. Raises InvalidRequestError."""
    try:
        return kind.FromString(packet)
    except DecodeError as error:
        raise InvalidRequestError(f"the packet is not an {kind.DESCRIPTOR.name}") from error
