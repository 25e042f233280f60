"""How native code waits for a client's packets, where it does not look for them: asleep, and not in
the interpreter.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from kvplane_kernels import ServedLayers

LONG_S = 2.0  # after which a sleep that nothing ends is ended by the test


@dataclass(frozen=True)
class Rig:
    """A client's socket, the data plane's end of it, and what else the data plane waits for."""

    client: socket.socket
    served: ServedLayers
    ready: select.epoll
    doorbell: int

    def look_while(self, happens: threading.Timer) -> tuple[bool, float]:
        """Whether a packet was found, and after how many seconds."""
        rescue = threading.Timer(LONG_S, self.client.send, (b"late",))
        began_s = time.monotonic()
        happens.start()
        rescue.start()
        try:
            found = self.served.look(self.ready.fileno(), True)
            return found, time.monotonic() - began_s
        finally:
            rescue.cancel()
            rescue.join()
            happens.join()


@pytest.fixture
def rig() -> Iterator[Rig]:
    yield from new_rig()


def new_rig() -> Iterator[Rig]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    doorbell = os.eventfd(0, os.EFD_CLOEXEC)
    with ours, theirs, select.epoll() as ready:
        ready.register(theirs, select.EPOLLIN)
        ready.register(doorbell, select.EPOLLIN)
        served = ServedLayers(fd=theirs.fileno(), spin_s=0.0, most_s=0.001)
        yield Rig(ours, served, ready, doorbell)
    os.close(doorbell)


def test_a_packet_ends_the_sleep(rig: Rig) -> None:
    found, seconds = rig.look_while(threading.Timer(0.05, rig.client.send, (b"a packet",)))
    assert found
    assert 0.04 < seconds < LONG_S
    assert rig.served.take() == b"a packet"


def test_what_else_is_ready_ends_the_sleep(rig: Rig) -> None:
    found, seconds = rig.look_while(threading.Timer(0.05, os.eventfd_write, (rig.doorbell, 1)))
    assert not found
    assert 0.04 < seconds < LONG_S


def test_a_client_that_goes_away_ends_the_sleep(rig: Rig) -> None:
    with pytest.raises(ConnectionResetError):
        rig.look_while(threading.Timer(0.05, rig.client.shutdown, (socket.SHUT_RDWR,)))
