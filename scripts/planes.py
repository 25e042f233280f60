"""Starts planes as processes that end with a block of code, and when this process is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Final, NamedTuple

from kvplane.cli.up import Process
from kvplane.errors import InvalidRequestError, PlaneUnavailableError

ROOT: Final = Path(__file__).resolve().parent.parent
START_TIMEOUT_S: Final = 60.0
_SETTINGS: Final = ("KVPLANE_CONTROL_PLANE_", "KVPLANE_DATA_PLANE_")


class Plane(NamedTuple):
    """A running plane."""

    process: subprocess.Popen[bytes]
    address: str


def start(
    stack: ExitStack,
    program: str,
    *arguments: str,
    bind: str = "127.0.0.1:0",
    python: Sequence[str] = (sys.executable,),
    output: IO[bytes] | None = None,
    settings: Mapping[str, str] | None = None,
) -> Plane:
    """Start a plane that serves at ``bind`` and ends with ``stack``. Ctrl-C does not reach it.

    ``program``: a module. ``settings``: its environment variables; by default its arguments are all
    of its settings. ``output``: where it writes; by default where this process does. Raises
    PlaneUnavailableError when it does not come up.
    """
    if settings is None:
        settings = {k: v for k, v in os.environ.items() if not k.startswith(_SETTINGS)}
    process = Process(
        stack,
        program,
        *arguments,
        bind=bind,
        environ=settings,
        python=python,
        output=output,
        cwd=ROOT,
    )
    end_s = time.monotonic() + START_TIMEOUT_S
    address = process.wait(lambda: process.popen.poll() is not None or time.monotonic() > end_s)
    if address is None:
        raise PlaneUnavailableError(f"{program} did not start")
    return Plane(process.popen, address)


class Planes(NamedTuple):
    """Both planes, running."""

    control: Plane
    data: Plane


@contextmanager
def run_planes(
    run_folder: Path,
    data_arguments: Sequence[str],
    python: Sequence[str] = (sys.executable,),
) -> Iterator[Planes]:
    """Run a control plane and a data plane on free ports, with logs in ``run_folder``. Raises
    PlaneUnavailableError naming the folder when one does not come up, InvalidRequestError when the
    logs can't be written.
    """
    with ExitStack() as stack:

        def run(program: str, *arguments: str) -> Plane:
            flags = (*arguments, "--metrics-port", "-1")
            log = stack.enter_context((run_folder / f"{program}.log").open("wb"))
            return start(stack, program, *flags, python=python, output=log)

        try:
            run_folder.mkdir(parents=True, exist_ok=True)
            control = run("control_plane")
            address = ("--control-plane", control.address)
            data = run("data_plane", *data_arguments, *address)
        except PlaneUnavailableError as error:
            raise PlaneUnavailableError(f"{error}; see {run_folder}") from error
        except OSError as error:
            reason = f"{run_folder} cannot be written: {error.strerror}"
            raise InvalidRequestError(reason, field="run_folder") from error
        yield Planes(control, data)
