"""Faults in the CPU kernels' thread pool, which many callers on few CPUs notice."""

from __future__ import annotations

from tests.mutants.fault import Fault
from tests.mutants.machines import ThreadPoolCallers

POOL, CALLERS = "csrc/cpu/thread_pool.cpp", ThreadPoolCallers()

FAULTS = (
    Fault(
        "a_caller_that_does_not_wait",
        POOL,
        "while (helper.word.load() == awaited) sleep_while(helper.word, awaited);",
        "",
        CALLERS,
    ),
    Fault(
        "a_sleeping_caller_that_is_not_woken",
        POOL,
        "== kAwaited) wake(helper->word);",
        "== kAwaited) {}",
        CALLERS,
    ),
    Fault(
        "a_helper_that_finishes_before_it_works",
        POOL,
        "      helper->job->work(helper->worker);\n",
        "      Job* job = helper->job;\n"
        "      helper->word.exchange(in_state(word, kIdle));\n"
        "      job->work(helper->worker);\n",
        CALLERS,
    ),
    Fault(
        "an_offer_that_stays_after_its_call",
        POOL,
        "if (helper.word.compare_exchange_strong(word, in_state(offered, kIdle))) return;",
        "if (helper.word.load() == word) return;",
        CALLERS,
    ),
)
