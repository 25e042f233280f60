"""The process that speaks NIXL for a data plane.

    python -m data_plane.server.push.nixl.agent SOCKET_FD STAGING_FD NUM_SHARES SHARE_BYTES

Over TCP, UCX writes wherever a peer tells it to, registered or not, in the process that it runs in.
This process has nothing but staging memory, which it shares with the data plane.

The first half of the staging memory has shares that peers write, each registered by itself; the
second half is what is sent from. NIXL's own thread would keep a core busy all the time, so progress
is made here, and only while there is a lease or a write.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
import signal
import socket
import sys
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from data_plane.server.push.nixl import packets

LIBRARIES: Final = ("nixl_cu12", "nixl_cu13")
# While there is something under way. Shorter ones take time from those that copy.
_POLL_S: Final = 20e-6
# While there is nothing but writes that peers have kept waiting for so long.
_STALLED_POLL_S: Final = 1e-3
_STALLED_S: Final = 1.0


def library() -> str | None:
    """The package that has NIXL; None where none is installed."""
    return next((name for name in LIBRARIES if importlib.util.find_spec(name) is not None), None)


class Agent:
    """Answers requests until the data plane closes the socket."""

    def __init__(self, peer: socket.socket, staging: mmap.mmap, num_shares: int) -> None:
        import numpy

        api: Any = importlib.import_module(f"{library()}._api")
        self._socket = peer
        self._view = numpy.frombuffer(staging, numpy.uint8)  # keeps the memory where it is
        self._base = self._view.ctypes.data
        self._share_bytes = len(staging) // (2 * num_shares)
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = api.nixl_agent(uuid.uuid4().hex, config)
        self._shares = [
            self._register(self._base + i * self._share_bytes, self._share_bytes)
            for i in range(num_shares)
        ]
        half = len(staging) // 2
        self._register(self._base + half, half)
        self._leases: set[int] = set()
        self._peers: Counter[str] = Counter()
        self._writes: dict[int, Any] = {}
        self._last_write_s = 0.0
        self._answer_to: dict[int, Callable[[bytes], bytes]] = {
            packets.LEASE: self._lease,
            packets.RELEASE: self._release,
            packets.CONNECT: self._connect,
            packets.FORGET: self._forget,
            packets.PING: lambda body: body,
        }

    def run(self) -> None:
        """Returns when the data plane is gone."""
        self._socket.send(packets.packed(1, 0))
        while True:
            is_busy = bool(self._leases or self._writes)
            self._socket.settimeout(0 if is_busy else None)
            try:
                packet = self._socket.recv(packets.MAX_PACKET_BYTES)
            except BlockingIOError:
                self._progress()
                continue
            if not packet:
                return
            self._handle(*packets.unpacked(packet))

    def _handle(self, kind: int, number: int, body: bytes) -> None:
        try:
            if kind == packets.WRITE:
                self._writes[number] = self._write(body)
                self._last_write_s = time.monotonic()
                return
            answer = packets.packed(1, number, self._answer_to[kind](body))
        except Exception as error:  # the library has many, of no common base
            answer = packets.packed(0, number, f"{type(error).__name__}: {error}".encode()[:500])
        self._send(answer)

    def _progress(self) -> None:
        with suppress(Exception):  # of one peer: the others' writes go on
            self._agent.get_new_notifs()
        for number, handle in [*self._writes.items()]:
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception as error:  # raised for all but done and under way
                state = f"{type(error).__name__}: {error}"
            if state != "PROC":
                del self._writes[number]
                with suppress(Exception):
                    handle.release()
                done = state == "DONE"
                self._send(packets.packed(done, number, b"" if done else state.encode()[:500]))
        has_stalled = time.monotonic() - self._last_write_s > _STALLED_S
        time.sleep(_STALLED_POLL_S if has_stalled and not self._leases else _POLL_S)

    def _send(self, packet: bytes) -> None:
        self._socket.settimeout(None)
        self._socket.send(packet)

    def _register(self, address: int, num_bytes: int) -> Any:
        return self._agent.register_memory([(address, num_bytes, 0, "")], "DRAM")

    def _lease(self, body: bytes) -> bytes:
        (share,) = packets.SHARE.unpack(body)
        metadata = self._agent.get_partial_agent_metadata(
            self._shares[share], inc_conn_info=True, backends=["UCX"]
        )
        self._leases.add(share)
        address = packets.ADDRESS.pack(self._base + share * self._share_bytes)
        return address + bytes(metadata)

    def _release(self, body: bytes) -> bytes:
        self._leases.discard(*packets.SHARE.unpack(body))
        return b""

    def _connect(self, metadata: bytes) -> bytes:
        name: bytes = self._agent.add_remote_agent(metadata)
        self._peers[name.decode()] += 1
        return name

    def _forget(self, name: bytes) -> bytes:
        peer = name.decode()
        self._peers[peer] -= 1
        if self._peers[peer] <= 0:
            del self._peers[peer]
            self._agent.remove_remote_agent(peer)
        return b""

    def _write(self, body: bytes) -> Any:
        offset, num_bytes, address = packets.WRITE_BODY.unpack_from(body)
        peer = body[packets.WRITE_BODY.size :].decode()
        handle = self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs([(self._base + offset, num_bytes, 0)], "DRAM"),
            self._agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM"),
            peer,
        )
        if self._agent.transfer(handle) == "ERR":
            handle.release()
            raise ConnectionError("the write cannot begin")
        return handle


def main() -> None:
    """Run as a program."""
    socket_fd, staging_fd, num_shares, share_bytes = map(int, sys.argv[1:])
    staging = mmap.mmap(staging_fd, 2 * num_shares * share_bytes)
    for sent_to_all in (signal.SIGINT, signal.SIGTERM):  # of the group: the data plane ends this
        signal.signal(sent_to_all, signal.SIG_IGN)
    try:
        with socket.socket(fileno=socket_fd) as peer, suppress(ConnectionError):
            Agent(peer, staging, num_shares).run()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # what the library would wait for is of no use any more


if __name__ == "__main__":
    main()
