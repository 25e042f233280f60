"""Python programs as processes that need not import torch and transformers each.

They are forked from a process that has imported both, but nothing of this project, nor gRPC.
Programs are started as users start them in tests/e2e/test_up.py, among others.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
_IMPORTED: Final = ("torch", "transformers.models.llama.modeling_llama")
_FORKS: Final = multiprocessing.get_context("forkserver")


class Program:
    """``python -m module arguments``; the module "-c" runs its first argument, a program's text.

    Methods are those of ``Popen``.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        out: Path,
        err: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        """``out`` and ``err`` are files to append to, ``err`` the same one if None. ``env`` is
        added to this process's environment.
        """
        _FORKS.set_forkserver_preload([*_IMPORTED])
        variables = os.environ | (env or {})
        self._process = _FORKS.Process(
            target=_run, args=(module, arguments, out, err or out, variables, cwd), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout_s or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    module: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``subprocess.run`` does with captured output."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        program = Program(module, *arguments, out=out, err=err, env=env, cwd=cwd)
        try:
            code = program.wait(timeout_s)
        finally:
            program.kill()
        printed = out.read_text(), err.read_text()
        return subprocess.CompletedProcess((module, *arguments), code, *printed)


def called(
    *command: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str | None] | None = None,
    timeout_s: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run any command to its end and capture what it prints. ``env`` is added to this process's
    environment; a variable that is None there is left out.
    """
    variables = dict(os.environ) | (env or {})
    return subprocess.run(
        command,
        cwd=cwd,
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def printed(*command: str | Path, **how: Any) -> str:
    """Return what a command prints that ends well. ``how``: as of ``called``."""
    done = called(*command, **how)
    said = f"{command}\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
    assert done.returncode == 0, said
    return done.stdout


def _run(
    module: str,
    arguments: tuple[str, ...],
    out: Path,
    err: Path,
    variables: dict[str, str],
    cwd: Path,
) -> None:
    gc.freeze()  # or each collection would visit, and so copy, what was imported before
    for stream, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(file, stream)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = [str(cwd), str(ROOT)]
    try:
        if module == "-c":
            text, *sys.argv[1:] = arguments
            exec(text, {"__name__": "__main__"})
        else:
            sys.argv[1:] = arguments
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which such a child would not do
