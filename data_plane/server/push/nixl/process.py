"""The agent process, as the data plane has it: it is started, asked, and ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTimeError
from contextlib import ExitStack, suppress
from typing import Final

from data_plane.server.push.nixl import packets
from kvplane.errors import PlaneUnavailableError

# Importing the library and reading a network's interfaces takes a second or two.
_START_S: Final = 30.0
# How long a push waits for that.
READY_S: Final = 5.0
# For requests that wait for no peer. One of them has UCX load a peer's metadata.
CALL_S: Final = 4.0
# What the process gets of the environment, which may hold keys and tokens: names, and beginnings.
_PASSED: Final = {"PATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "LANG", "TZ"}
_PASSED_BEGINNINGS: Final = (
    *("UCX_", "NIXL_", "CUDA_", "NVIDIA_", "PYTHON", "LC_"),
    *("RDMAV_", "IBV_", "MLX5_"),
)


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
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, ExitStack() as on_error:
            on_error.callback(self._socket.close)
            module = f"{__package__}.agent"
            numbers = (theirs.fileno(), staging_fd, num_shares, share_bytes)
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, numbers)],
                pass_fds=(theirs.fileno(), staging_fd),
                stdin=subprocess.DEVNULL,
                env=_environment(os.environ, only_loopback=only_loopback),
            )
            on_error.pop_all()
        self._started_s = time.monotonic()
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

    def wait_until_ready(self, timeout_s: float = READY_S) -> None:
        """Until it can be asked. One that takes too long to start is ended."""
        try:
            self._ready.result(timeout_s)
        except NotInTimeError as error:
            if time.monotonic() - self._started_s > _START_S:
                self.end()
            raise PlaneUnavailableError("the process that speaks NIXL is still starting") from error

    def call(self, kind: int, body: bytes = b"") -> bytes:
        """The answer to a request that waits for no peer, nor for the start."""
        self.wait_until_ready(0)
        try:
            return self.begin(kind, body).result(CALL_S)
        except NotInTimeError as error:
            self.end()
            raise PlaneUnavailableError(
                f"the process that speaks NIXL did not answer for {CALL_S:g} s and was ended"
            ) from error

    def begin(self, kind: int, body: bytes = b"") -> Future[bytes]:
        """The answer to a request, which may come at any time, and comes when the process ends."""
        answer: Future[bytes] = Future()
        with self._lock:
            if self._has_ended:
                raise _ended()
            self._last_number = number = self._last_number % 0xFFFF_FFFF + 1
            self._waiting[number] = answer
        with suppress(OSError):  # it has ended, so the reader answers
            self._socket.send(packets.packed(kind, number, body))
        return answer

    def tell(self, kind: int, body: bytes = b"") -> None:
        """A request whose answer is of no interest. Does not raise."""
        with suppress(PlaneUnavailableError):
            self.begin(kind, body)

    def end(self) -> None:
        """Have it end, and with it what it does."""
        self._process.kill()

    def close(self) -> None:
        """Returns when it has ended."""
        self.end()
        self._process.wait()
        self._reader.join()
        self._socket.close()

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


def _environment(ours: Mapping[str, str], *, only_loopback: bool) -> dict[str, str]:
    defaults = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
    if only_loopback:
        defaults["UCX_NET_DEVICES"] = "lo"
    passed = {
        name: value
        for name, value in ours.items()
        if name in _PASSED or name.startswith(_PASSED_BEGINNINGS)
    }
    return defaults | passed


def _ended() -> PlaneUnavailableError:
    return PlaneUnavailableError("the process that speaks NIXL has ended")
