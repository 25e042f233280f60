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

from data_plane.execution.plan_runner import PlanLayer
from kvplane.attention_options import AttentionOptions
from kvplane.transport.local import packets
from tests.helpers.data.data_rig import Rig as Executing
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


class Bound:
    """A plan of one token, whose first layer is bound by several numbers."""

    def __init__(self, served: ServedLayers) -> None:
        self.executing, self.served = Executing(), served
        self.executing.start(1, set_blocks(1, [(0, 1)]), span(1, 0, 1))
        self.tensors = [torch.zeros(1, heads, 16) for heads in (4, 2, 2, 4)]
        query, key, value, _ = self.tensors
        runner = self.executing.executor.layer_runner
        bound = runner.bind(PlanLayer(1, 0, 1), (query, key, value), AttentionOptions())
        assert bound is not None
        self.native = bound.native

    def bind(self, number: int, index: int, num_tokens: int = 1) -> None:
        places = [tensor.data_ptr() for tensor in self.tensors]
        named = dict(zip(("query", "key", "value", "out"), places, strict=True))
        numbers = {"binding": number, "index": index, "group": 0, "num_tokens": num_tokens}
        self.served.bind(layer=self.native, **numbers, **named)

    def begin(self, first: int, num_layers: int) -> None:
        run = self.executing.executor._sessions.get(1).latest
        bound = self.executing.executor._compute.bound
        assert run is not None and bound is not None
        self.served.begin([bound.batch(run.attention[0])], first, num_layers, 1, PLAN)


PLAN = packets.named(1, None)


def layer(number: int, named: bytes = PLAN) -> bytes:
    """Return the packet that asks for a layer by its binding."""
    return packets.head_of(packets.LAYER, number) + named


@pytest.fixture
def hurried() -> Iterator[Rig]:
    """One that has no time for a second layer."""
    yield from new_rig(most_s=0.0)


def test_layers_that_are_asked_for_ahead_are_run_a_while_at_a_time(hurried: Rig) -> None:
    """Others wait for the lock that is held meanwhile."""
    bound = Bound(hurried.served)
    for number in range(3):
        bound.bind(number, number)
        hurried.client.send(layer(number))
    bound.begin(0, 3)
    for number in range(3):
        assert hurried.served.look(hurried.ready.fileno(), True)
        assert hurried.served.asks_for_layer(PLAN) == number
        hurried.served.serve(hurried.ready.fileno(), True)
        assert [ran for ran, *_ in hurried.served.take_ran()] == [number]
        assert hurried.client.recv(16) == packets.head_of(packets.LAYER, number)


OTHERS = {
    "another plan": layer(0, packets.named(2, None)),
    "a pass": layer(0, packets.named(1, 0)),
    "a binding": packets.head_of(packets.BIND_LAYER, 0) + PLAN,
    "a number that is not bound": layer(9),
    "a layer whose turn it is not": layer(1),
    "the last layer": layer(2),
    "more tokens": layer(3),
    "a message": b"\x1a\0" * 12,
    "more bytes": layer(0) + b"\0",
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_packets_are_left_to_the_caller(rig: Rig, what: str) -> None:
    """None of them is run."""
    bound = Bound(rig.served)
    for number, index, num_tokens in ((0, 0, 1), (1, 1, 1), (2, 2, 1), (3, 0, 2)):
        bound.bind(number, index, num_tokens)
    bound.begin(2 if what == "the last layer" else 0, 2)
    rig.client.send(OTHERS[what])
    assert rig.served.look(rig.ready.fileno(), True)
    rig.served.serve(rig.ready.fileno(), True)
    assert rig.served.take_ran() == []
    assert rig.served.take() == OTHERS[what]
