"""Runs what README tells a newcomer to type."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.engine_planes import Pair
from tests.helpers.programs import ROOT, run

README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
MODEL = ROOT / "models" / "recall"


def test_the_second_session_of_an_engine_finds_what_the_first_one_computed(
    tmp_path: Path,
) -> None:
    """The planes have the model of ``kvplane up`` and its dtype."""
    with Pair(MODEL, tmp_path, pool_id="default") as planes:
        done = run("-c", PROGRAMS[2].replace("127.0.0.1:50051", planes.control.address))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "0\n40\n32\n8\n"


@pytest.mark.nightly  # mypy reads the package anew
def test_the_session_of_an_engine_passes_a_strict_type_checker(tmp_path: Path) -> None:
    program = tmp_path / "client.py"
    program.write_text(PROGRAMS[2])
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


def test_a_model_generates_what_transformers_does_and_the_second_time_from_the_cache() -> None:
    """The program runs apart, and ends without a warning of what it left open."""
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = "abc=xyz;def=uvw;?abc="
    inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    want = tokenizer.decode(model.generate(**inputs, max_new_tokens=8)[0])
    assert want == "abc=xyz;def=uvw;?abc=xyz;def="
    done = run("-c", PROGRAMS[0])
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{want} [0]\n{want} [16]\n"
    assert "Traceback" not in done.stderr and "sequences" not in done.stderr


def test_every_make_target_that_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"run", "test"} <= named <= targets


def test_the_sections_that_a_newcomer_does_have_programs() -> None:
    script = (ROOT / "scripts" / "newcomer.sh").read_text()
    titles = set(re.findall(r"\bsection (?:'([^']+)'|(\w+)$)", script, re.MULTILINE))
    assert len(titles) == 6
    for title in map("".join, titles):
        text = re.search(rf"^#+ {title}\n(.*?)(?:^#|\Z)", README, re.DOTALL | re.MULTILINE)
        assert text and re.search(r"^```(?:sh|python)$", text[1], re.MULTILINE), title
