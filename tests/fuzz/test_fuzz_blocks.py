"""A fuzzer finds no input that kvplane_blocks breaks on, under sanitizers, in a million.

Needs x86-64 and a package index: atheris, Google's binding of libFuzzer, comes as a wheel. It goes
into build/, and so do the inputs that were found to matter: each night goes on from the last.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "fuzz" / "fuzz_blocks.py"
NUM_RUNS = int(os.environ.get("KVPLANE_FUZZ_RUNS", "1000000"))


@pytest.fixture(scope="module")
def atheris() -> Path:
    """The folder that atheris is installed in."""
    folder = ROOT / "build" / "atheris"
    if not (folder / "atheris").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--target", str(folder), "atheris>=3"]
        subprocess.run(command, check=True, timeout=300)
    return folder


def fuzz(
    atheris: Path, *arguments: str, sources: Path, build: Path
) -> subprocess.CompletedProcess[str]:
    environment = {
        "KVPLANE_PYTHON": sys.executable,
        "KVPLANE_COVERAGE": "ON",
        "SOURCES": str(sources),
        "BUILD": str(build),
        "PYTHONPATH": str(atheris),
    }
    return subprocess.run(
        ["scripts/sanitize_blocks.sh", sys.executable, str(PROGRAM), *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_no_input_of_a_million_breaks_the_module(atheris: Path, tmp_path: Path) -> None:
    build = ROOT / "build" / "blocks-fuzz"
    corpus = build / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    options = (f"-runs={NUM_RUNS}", "-rss_limit_mb=4096", f"-artifact_prefix={tmp_path}/")
    done = fuzz(atheris, *options, str(corpus), sources=ROOT / "csrc" / "blocks", build=build)
    assert done.returncode == 0, done.stdout[-8000:]
    covered = [int(n) for n in re.findall(r"\bcov: (\d+)", done.stdout)]
    assert covered[-1] > 100, "the fuzzer does not see the native code"


def test_a_planted_fault_is_found(atheris: Path, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("build")
    copy = shutil.copytree(ROOT / "csrc" / "blocks", tmp_path / "blocks", ignore=ignored)
    source = copy / "bindings" / "hashes.cpp"
    right, wrong = "parent.size() != hash.size()", "parent.size() < hash.size()"
    assert source.read_text().count(right) == 1
    source.write_text(source.read_text().replace(right, wrong))
    options = ("-runs=100000", f"-artifact_prefix={tmp_path}/")
    done = fuzz(atheris, *options, sources=copy, build=tmp_path / "build")
    assert done.returncode != 0 and "AddressSanitizer" in done.stdout, done.stdout[-8000:]
