"""What the README tells a newcomer to type does what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvplane import LayerGroup, Layout
from scripts.planes import run_planes
from tests.helpers.programs import ROOT, run

README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

LAYOUT = Layout(
    model_id="readme",
    block_size_tokens=16,
    dtype="float32",
    kv_dtype="float32",
    groups=(LayerGroup("full", (0, 1), num_kv_heads=2, head_size=16),),
)


def test_the_client_of_the_readme_runs_a_step_and_prints_the_attention_outputs_shape(
    tmp_path: Path,
) -> None:
    program = PROGRAMS[1]
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps(asdict(LAYOUT)))
    flags = ["--layout", str(layout), "--num-device-blocks", "64", "--num-host-blocks", "4"]
    with run_planes(tmp_path, flags) as planes:
        done = run("-c", program.replace("127.0.0.1:50051", planes.control.address))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "(5, 2, 16)\n"


def test_the_client_of_the_readme_passes_a_strict_type_checker(tmp_path: Path) -> None:
    program = tmp_path / "client.py"
    program.write_text(PROGRAMS[1])
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


def test_the_three_lines_of_the_readme_generate_what_transformers_does(tmp_path: Path) -> None:
    """As a program in an empty folder, which ends without a word of what it left open."""
    folder = ROOT / "models" / "recall"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = "abc=xyz;def=uvw;?abc="
    how = "add_special_tokens=False, return_tensors='pt'"
    inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    want = model.generate(**inputs, max_new_tokens=8)[0]
    assert tokenizer.decode(want).startswith(f"{prompt}xyz")
    program = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})\n"
        f"inputs = tokenizer({prompt!r}, {how})\n"
        f"{PROGRAMS[0]}print(ids[0].tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{want.tolist()}\n"
    assert "Traceback" not in done.stderr and "sequences" not in done.stderr


def test_every_make_target_that_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"run", "test"} <= named <= targets
