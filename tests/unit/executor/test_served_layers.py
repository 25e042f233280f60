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
import torch
from kvplane_kernels import ServedLayers

from data_plane.kernels.backends.bound_layers import BoundLayers
from data_plane.kernels.backends.cpu import CpuKernels
from tests.helpers.data.data_rig import Rig as Executing
from tests.helpers.data.kernel_faults import with_operations
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.data.plan_author import set_blocks, span

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


def new_rig(most_s: float = 0.001) -> Iterator[Rig]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    doorbell = os.eventfd(0, os.EFD_CLOEXEC)
    with ours, theirs, select.epoll() as ready:
        ready.register(theirs, select.EPOLLIN)
        ready.register(doorbell, select.EPOLLIN)
        served = ServedLayers(fd=theirs.fileno(), spin_s=0.0, most_s=most_s)
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


@pytest.fixture
def hurried() -> Iterator[Rig]:
    """One that has no time for a second layer."""
    yield from new_rig(most_s=0.0)


def test_layers_that_are_asked_for_ahead_are_run_a_while_at_a_time(hurried: Rig) -> None:
    """Others wait for the lock that is held meanwhile."""
    kernels = CpuKernels(1)
    layers: BoundLayers = kernels.bound_layers()
    executing = Executing(kernels=with_operations(kernels, bound_layers=lambda: layers))
    query, key, value = (torch.zeros(1, heads, 16) for heads in (4, 2, 2))
    for number in (1, 2):  # a plan's layers are bound by its first call, and called by the next
        changes = [set_blocks(1, [(0, 1)])] if number == 1 else []
        executing.start(number, changes=changes, spans=[span(1, number - 1, 1)])
        for layer in range(2):
            out = executing.executor.layer(
                1, layer, query, key, value, **of_latest(executing.executor)
            )
    assert out is not None
    bound, (_, batch) = layers._last[0].native, layers._batches[0]
    addresses = {"query": query, "key": key, "value": value, "out": out}
    for number in range(3):
        hurried.served.add(
            head=b"%d" % number,
            answer=b"ran %d" % number,
            layer=bound,
            **{name: tensor.data_ptr() for name, tensor in addresses.items()},
        )
        hurried.client.send(b"%d of a plan" % number)
    hurried.served.begin([batch] * 3, 0, 1, b" of a plan")
    for number in range(3):
        assert hurried.served.look(hurried.ready.fileno(), True)
        hurried.served.serve(hurried.ready.fileno(), True)
        assert len(hurried.served.take_times()) == 1
        assert hurried.client.recv(16) == b"ran %d" % number
    executing.executor.check_integrity()
