"""Faults planted in the CPU kernels' thread pool are found by many callers on few CPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.source_faults import ROOT, copy_csrc, plant

KERNEL_TESTS = ROOT / "tests" / "kernels"
sys.path.insert(0, str(KERNEL_TESTS))

from emulated_build import build  # noqa: E402

# Name: the text in the thread pool, and what takes its place.
MUTANTS = {
    "a_caller_that_does_not_wait": (
        "while (slot.word.load() == awaited) sleep_while(slot.word, awaited);",
        "",
    ),
    "a_sleeping_caller_that_is_not_woken": (
        "== kAwaited) wake(slot->word);",
        "== kAwaited) {}",
    ),
    "a_helper_that_finishes_before_it_works": (
        "      slot->job->work(slot->worker);\n",
        "      Job* job = slot->job;\n"
        "      slot->word.exchange(in_state(word, kIdle));\n"
        "      job->work(slot->worker);\n",
    ),
    "an_offer_that_stays_after_its_call": (
        "if (slot.word.compare_exchange_strong(word, in_state(offered, kIdle))) return;",
        "if (slot.word.load() == word) return;",
    ),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    csrc = copy_csrc(tmp_path)
    pool = csrc / "cpu" / "thread_pool.cpp"
    plant(pool, *MUTANTS[name])
    sources = (KERNEL_TESTS / "thread_pool_callers.cpp", pool)
    program = build(csrc, sources, flags=("-fsanitize=thread",), link_flags=("-pthread",))
    # A busy machine may not come to what the fault needs in one run.
    assert any(
        subprocess.run([str(program), "2", "16"], capture_output=True, timeout=60).returncode
        for _ in range(6)
    )
