"""The programs of the tutorial and of other pages do what these say; ``examples/load.py`` runs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.e2e.engine_planes import Pair
from tests.helpers.documents import blocks
from tests.helpers.programs import ROOT, run

PIECES = blocks("engine-guide.md", "python", "A decode loop, step by step")
MODEL = ROOT / "models" / "recall"


@pytest.fixture(scope="module")
def planes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(MODEL, tmp_path_factory.mktemp("planes"), pool_id="default") as planes:
        yield planes


def printed(program: str, *arguments: str) -> str:
    """What a program prints when it runs without a fault."""
    done = run("-c", program, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def computed(num_prompt_tokens: int) -> str:
    """What the loop prints when the prompt's plan computes so many tokens."""
    steps = [(num_prompt_tokens, 29), (1, 30), (1, 31), (1, 32)]
    return "".join(f"computes {num} of {of} tokens\n" for num, of in steps)


ANSWER = "abc=xyz;def=uvw;ghi=rst;?def=uvw;\n"


def test_the_decode_loop_answers_right_and_finds_its_prompt_cached_the_second_time(
    planes: Pair,
) -> None:
    *program, _ = PIECES
    assert sum(bool(line) for piece in program for line in piece.splitlines()) <= 50
    (loop,) = (piece for piece in program if piece.startswith("def decode("))
    assert len(loop.splitlines()) <= 12
    outputs = [printed("".join(program), planes.control.address) for _ in range(2)]
    assert outputs[0] == computed(29) + ANSWER
    assert outputs[0] in (ROOT / "docs" / "engine-guide.md").read_text()
    assert outputs[1] == computed(13) + ANSWER  # a block of the prompt was cached


def test_the_decode_loop_runs_embedded_with_one_piece_changed(planes: Pair) -> None:
    *program, start, embedded = PIECES
    output = printed("".join((*program, embedded, start)), planes.control.address)
    assert output == computed(29) + ANSWER


@pytest.mark.nightly  # ten clients, each a process
def test_the_example_of_a_load_prints_what_came_of_it(planes: Pair) -> None:
    flags = ("--model", str(MODEL), "--duration-s", "1")
    done = run("examples.load", planes.control.address, *flags)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"[1-9]\d* requests, \d+ of \d+ .* cached, 0 sessions lost\n", done.stdout)


def test_the_batch_of_the_page_of_serving_is_answered(planes: Pair) -> None:
    (program,) = blocks("serving.md", "python", "From Python")
    there = f'LLM("models/recall", control_plane="{planes.control.address}")'
    assert printed(program.replace('LLM("models/recall")', there)) == "xyz;\n"


def test_the_program_of_the_page_of_transformers_generates() -> None:
    page = "Hugging Face models on kvplane"
    program = f'folder = "{MODEL}"\n{blocks("transformers.md", "python", page)[0]}'
    assert printed(f"{program}print(len(ids))\n") == "2\n"
