"""Runs of pytest in processes of their own that need not import torch and gRPC each.

Faults are planted before the project is imported, so each such run is a process. They are forked
from one that has imported the project's dependencies, and nothing of the project.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).parents[2]
TESTS_FAILED = 1  # pytest's exit code; errors of other kinds have others
# None that has plugins for pytest, such as hypothesis: pytest has to be the first to import those.
IMPORTED = ("grpc.aio", "grpc_status.rpc_status", "numpy", "torch", "xxhash")


def run_pytest(
    *arguments: str | Path, cwd: Path, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m pytest -q -x`` with the arguments, in ``cwd``. Its output, of either stream,
    is in stdout.

    env: on top of this process's environment.
    """
    # For longer tracebacks pytest parses source, in which CPython 3.11 at times raises SystemError.
    listed = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", *map(str, arguments)]
    with tempfile.NamedTemporaryFile() as out:
        job = {"arguments": listed, "cwd": str(cwd), "env": {**os.environ, **env}, "out": out.name}
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        answer = ""
        try:
            server.stdin.write(json.dumps(job) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
        finally:
            if not answer:  # it has died, or the time of the test that waits is up
                os.killpg(server.pid, signal.SIGKILL)
                _server.cache_clear()
        return subprocess.CompletedProcess(listed, int(answer), Path(out.name).read_text())


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Return the process that forks. It ends when this one does, as its standard input ends."""
    server = subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(server.communicate)
    return server


def serve() -> None:
    """Run the command of each line of standard input, and print its exit code."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def run(job: dict[str, Any]) -> NoReturn:
    """Make the child a new process, and run pytest."""
    code = TESTS_FAILED + 1
    try:
        files = [os.open(os.devnull, os.O_RDONLY), os.open(job["out"], os.O_WRONLY | os.O_APPEND)]
        for stream, file in enumerate((*files, files[1])):
            os.dup2(file, stream)
        os.chdir(job["cwd"])
        os.environ.clear()
        os.environ.update(job["env"])
        sys.path[:0] = [job["cwd"], *job["env"].get("PYTHONPATH", "").split(os.pathsep)]
        code = int(pytest.main(job["arguments"]))
        sys.stdout.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
