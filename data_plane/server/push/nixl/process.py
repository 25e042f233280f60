"""The agent process, as the data plane has it: it is started, asked, and ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTimeError
from contextlib import ExitStack, suppress
from typing import Final

from data_plane.server.push.nixl import packets
from kvplane.errors import PlaneUnavailableError

# Importing the library and reading a network's interfaces takes a second or two.
_START_S: Final = 30.0
_CALL_S: Final = 10.0


class AgentProcess:
    """One process, from its start to its end. Thread-safe. Each call raises PlaneUnavailableError
    when the process has ended, refuses, or does not answer; in the last case it is ended, since
    what it may still do to the staging memory is not known.
    """

    def __init__(
        self, staging_fd: int, num_shares: int, share_bytes: int, *, only_loopback: bool
    ) -> None:
        """Begin to start it; the first call waits for it. ``only_loopback``: unless the
        environment says which devices UCX uses. Raises OSError.
        """
        environment = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal", **os.environ}
        if only_loopback:
            environment.setdefault("UCX_NET_DEVICES", "lo")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, ExitStack() as on_error:
            on_error.callback(self._socket.close)
            module = f"{__package__}.agent"
            numbers = (theirs.fileno(), staging_fd, num_shares, share_bytes)
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, numbers)],
                pass_fds=(theirs.fileno(), staging_fd),
                stdin=subprocess.DEVNULL,
                env=environment,
            )
            on_error.pop_all()
        self._lock = threading.Lock()
        self._ready: Future[bytes] = Future()
        self._waiting: dict[int, Future[bytes]] = {0: self._ready}
        self._last_number = 0
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, name="nixl-agent", daemon=True)
        self._reader.start()

    @property
    def has_ended(self) -> bool:
        """Whether it can be asked nothing more."""
        return self._has_ended

    def call(self, kind: int, body: bytes = b"") -> bytes:
        """The answer to a request."""
        self._result(self._ready, _START_S)
        with self._lock:
            if self._has_ended:
                raise _ended()
            self._last_number = number = self._last_number % 0xFFFF_FFFF + 1
            answer = self._waiting[number] = Future()
        with suppress(OSError):  # it has ended, so the reader answers
            self._socket.send(packets.packed(kind, number, body))
        return self._result(answer, _CALL_S)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._socket.close()

    def _result(self, answer: Future[bytes], timeout_s: float) -> bytes:
        try:
            return answer.result(timeout_s)
        except NotInTimeError as error:
            self._process.kill()
            raise PlaneUnavailableError(
                f"the process that speaks NIXL did not answer for {timeout_s:g} s and was ended"
            ) from error

    def _read(self) -> None:
        while True:
            try:
                packet = self._socket.recv(packets.MAX_PACKET_BYTES)
            except OSError:
                break
            if len(packet) < packets.HEADER.size:
                break
            done, number, body = packets.unpacked(packet)
            with self._lock:
                answer = self._waiting.pop(number, None)
            if answer is None:
                continue
            if done:
                answer.set_result(body)
            else:
                text = body.decode(errors="replace")
                answer.set_exception(PlaneUnavailableError(f"NIXL refuses: {text}"))
        with self._lock:
            self._has_ended = True
            waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(_ended())


def _ended() -> PlaneUnavailableError:
    return PlaneUnavailableError("the process that speaks NIXL has ended")
