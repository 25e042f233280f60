"""The client's end of a local execution in native code: what file it waits on, and how long."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from kvplane_kernels import AnswerSocket

from kvplane.errors import PlaneUnavailableError
from kvplane.transport.local.connection import LocalConnection

Pair = tuple[socket.socket, socket.socket]


def new_pair() -> Pair:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = new_pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_what_is_opened_with_the_number_of_a_closed_file_is_not_read(pair: Pair) -> None:
    ours, theirs = pair
    answers = AnswerSocket(fd=ours.fileno(), spin_s=0.0)
    other, another = new_pair()
    with other, another:
        os.dup2(other.fileno(), ours.fileno())
        another.send(b"a secret")
        theirs.send(b"an answer")
        assert answers.receive(5.0) == b"an answer"


def test_its_own_file_is_closed_with_it(pair: Pair) -> None:
    ours, theirs = pair
    answers = AnswerSocket(fd=ours.fileno(), spin_s=0.0)
    ours.close()
    del answers
    assert theirs.recv(1) == b""


def test_who_waits_on_another_thread_ends_with_the_connection(pair: Pair) -> None:
    ours, theirs = pair
    connection = LocalConnection(ours, 1, mmap.mmap(-1, 4096))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(connection.receive, 30.0)
        time.sleep(0.05)
        connection.close()
        with pytest.raises(PlaneUnavailableError):
            answer.result(5.0)
    assert theirs.recv(1) == b""


def test_a_signal_that_does_not_interrupt_the_sleep_is_noticed(pair: Pair) -> None:
    """It came before, or to another thread, as here. The time is longer than an int has
    milliseconds.
    """

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    def send_signal() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    answers = AnswerSocket(fd=pair[0].fileno(), spin_s=0.0)
    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.1, send_signal)
    rescue = threading.Timer(5.0, pair[1].send, (b"late",))
    began_s = time.monotonic()
    timer.start()
    rescue.start()
    try:
        with pytest.raises(Interrupted):
            answers.receive(1e12)
        assert time.monotonic() - began_s < 3.0
    finally:
        rescue.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)
