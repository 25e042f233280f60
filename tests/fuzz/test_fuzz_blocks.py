"""A fuzzer finds no input that kvplane_blocks breaks on, under sanitizers.

Needs x86-64 and a package index: atheris, Google's binding of libFuzzer, comes as a wheel. It goes
into build/, and so do the inputs that were found to matter: each night goes on from the last.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "fuzz" / "fuzz_blocks.py"
NUM_RUNS = int(os.environ.get("KVPLANE_FUZZ_RUNS", "250000"))
# Of a hundred inputs. Those of hashes take microseconds each, the others milliseconds.
SHARES = {
    "hashes": 20,
    "pool": 44,
    "groups": 22,
    "rebuild": 14,
}
# Some twenty calls. Long inputs from the start, and random ones: those that grow from nothing make
# few calls, and the same again and again.
MAX_BYTES = 200
OPTIONS = (f"-max_len={MAX_BYTES}", "-len_control=0", "-rss_limit_mb=4096")
RANDOM_INPUTS = [Random(i).randbytes(MAX_BYTES) for i in range(200)]


class Fault(NamedTuple):
    """``right`` is in ``file`` once; the fuzzer finds that ``wrong`` takes its place, and prints
    ``seen``.
    """

    target: str
    file: str
    right: str
    wrong: str
    seen: str = "AddressSanitizer"


FAULTS = {
    "a hash has any size": Fault(
        "hashes",
        "bindings/hashes.cpp",
        "parent.size() != hash.size()",
        "parent.size() < hash.size()",
    ),
    "an abort is of one group": Fault(
        "groups",
        "pool/pool.cpp",
        "left -= group->lifecycle.abort(group->sessions[handle], id, next_plan, keeps);",
        "if (group == groups_[0])\n"
        "        left -= group->lifecycle.abort(group->sessions[handle], id, next_plan, keeps);",
        "AssertionError",
    ),
    "a parent is any block": Fault(
        "rebuild",
        "recovery/rebuild.cpp",
        'check_indices(columns.parent_indices, -1, num_parents, "parent_indices");',
        "",
    ),
    "what is retained is evicted as all else": Fault(
        "pool",
        "memory/retention.cpp",
        "for (auto e = path.rbegin(); e != path.rend(); ++e) apply(*e);",
        "",
        "AssertionError",
    ),
}


@pytest.fixture(scope="module")
def atheris() -> Path:
    """The folder that atheris is installed in."""
    folder = ROOT / "build" / "atheris"
    if not (folder / "atheris").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--target", str(folder), "atheris>=3"]
        subprocess.run(command, check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of csrc/blocks, of which only what changes is compiled."""
    ignored = shutil.ignore_patterns("build")
    folder = tmp_path_factory.mktemp("faults") / "blocks"
    return shutil.copytree(ROOT / "csrc" / "blocks", folder, ignore=ignored)


@contextmanager
def planted(fault: Fault, copied: Path) -> Iterator[None]:
    source = copied / fault.file
    sound = source.read_text()
    assert sound.count(fault.right) == 1
    source.write_text(sound.replace(fault.right, fault.wrong))
    try:
        yield
    finally:
        source.write_text(sound)


def fuzz(
    atheris: Path, target: str, *options: str, corpus: Path, sources: Path, build: Path
) -> subprocess.CompletedProcess[str]:
    """From the inputs in ``corpus`` on, to which the fuzzer adds."""
    corpus.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(RANDOM_INPUTS):
        (corpus / f"seed {i}").write_bytes(seed)
    environment = {
        "KVPLANE_PYTHON": sys.executable,
        "KVPLANE_COVERAGE": str(Path(__file__).with_name("coverage.cpp")),
        "SOURCES": str(sources),
        "BUILD": str(build),
        "PYTHONPATH": os.pathsep.join((str(atheris), str(ROOT))),
    }
    command = ["tests/cpp/sanitize_blocks.sh", sys.executable, str(PROGRAM), target]
    return subprocess.run(
        [*command, *OPTIONS, *options, str(corpus)],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )


@pytest.mark.parametrize("target", SHARES)
def test_no_input_breaks_the_module(atheris: Path, target: str, tmp_path: Path) -> None:
    build = ROOT / "build" / "blocks-fuzz"
    corpus = build / "corpus" / target
    options = (f"-runs={NUM_RUNS * SHARES[target] // 100}", f"-artifact_prefix={tmp_path}/")
    sources = ROOT / "csrc" / "blocks"
    done = fuzz(atheris, target, *options, corpus=corpus, sources=sources, build=build)
    assert done.returncode == 0, done.stdout[-8000:]
    covered = [int(n) for n in re.findall(r"\bcov: (\d+)", done.stdout)]
    assert covered[-1] > 100, "the fuzzer does not see the native code"


def test_the_targets_share_all_inputs() -> None:
    assert sum(SHARES.values()) == 100
    assert {fault.target for fault in FAULTS.values()} == {*SHARES}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(
    atheris: Path, copied: Path, fault: Fault, tmp_path: Path
) -> None:
    options = ("-runs=100000", "-max_total_time=900", f"-artifact_prefix={tmp_path}/")
    folders = {"corpus": tmp_path / "corpus", "sources": copied, "build": copied.parent / "build"}
    with planted(fault, copied):
        done = fuzz(atheris, fault.target, *options, **folders)
    assert done.returncode != 0, done.stdout[-8000:]
    assert fault.seen in done.stdout, done.stdout[-8000:]
