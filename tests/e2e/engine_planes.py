"""Planes as processes that a test can kill and start again, each at an address of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from dataclasses import asdict
from pathlib import Path

from kvplane.layout import Layout
from kvplane.results import PoolInfo
from kvplane.sync import ControlClient
from tests.helpers.byte_model import VOCABULARY as VOCABULARY
from tests.helpers.byte_model import save_byte_model as save_byte_model
from tests.helpers.programs import ROOT as ROOT
from tests.helpers.programs import Program

POOL = "e2e"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def num_in_use(pool: PoolInfo) -> int:
    """Return the blocks held or retired. Every block must be in one state."""
    for tier in pool.usage:
        parts = (
            tier.num_free_blocks, tier.num_cached_blocks, tier.num_held_blocks,
            tier.num_retired_blocks,
        )  # fmt: skip
        assert min(parts) >= 0, pool
        assert sum(parts) == tier.num_blocks, pool
    return sum(t.num_held_blocks + t.num_retired_blocks for t in pool.usage)


class Process:
    """One program at one address, from ``start`` on or as a context manager. A release's ``python``
    runs it in ``folder``.
    """

    def __init__(
        self,
        program: str,
        log: Path,
        *arguments: str,
        python: Path | None = None,
        folder: Path = ROOT,
    ) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._program = program
        self._arguments = ("--bind", self.address, "--metrics-port", "-1", *arguments)
        self._log = log
        self._python = python
        self._folder = folder
        self._process: Program | subprocess.Popen[bytes] | None = None

    def start(self) -> Process:
        if self._python is None:
            self._process = Program(self._program, *self._arguments, out=self._log)
            return self
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._python, "-m", self._program, *self._arguments],
                cwd=self._folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def __enter__(self) -> Process:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was not started"
        return self._process.pid

    def wait(self, timeout_s: float) -> int:
        """Until it ends by itself; its exit code."""
        assert self._process is not None, "it was not started"
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """End the process at once, as a machine that loses power does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            self.kill()


def data_plane(
    control: str, served: Path | Layout | None, log: Path, *flags: str, pool_id: str = POOL
) -> Process:
    """A data plane of a model's folder, or of a layout; ``flags`` say what it serves if None. It
    is not started.
    """
    what = () if served is None else ("--model", str(served))
    if isinstance(served, Layout):
        what = ("--layout", str(log.with_suffix(".json")))
        log.with_suffix(".json").write_text(json.dumps(asdict(served)))
    where = ("--control-plane", control, "--pool-id", pool_id, "--num-threads", "1")
    return Process("data_plane", log, *where, *what, *flags)


class Pair:
    """A control plane and a data plane of one small pool, which is ready when it is entered."""

    def __init__(
        self,
        served: Path | Layout | None,
        logs: Path,
        *,
        num_device_blocks: int = 64,
        num_host_blocks: int = 16,
        lease_s: float = 10.0,
        arguments: tuple[str, ...] = (),
        pool_id: str = POOL,
        shared_memory: bool = True,
    ) -> None:
        self._pool_id = pool_id
        self.control = Process("control_plane", logs / "control.log", "--lease-s", str(lease_s))
        self.data = data_plane(
            self.control.address, served, logs / "data.log",
            "--num-device-blocks", str(num_device_blocks),
            "--num-host-blocks", str(num_host_blocks),
            *([] if shared_memory else ["--num-local-regions", "0"]),
            *arguments, pool_id=pool_id,
        )  # fmt: skip

    def __enter__(self) -> Pair:
        self.control.start()
        self.data.start()
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        with ControlClient(self.control.address) as control:
            control.wait_ready(self._pool_id, 60.0)

    def __exit__(self, *_: object) -> None:
        self.data.stop()
        self.control.stop()


def opaque_pair(
    logs: Path, page_bytes: int, model_id: str, *flags: str, num_device_blocks: int
) -> Pair:
    """Return planes that keep opaque pages, in the pool that plug-ins of engines use by default."""
    return Pair(
        None, logs, num_device_blocks=num_device_blocks, num_host_blocks=0, pool_id="default",
        arguments=("--opaque-page-bytes", str(page_bytes), "--model-id", model_id, *flags),
    )  # fmt: skip
