"""A process beside the test's that opens memory of a GPU: a real one's, or the emulated one's
(KVPLANE_DEVICE_BACKEND).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

_WAIT_S = 60.0


def num_gpu_maps() -> int:
    """Return the number of this process's mappings of the emulated GPU's memory."""
    return Path("/proc/self/maps").read_text().count("kvplane-emulated-gpu")


class OtherProcess:
    """The test's end. ``call`` makes the process call a method of its ``role``."""

    def __init__(self, role: type[MemoryUser]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(role, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, name: str, *args: Any, **fields: Any) -> Any:
        """Return the method's result; raise its error."""
        self._pipe.send((name, args, fields))
        assert self._pipe.poll(_WAIT_S), f"no answer to {name}"
        result = self._pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    async def soon(self, name: str, *args: Any, **fields: Any) -> Any:
        """Run ``call`` beside the event loop."""
        return await asyncio.to_thread(self.call, name, *args, **fields)

    def kill(self) -> None:
        """Kill it as the system does to a process that takes too much memory."""
        self.process.kill()
        self.process.join()
        self._pipe.close()


class MemoryUser:
    """The memory's user in the other process."""

    def __init__(self) -> None:
        sys.path.append(str(Path(__file__).parents[2] / "kernels"))
        self.native = import_module("backends").chosen_backend().native
        self.held: list[Any] = []

    def open_memory(self, handle: bytes, num_bytes: int, file: int = -1) -> bytes:
        """Open memory of another process. Return its first bytes, and write into it."""
        memory = self.native.open_shared(device=0, handle=handle, num_bytes=num_bytes, file=file)
        whole: torch.Tensor = torch.utils.dlpack.from_dlpack(memory.dlpack())
        before = bytes(whole[:16].cpu().numpy())
        whole[-1] = 7
        if whole.is_cuda:
            torch.cuda.synchronize()
        self.held.append(whole)
        return before

    def open_memory_with_file(self, handle: bytes, num_bytes: int, path: str) -> bytes:
        """Open memory by a file that nothing else here keeps open."""
        file = os.open(path, os.O_WRONLY)
        try:
            return self.open_memory(handle, num_bytes, file)
        finally:
            os.close(file)

    def let_go(self) -> None:
        self.held.clear()

    def num_maps(self) -> int:
        return num_gpu_maps()


def _run(role: type[MemoryUser], pipe: Connection) -> None:
    torch.set_num_threads(1)
    made = role()
    while True:
        try:
            name, args, fields = pipe.recv()
        except EOFError:
            return
        try:
            result = getattr(made, name)(*args, **fields)
        except Exception as error:  # the test's to judge
            result = error
        pipe.send(result)
