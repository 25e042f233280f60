"""Runs an engine as a process that answers lines of JSON, and planes that are killed and started
again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Final

from kvplane.sync import ControlClient
from scripts.planes import ROOT, Plane, start

PATIENCE_S: Final = 300.0


class Engine:
    """An engine as a process, in a session of its own with all that it starts."""

    def __init__(
        self, command: Sequence[str | Path], environ: Mapping[str, str], log: Path
    ) -> None:
        self.log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env=os.environ | environ,
                start_new_session=True,
            )

    def ask(self, **question: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the answer to the oldest question that has none."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError(self.log.read_text()[-2000:])

    def end(self) -> None:
        """End it as its user would."""
        try:
            self.process.communicate(timeout=PATIENCE_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill it, with all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError), self.process:  # closes its pipes
            pass


class KilledPlanes:
    """A control plane and a data plane that are killed and started again. ``flags``: of the data
    plane.
    """

    def __init__(self, stack: ExitStack, folder: Path, *flags: str) -> None:
        self._stack, self._folder = stack, folder
        self.control = self._start("control_plane")
        self._client = stack.enter_context(ControlClient(self.control.address))
        self.start_data(*flags)

    def start_data(self, *flags: str) -> None:
        self._flags = flags
        to_control = ("--control-plane", self.control.address)
        self.data = self._start("data_plane", *flags, *to_control)
        self._client.wait_ready("default", PATIENCE_S)

    def kill(self, *programs: str) -> None:
        """Kill planes, all of them before the first is started again."""
        planes = [getattr(self, program) for program in programs]
        for plane in planes:
            plane.process.kill()
        for plane in planes:
            plane.process.wait()

    def restart(self, *programs: str) -> None:
        self.kill(*programs)
        if "control" in programs:
            self.control = self._start("control_plane", bind=self.control.address)
        if "data" in programs:
            self.start_data(*self._flags)
        self._client.wait_ready("default", PATIENCE_S)

    @property
    def num_used(self) -> int:
        """Blocks that the pool has cached, or that sessions hold."""
        pool = self._client.get_pool("default")
        return sum(each.num_cached_blocks + each.num_held_blocks for each in pool.usage)

    def _start(self, program: str, *flags: str, bind: str = "127.0.0.1:0") -> Plane:
        log: IO[bytes] = self._stack.enter_context((self._folder / f"{program}.log").open("ab"))
        return start(self._stack, program, *flags, "--metrics-port", "-1", bind=bind, output=log)
