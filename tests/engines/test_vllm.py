"""vLLM itself, on a CPU: what it takes from the pool changes no answer and holds up no request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from unittest import SkipTest

import pytest

from scripts.planes import ROOT, Plane, start

PYTHON: Final = ROOT / "build/engines/vllm/bin/python"
SIGNATURES: Final = ROOT / "integrations/vllm/tests/signatures.txt"
PATIENCE_S: Final = 300.0
ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


class Engine:
    """vLLM as a process. ``tier``: options of kvplane's; None for vLLM alone."""

    def __init__(self, log: Path, tier: dict[str, Any] | None) -> None:
        self.log = log
        program = Path(__file__).with_name("vllm_process.py")
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [PYTHON, program, json.dumps(tier)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env=os.environ | ENVIRONMENT,
            )

    def answer(self, seed: int, salt: str = "a") -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"seed": seed, "salt": salt}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError(self.log.read_text()[-2000:])

    def end(self) -> None:
        """End it as its user would."""
        try:
            self.process.communicate(timeout=PATIENCE_S)
        finally:
            self.process.kill()


@pytest.fixture(autouse=True)
def installed() -> None:
    if not PYTHON.exists():
        raise SkipTest("make test-engines installs vLLM")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def plane(stack: ExitStack, tmp_path: Path) -> Callable[..., Plane]:
    """Starts a plane."""

    def plane(program: str, *flags: str, bind: str = "127.0.0.1:0") -> Plane:
        log = stack.enter_context((tmp_path / f"{program}.log").open("ab"))
        return start(stack, program, *flags, "--metrics-port", "-1", bind=bind, output=log)

    return plane


def kill(plane: Plane) -> None:
    plane.process.kill()
    plane.process.wait()


def test_the_stand_ins_were_made_from_this_release() -> None:
    command = [PYTHON, SIGNATURES.with_suffix(".py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    wanted = [line.split(": ", 1) for line in SIGNATURES.read_text().splitlines()]
    found = [line for line in printed.splitlines() if line in SIGNATURES.read_text()]
    assert found == [line for numbers, line in wanted if "0.32" in numbers.split()]


def test_answers_are_those_of_vllm_alone_whatever_ends(plane, stack, tmp_path: Path) -> None:
    def engine(name: str, tier: dict[str, Any] | None) -> Engine:
        made = Engine(tmp_path / f"{name}.log", tier)
        stack.callback(made.process.kill)
        return made

    num_same = num_answers = 0

    def check(given: dict[str, Any], seed: int) -> dict[str, Any]:
        nonlocal num_same, num_answers
        pairs = [*zip(given["answers"], expected[seed]["answers"], strict=True)]
        num_answers += len(pairs)
        num_same += sum(one == other for one, other in pairs)
        return given

    control = plane("control_plane")
    sizes = ("--num-device-blocks", "512", "--control-plane", control.address)
    data = plane("data_plane", "--opaque-page-bytes", "64", "--model-id", "another's", *sizes)
    tier = {"control_plane": control.address}
    refused = engine("refused", tier)
    refused.end()
    log = refused.log.read_text()
    assert "model_id vllm-0.32/models/recall/" in log and "and not another's" in log
    (layout,) = {line[line.index("{") :] for line in log.splitlines() if "--layout FILE" in line}
    (tmp_path / "layout.json").write_text(layout)
    kill(data)
    flags = ("--layout", str(tmp_path / "layout.json"), *sizes)
    data = plane("data_plane", *flags)

    alone = engine("alone", None)
    expected = {seed: alone.answer(seed) for seed in (1, 2, 3)}
    alone.end()
    first = engine("first", tier)
    for seed in (1, 2, 3):
        assert check(first.answer(seed), seed)["num_cached"] == 0
    first.end()

    kill(control)
    plane("control_plane", bind=control.address)
    second = engine("second", tier)
    assert check(second.answer(1, salt="b"), 1)["num_cached"] == 0
    taken = check(second.answer(1), 1)
    assert taken["num_cached"] >= 0.8 * taken["num_tokens"]
    data.process.send_signal(signal.SIGSTOP)
    slow = check(second.answer(2), 2)
    assert slow["taken_s"] < expected[2]["taken_s"] + 2
    kill(data)
    plane("data_plane", *flags)
    assert check(second.answer(3), 3)["num_cached"] == 0
    second.end()
    print(f"identical answers: {num_same}/{num_answers}")
    assert num_same == num_answers == 7 * len(expected[1]["answers"])
