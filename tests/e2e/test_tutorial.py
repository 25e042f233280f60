"""The programs of the tutorial and of the page on clients do what these pages say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.planes import Planes

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = ROOT / "models" / "recall"


def pieces(document: str, language: str = "python") -> list[str]:
    """The code of a document, in order."""
    text = (ROOT / "docs" / document).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def planes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planes]:
    flags = ["--model", str(MODEL), "--num-device-blocks", "64", "--num-host-blocks", "4"]
    with Planes(tmp_path_factory.mktemp("planes"), flags) as planes:
        yield planes


def run(program: str, *arguments: str) -> str:
    """What a program prints when it runs without a fault."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


ANSWER = "abc=xyz;def=uvw;ghi=rst;?def=uvw;\n"


def test_the_decode_loop_answers_right_and_finds_its_prompt_cached_the_second_time(
    planes: Planes,
) -> None:
    *program, _ = pieces("tutorial.md")
    assert sum(bool(line) for piece in program for line in piece.splitlines()) <= 60
    outputs = [run("".join(program), planes.control.address) for _ in range(2)]
    assert outputs[0] == "0 of 29 tokens were cached\n" + ANSWER
    assert outputs[0] in (ROOT / "docs" / "tutorial.md").read_text()
    assert outputs[1] == "16 of 29 tokens were cached\n" + ANSWER


def test_the_decode_loop_runs_embedded_with_two_pieces_changed(planes: Planes) -> None:
    *program, start, embedded = pieces("tutorial.md")
    output = run("".join((*program, embedded, start)), planes.control.address)
    assert output == "0 of 29 tokens were cached\n" + ANSWER
