"""Programs whose packages may not be installed: they say which extra has them."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Final

from kvplane.serving.event_loop import end_at_signals, tune_grpc

EXIT_NOT_INSTALLED: Final = 1
_OURS: Final = ("kvplane", "control_plane", "data_plane", "engine")


def what_is_missing(error: ImportError) -> str:
    """Say which module an import did not find and, if it is one of ours, which file of another
    module shadows it.
    """
    top = (error.name or "").partition(".")[0]
    other = sys.modules.get(top) if top in _OURS else None
    places = [getattr(other, "__file__", None), *getattr(other, "__path__", ())]
    taken = next((f": {place} has taken its name" for place in places if place), "")
    return f"{error.name} is missing{taken}" if error.name else str(error)


def run_or_explain(program: str, extra: str, run: Callable[[], int]) -> int:
    """Call ``run``, which imports a program's packages, and return its result. Reports a missing
    third-party package on one line, with the ``extra`` to install; empty for the base package.
    """
    _open_streams()
    try:
        return run()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing in _OURS:
            raise
        wanted = f"kvplane[{extra}]" if extra else "kvplane"
        sys.stderr.write(f"{program}: error: {missing} is not installed: pip install '{wanted}'\n")
        return EXIT_NOT_INSTALLED


def run_server(program: str, extra: str, module: str) -> int:
    """Call ``run`` of a server's module with the process's arguments and variables, and return its
    result. Signals end the process until it handles them. Reports as ``run_or_explain`` does.
    """
    end_at_signals()
    tune_grpc()

    def run() -> int:
        with imported_for_good():
            server = import_module(module)
        return int(server.run(sys.argv[1:], os.environ))

    return run_or_explain(program, extra, run)


@contextmanager
def imported_for_good() -> Iterator[None]:
    """Exclude objects that imports inside create from garbage collection. It would visit those of
    torch many times during the import, and once more when the process exits.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _open_streams() -> None:
    """Open standard streams that are closed on /dev/null. A socket would get their numbers, and
    what libraries print would go to it; uvloop aborts when it closes such a socket.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
