"""Planes in processes of their own, an honest caller of them, and attackers in the test.

with ControlPlaneProcess(folder) as plane, HonestCaller(plane) as honest:
    calm = honest.period(0.5)
    with honest.meanwhile(2.0) as during:
        ...attack...
    plane.peak_bytes()
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc

from kvplane.errors import KvplaneError
from kvplane.wire.error_codec import from_rpc_error
from tests.helpers.data.plan_author import LAYOUT, POOL_ID, PlanAuthor
from tests.helpers.planes_in_process import write_layout
from tests.helpers.planning.register_side import RegisterSide
from tests.helpers.waiting import wait_until

CALLER = Path(__file__).with_name("honest_caller.py")
ROOT = Path(__file__).parents[2]
START_S = 30.0
PATIENCE_S = 30.0
# Longest wait of a caller beside an attack: 50 ms, and a multiple of its wait in quiet.
RATIO = 10.0
LONGEST_S = 0.05
QUIET_S = 0.3
_ATTEMPTS = 5


class PlaneProcess:
    """A plane as an operator starts it."""

    def __init__(
        self, program: str, folder: Path, *flags: str, variables: Mapping[str, str] | None = None
    ) -> None:
        port_file = folder / f"{program}.port"
        self.log_file = folder / f"{program}.log"
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", program, "--bind", "127.0.0.1:0"),
                    *("--metrics-port", "-1", "--port-file", str(port_file), "--grace-s", "1"),
                    *flags,
                ],
                cwd=ROOT,
                env={**environment(), **(variables or {})},
                stderr=log,
            )
        wait_until(port_file.exists, START_S, self.log_file.read_text)
        self.address = f"127.0.0.1:{port_file.read_text().strip()}"

    def __enter__(self) -> PlaneProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S * 2)

    def begin_peak(self) -> int:
        """Forget the peak of the memory so far; returns the bytes in use."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self._status("VmRSS")

    def peak_bytes(self) -> int:
        """Return the most memory in use since ``begin_peak``."""
        return self._status("VmHWM")

    def num_descriptors(self) -> int:
        return len([*Path(f"/proc/{self.process.pid}/fd").iterdir()])

    def _status(self, name: str) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        raise AssertionError(name)


@asynccontextmanager
async def data_plane_process(
    folder: Path, num_blocks: int, *flags: str, variables: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[PlaneProcess, RegisterSide, PlanAuthor]]:
    """Run a data plane that a test's own control plane has accepted. Yields the process, that
    control plane, and the author of its plans.
    """
    side = await RegisterSide(heartbeat_s=1.0).start()
    own = ["--control-plane", side.address, "--pool-id", POOL_ID, "--num-threads", "1"]
    own += ["--layout", str(write_layout(folder, LAYOUT)), "--num-device-blocks", str(num_blocks)]
    with PlaneProcess("data_plane", folder, *own, *flags, variables=variables) as plane:
        async with asyncio.timeout(PATIENCE_S):
            await side.accepted.wait()
        yield plane, side, PlanAuthor(side.hellos[-1].epoch, side.incarnation, side.key)
    await side.stop()


class HonestCaller:
    """Runs the engine of ``honest_caller.py`` on a control plane."""

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(CALLER), "engine", address],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def __enter__(self) -> HonestCaller:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def period(self, seconds: float) -> list[float]:
        """Return the latencies of its steps in so many seconds."""
        self._begin(seconds)
        return self._read()

    @contextmanager
    def meanwhile(self, seconds: float) -> Iterator[list[float]]:
        """Yield its latencies while the body runs; filled in after it."""
        latencies: list[float] = []
        self._begin(seconds)
        try:
            yield latencies
        finally:
            latencies += self._read()

    def _begin(self, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def _read(self) -> list[float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the honest caller has failed"
        latencies: list[float] = json.loads(line)
        return latencies


def delimited(number: int, data: bytes) -> bytes:
    """Return the encoded field of that number which holds these bytes."""
    length, rest = [], len(data)
    while rest > 0x7F:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([number << 3 | 2, *length, rest]) + data


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def p99(latencies: list[float]) -> float:
    assert len(latencies) >= 5, "too few steps to say anything"
    return sorted(latencies)[int(0.99 * len(latencies))]


def assert_calm(honest: HonestCaller, attack: Callable[[], list[float]]) -> None:
    """Assert that a caller waits little more beside the attack than without it. ``attack`` returns
    the honest caller's latencies during it.

    Quiet is measured right before and right after, because other work on the machine comes and
    goes. Other work can also delay everything for a moment, so only one of a few attacks has to be
    calm: an attack that delays others does so every time.
    """
    tried = []
    quiet_s = p99(honest.period(QUIET_S))
    for _ in range(_ATTEMPTS):
        during_s = p99(attack())
        before_s, quiet_s = quiet_s, p99(honest.period(QUIET_S))
        allowed_s = LONGEST_S + RATIO * max(before_s, quiet_s)
        if during_s <= allowed_s:
            return
        tried.append(f"{during_s:.3f} s beside the attack, where {allowed_s:.3f} s is allowed")
    raise AssertionError("p99 " + "; ".join(tried))


def refusal(
    channel: grpc.Channel,
    method: str,
    requests: bytes | Iterator[Any],
    *,
    timeout_s: float = PATIENCE_S,
) -> KvplaneError | None:
    """Return the error that refuses a call; None when it is answered. ``requests``: the bytes of a
    unary call's, or the messages of a stream's. ``method``: "v1.SERVICE/METHOD".
    """
    path = f"/kvplane.{method}"
    try:
        if isinstance(requests, bytes):
            channel.unary_unary(path)(requests, timeout=timeout_s)
        else:
            encoded = (request.SerializeToString() for request in requests)
            next(channel.stream_stream(path)(encoded, timeout=timeout_s))
    except grpc.RpcError as error:
        return from_rpc_error(error)
    return None
