"""The Unix socket of a local execution, as both ends see it: one packet is one message."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from kvplane.errors import InvalidRequestError
from kvplane.wire.v1 import execution_pb2

MessageT = TypeVar("MessageT", bound=Message)

MAX_PACKET_BYTES: Final = 131_072
MAX_TAIL_BYTES: Final = 24
"""How long ``tail_of`` is at most: two tags and the length, and two integers of up to 10 bytes."""
SECRET_BYTES: Final = 32
ALIGNMENT_BYTES: Final = 64
"""Alignment of every range in a region."""
NO_WAIT: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
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
    """Make a socket that does not block."""
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
    """Send a packet without waiting. Raises OSError, also for a peer that does not read."""
    peer.send(packet, NO_WAIT)


def tail_of(plan_number: int, pass_index: int | None) -> bytes:
    """Return the second part of a layer's packet. It names the plan and the pass, and protobuf
    merges it into the first part, which is the same in each step: see ``LocalOffer``.
    """
    layer = execution_pb2.RunLayerRequest(plan_number=plan_number, pass_index=pass_index)
    return execution_pb2.ExecuteRequest(layer=layer).SerializeToString()


def head_of(packet: bytes, tail: bytes) -> bytes:
    """Return the first part of a layer's packet that ends with ``tail``; empty if it has no such
    parts. With another tail, the head is then the same layer of another plan or pass.
    """
    head = packet.removesuffix(tail)
    try:
        alone = execution_pb2.ExecuteRequest.FromString(head)
    except DecodeError:  # what looks like the tail is the end of something else
        return b""
    names_plan = alone.layer.plan_number or alone.layer.HasField("pass_index")
    return head if alone.HasField("layer") and not names_plan else b""


def parse(kind: type[MessageT], packet: bytes) -> MessageT:
    """Parse the message in a packet. Raises InvalidRequestError."""
    try:
        return kind.FromString(packet)
    except DecodeError as error:
        raise InvalidRequestError(f"the packet is not an {kind.DESCRIPTOR.name}") from error
