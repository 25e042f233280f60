"""Every test begins from the same random state; the header of a run says which.

The tests run side by side on all cores, so each process computes on one thread: OpenMP's threads
wait by spinning, and too many of them make a second's work take a minute. How long an example of
hypothesis takes says how busy the machine is, so none has a deadline.
"""

from __future__ import annotations

import gc
import os
import random
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.tools import REASON

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; children inherit it

settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")

INTEGRATIONS = Path(__file__).parent / "integrations"
BY_DAY = {INTEGRATIONS / name for name in ("chunks", "lmcache", "sglang", "vllm")}
SEED = int(os.environ.get("KVPLANE_TEST_SEED", "0"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(SEED)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of integrations run at night, but those of engines' plug-ins, and those of fleets,
    which need Ray. Of tests that would be the last to run, all workers but one would wait for the
    end.
    """
    at_night = {
        path
        for path in {item.path for item in items}
        if INTEGRATIONS in path.parents and not BY_DAY & {*path.parents}
    }
    for item in items:
        if item.path in at_night and item.get_closest_marker("fleet") is None:
            item.add_marker(pytest.mark.nightly)
    items.sort(key=lambda item: item.get_closest_marker("early") is None)


def pytest_sessionstart() -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as shells have it in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection() -> None:
    gc.disable()  # modules are imported, of which nothing is garbage


def pytest_collection_finish() -> None:
    """Exclude modules and test items, which last, from the garbage collector's passes."""
    gc.freeze()
    gc.enable()


def pytest_report_header() -> str:
    return f"seed: {SEED} (KVPLANE_TEST_SEED)"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests were skipped for want of programs, and the line that installs them."""
    packages, num_tests = set(), 0
    for report in terminalreporter.stats.get("skipped", ()):
        _, found, names = str(report.longrepr).partition(REASON)
        if found:
            num_tests += 1
            packages.update(names.rstrip("')").split())
    if num_tests:
        names = " ".join(sorted(packages))
        says = f"tests skipped for want of programs: {num_tests}; apt install {names}"
        terminalreporter.write_line(says)
