"""The kernels' threads serve any number of callers, and a child of fork() has its own."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from emulated_build import ROOT
from emulated_build import build as build_program
from kernel_cases import Case, assert_same_bits, build

from tests.helpers.programs import called, printed

IN_A_CHILD = """
import os
from kernel_cases import Case, build
batch = build(Case(lens=((1, 3000), (40, 600)), heads=(8, 2), head_size=128))
expected = batch.attend(num_threads=4)[0].numpy().tobytes()
child = os.fork()
if child == 0:
    out = batch.attend(num_threads=4)[0].numpy().tobytes()
    os._exit(0 if out == expected else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_callers_at_once_get_the_bits_of_a_caller_alone() -> None:
    batches = [build(Case(lens=((1, 2000), (9, 300)), heads=(8, 2), seed=s)) for s in range(4)]
    expected = [batch.attend(num_threads=1) for batch in batches]

    def attend(index: int) -> None:
        for num_threads in (1, 2, 3, 8) * 5:
            answers[index].append(batches[index].attend(num_threads=num_threads))

    answers = [[expected[index]] for index in range(4)]
    callers = [threading.Thread(target=attend, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for index, (out, lse) in enumerate(expected):
        assert len(answers[index]) == 21
        for other_out, other_lse in answers[index]:
            assert_same_bits(other_out, out)
            assert_same_bits(other_lse, lse)


def test_a_child_of_fork_computes_the_same() -> None:
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = called(sys.executable, "-c", IN_A_CHILD, env=env, timeout_s=20)
    assert result.stdout.strip() == "0", result.stdout + result.stderr


@pytest.mark.parametrize(
    "flags",
    ((), pytest.param(("-fsanitize=thread",), marks=pytest.mark.nightly)),
    ids=("plain", "tsan"),
)
def test_many_callers_on_few_cpus_wait_for_their_own_items(flags: tuple[str, ...]) -> None:
    csrc = ROOT / "csrc"
    sources = (Path(__file__).parent / "thread_pool_callers.cpp", csrc / "cpu" / "thread_pool.cpp")
    program = build_program(csrc, sources, flags=flags, link_flags=("-pthread",))
    printed(program, "2", "16", timeout_s=60)
