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
from typing import Any

import pytest
import torch
from kvplane_kernels import LayerServer

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
    served: LayerServer
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
        served = LayerServer(fd=theirs.fileno(), spin_s=0.0, most_s=most_s)
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


def native_batch(executing: Executing) -> Any:
    """Of the latest plan."""
    run = executing.executor._sessions.get(1).latest
    assert run is not None
    bound = executing.executor._compute.bound
    assert bound is not None
    return bound.batch(run.attention[0])


@pytest.fixture
def hurried() -> Iterator[Rig]:
    """One that has no time for a second layer."""
    yield from new_rig(most_s=0.0)


def test_layers_that_are_asked_for_ahead_are_run_a_while_at_a_time(hurried: Rig) -> None:
    """Others wait for the lock that is held meanwhile."""
    executing = Executing()
    query, key, value, out = (torch.zeros(1, heads, 16) for heads in (4, 2, 2, 4))
    tensors, executor = (query, key, value), executing.executor
    executing.start(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 1)])
    bound = executor.layer_runner.bind(PlanLayer(1, 0, 1), tensors, AttentionOptions())
    assert bound is not None
    batch = native_batch(executing)
    named = packets.named(1, None)
    for number in range(3):
        hurried.served.bind(
            binding=number,
            index=number,
            group=0,
            num_tokens=1,
            layer=bound.native,
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            out=out.data_ptr(),
        )
        hurried.client.send(packets.head_of(packets.LAYER, number) + named)
    hurried.served.begin([batch], 0, 3, 1, named)
    for number in range(3):
        assert hurried.served.look(hurried.ready.fileno(), True)
        assert hurried.served.asks_for_layer(named) == number
        hurried.served.serve(hurried.ready.fileno(), True)
        assert [ran for ran, *_ in hurried.served.take_ran()] == [number]
        assert hurried.client.recv(16) == packets.head_of(packets.LAYER, number)
    executor.check_integrity()


@pytest.mark.parametrize(
    ("what", "packet"),
    [
        ("another plan", packets.head_of(packets.LAYER, 0) + packets.named(2, None)),
        ("a pass", packets.head_of(packets.LAYER, 0) + packets.named(1, 0)),
        ("a binding", packets.head_of(packets.BIND_LAYER, 0) + packets.named(1, None)),
        ("a number that is not bound", packets.head_of(packets.LAYER, 9) + packets.named(1, None)),
        (
            "a layer whose turn it is not",
            packets.head_of(packets.LAYER, 1) + packets.named(1, None),
        ),
        ("the last layer", packets.head_of(packets.LAYER, 2) + packets.named(1, None)),
        ("more tokens", packets.head_of(packets.LAYER, 3) + packets.named(1, None)),
        ("a message", b"\x1a\0" * 12),
        ("more bytes", packets.head_of(packets.LAYER, 0) + packets.named(1, None) + b"\0"),
    ],
)
def test_other_packets_are_left_to_the_caller(rig: Rig, what: str, packet: bytes) -> None:
    """None of them is run. ``what``: names the case."""
    executing = Executing()
    query, key, value, out = (torch.zeros(1, heads, 16) for heads in (4, 2, 2, 4))
    executing.start(1, changes=[set_blocks(1, [(0, 1)])], spans=[span(1, 0, 1)])
    executor = executing.executor
    bound = executor.layer_runner.bind(PlanLayer(1, 0, 1), (query, key, value), AttentionOptions())
    assert bound is not None
    batch = native_batch(executing)
    places = [tensor.data_ptr() for tensor in (query, key, value, out)]
    named = dict(zip(("query", "key", "value", "out"), places, strict=True))
    for number, index, num_tokens in ((0, 0, 1), (1, 1, 1), (2, 2, 1), (3, 0, 2)):
        rig.served.bind(
            binding=number,
            index=index,
            group=0,
            num_tokens=num_tokens,
            layer=bound.native,
            **named,
        )
    rig.served.begin([batch], 2 if what == "the last layer" else 0, 2, 1, packets.named(1, None))
    rig.client.send(packet)
    assert rig.served.look(rig.ready.fileno(), True)
    rig.served.serve(rig.ready.fileno(), True)
    assert rig.served.take_ran() == []
    assert rig.served.take() == packet
    executor.check_integrity()
