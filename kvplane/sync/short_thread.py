"""A thread that makes one call and ends."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final, TypeVar

Result = TypeVar("Result")

# How long the thread may take to end after an interrupt, before it is left to itself.
_LONGEST_END_S: Final = 5.0


def start_short_thread(
    function: Callable[[], Result],
) -> tuple[Future[Result], threading.Thread]:
    """Call ``function`` in a daemon thread of its own. Returns a future of its outcome, which
    cannot be cancelled, and the thread.
    """
    outcome: Future[Result] = Future()
    outcome.set_running_or_notify_cancel()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=call, name="short", daemon=True)
    thread.start()
    return outcome, thread


def call_in_short_thread(function: Callable[[], Result]) -> Result:
    """Call ``function`` in a thread that ends with it. Returns its result, or raises its error. An
    interrupt while waiting ends the call, by SystemExit at its next instruction of Python.

    Use it for torch work before the main compute thread begins. GNU OpenMP keeps the helpers of
    each thread that computed until that thread ends. Once it has more helpers than CPUs, none of
    them spins for its next work, so each operation has to wake them: on two CPUs a small model's
    step takes half as long again.
    """
    outcome, thread = start_short_thread(function)
    try:
        wait([outcome])
    except BaseException:  # by the handler of a signal
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
        )
        thread.join(_LONGEST_END_S)
        raise
    thread.join()
    return outcome.result()
