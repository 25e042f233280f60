"""The processes that chaos is made of: a control plane, data planes and engines, each behind links
that lose what they carry.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvplane import ControlClient
from kvplane.errors import KvplaneError
from tests.chaos.engine_worker import QUESTIONS
from tests.e2e.engine_planes import ROOT, free_port, num_in_use
from tests.helpers.lossy_link import LossyLink

LEASE_S = 3.0
# A pool that the engines on it cannot all fit into: they wait, swap and are cut.
NUM_DEVICE_BLOCKS = 40
NUM_HOST_BLOCKS = 16
# By name: the pool, and the flags of a shard.
DATA_PLANES = {
    "data": ("one",),
    "shard-0": ("two", "--num-shards", "2", "--shard-index", "0"),
    "shard-1": ("two", "--num-shards", "2", "--shard-index", "1"),
}
# The pool of each engine.
ENGINES = ("one", "one", "two", "embedded")
PATIENCE_S = 120.0  # for an answer once nothing is broken any more

Answer = list[list[list[int]]]


class Program:
    """A process that is killed, stopped and started again."""

    def __init__(self, name: str, log: Path, *arguments: str) -> None:
        self.name = name
        self._arguments = arguments
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self.clock_offset_s = 0  # of a process that is started

    async def start(self) -> None:
        """Start it, unless another fault has done so meanwhile."""
        async with self._starting:
            if not self.is_running:
                await self._start()

    async def _start(self) -> None:
        faked = ["faketime", "-f", f"{self.clock_offset_s:+d}s"] if self.clock_offset_s else []
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(*faked, sys.executable, "-m", *self._arguments),
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # faketime's child is signalled with it
            )

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    async def kill(self) -> None:
        """As a machine that loses power."""
        if self.is_running:
            self.signal(signal.SIGKILL)
            await self.process.wait()


@dataclass
class Engine:
    """An engine process, which is asked one set of prompts after another."""

    program: Program
    wanted: dict[int, Answer]
    num_answers: int = 0
    num_starts: int = 0
    wrong: list[str] = field(default_factory=list)

    async def answer(self, number: int) -> None:
        """Have one set answered, by as many processes as it takes, and compare."""
        while True:
            if not self.program.is_running:
                await self.program.start()
                self.num_starts += 1
                if await self._line() is None:
                    continue
            with contextlib.suppress(ConnectionError):
                assert self.program.process.stdin is not None
                self.program.process.stdin.write(b"%d\n" % number)
                await self.program.process.stdin.drain()
            said = await self._line()
            if said is not None:
                break
        if said["errors"] or self.wanted.setdefault(number, said["tokens"]) != said["tokens"]:
            self.wrong.append(f"{self.program.name}, set {number}: {said}")
        self.num_answers += 1

    async def _line(self) -> Any:
        """What the process says next; None when it has ended."""
        assert self.program.process.stdout is not None
        line = await self.program.process.stdout.readline()
        if line:
            return json.loads(line)
        await self.program.process.wait()
        return None


class Fleet:
    """Pool "one" of one data plane with two engines, pool "two" of two shards with one, and pool
    "embedded" inside of an engine. The control plane and each data plane is reached through a link.
    """

    def __init__(
        self,
        model: Path,
        logs: Path,
        data_plane: Sequence[str] = ("data_plane",),
        engines: Sequence[str] = ENGINES,
    ) -> None:
        """``data_plane``: the module that is run as the data plane, and its first arguments.
        ``engines``: the pool of each; other pools have no data planes.
        """
        self._pools = engines
        self.data_planes = [name for name, (pool, *_) in DATA_PLANES.items() if pool in engines]
        names = ("control", *self.data_planes)
        self._addresses = {name: f"127.0.0.1:{free_port()}" for name in names}
        self.links = {name: LossyLink(address) for name, address in self._addresses.items()}
        self._model, self._logs, self._data_plane = str(model), logs, data_plane
        self.planes: dict[str, Program] = {}
        self.engines: list[Engine] = []

    async def start(self) -> None:
        for link in self.links.values():
            await link.open()
        via = self.links["control"].address
        common = ("--metrics-port", "-1", "--log-level", "warning")
        self.planes["control"] = Program(
            "control", self._logs / "control.log",
            *("control_plane", "--bind", self._addresses["control"], "--lease-s", str(LEASE_S)),
            *("--election", f"file:{self._logs / 'leader'}"),
            *common,
        )  # fmt: skip
        for name in self.data_planes:
            pool, *shard = DATA_PLANES[name]
            self.planes[name] = Program(
                name, self._logs / f"{name}.log",
                *(*self._data_plane, "--bind", self._addresses[name], "--control-plane", via),
                *("--advertise", self.links[name].address, "--model", self._model, *common),
                *("--pool-id", pool, "--num-device-blocks", str(NUM_DEVICE_BLOCKS)),
                *("--num-host-blocks", str(NUM_HOST_BLOCKS), *shard),
            )  # fmt: skip
        for plane in self.planes.values():
            await plane.start()
        wanted: dict[int, Answer] = {}  # by set: what the first answer was, when nothing was broken
        for i, pool in enumerate(self._pools):
            name = f"engine-{i}"
            where = "embedded" if pool == "embedded" else "remote"
            program = Program(
                name, self._logs / f"{name}.log",
                *("tests.chaos.engine_worker", self._model, via, pool, where),
            )  # fmt: skip
            self.engines.append(Engine(program, wanted))
        for number in range(len(QUESTIONS)):
            await asyncio.gather(*(engine.answer(number) for engine in self.engines))

    async def stop(self) -> None:
        for program in (*(e.program for e in self.engines), *self.planes.values()):
            program.signal(signal.SIGCONT)
            await program.kill()
        for link in self.links.values():
            await link.close()

    async def heal(self) -> None:
        """Nothing is broken any more."""
        for link in self.links.values():
            link.heal()
        for program in (*self.planes.values(), *(e.program for e in self.engines)):
            if program.is_running:
                program.signal(signal.SIGCONT)
        for plane in self.planes.values():
            if not plane.is_running:
                await plane.start()

    async def check_nothing_is_held(self) -> None:
        """Raises AssertionError when a block is in no state or in two, or stays in use."""
        async with ControlClient(self._addresses["control"]) as control:
            deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
            for pool_id in {*self._pools} - {"embedded"}:
                pool = None
                while True:
                    with contextlib.suppress(KvplaneError):
                        pool = await control.get_pool(pool_id)
                        if pool.ready and num_in_use(pool) == 0:
                            break
                    in_time = asyncio.get_running_loop().time() < deadline_s
                    assert in_time, f"blocks stay in use: {pool}"
                    await asyncio.sleep(0.1)
