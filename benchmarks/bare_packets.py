"""Measures the round trip of a packet between two processes that do nothing else: the least time of
a layer through shared memory.

Both ends either sleep until a packet arrives, so that the system has to wake them up, or first poll
for as long as a client and a data plane do.

    python -m benchmarks.bare_packets FD SPIN_S

echoes packets on a socket until its other end is closed: the child of ``Echo``.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from types import TracebackType

from kvplane_kernels import AnswerSocket

SPIN_S = 0.002
PACKET = bytes(120)  # about as long as a layer's
TIMEOUT_S = 30.0


class Echo:
    """A process that echoes packets while the context is open."""

    def __init__(self, spin_s: float) -> None:
        """``spin_s``: how long both ends poll before they sleep."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(spin_s)]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._answers = AnswerSocket(fd=self._socket.fileno(), spin_s=spin_s)

    def __enter__(self) -> Echo:
        self.round_trip()  # the child has started then
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._process.wait()

    def round_trip(self) -> None:
        """Send a packet and wait for its answer. Raises OSError and TimeoutError."""
        self._socket.send(PACKET)
        self._answers.receive(TIMEOUT_S)


def serve(fd: int, spin_s: float) -> None:
    """Echo until the other end is closed."""
    peer = socket.socket(fileno=fd)
    answers = AnswerSocket(fd=fd, spin_s=spin_s)
    while True:
        try:
            peer.send(answers.receive(TIMEOUT_S))
        except TimeoutError:
            continue
        except OSError:
            return


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]))
