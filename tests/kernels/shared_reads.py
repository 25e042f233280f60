"""Builds the program that counts how often attention reads tiles that sequences share."""

from __future__ import annotations

import subprocess
from pathlib import Path

from emulated_build import ROOT, build

CPU = ROOT / "csrc" / "cpu"
FLAGS = ("-O1", "-ffp-contract=off", "-Wno-psabi")


def run(tmp_path: Path, faults: dict[str, tuple[str, str]] | None = None) -> tuple[int, str]:
    """The program's exit status and what it printed. ``faults``: by the name of a file of csrc/cpu,
    the text that another one takes the place of.
    """
    cpu = CPU
    if faults:
        cpu = tmp_path / "cpu"
        cpu.mkdir()
        for path in (*CPU.glob("*.h"), CPU / "paged_attention.cpp"):
            text = path.read_text()
            if path.name in faults:
                old, new = faults[path.name]
                assert text.count(old) == 1, f"{path.name} has it {text.count(old)} times"
                text = text.replace(old, new)
            (cpu / path.name).write_text(text)
    sources = (
        Path(__file__).with_suffix(".cpp"),
        cpu / "paged_attention.cpp",
        CPU / "thread_pool.cpp",
        CPU / "row_ops" / "row_ops_baseline.cpp",
    )
    folders = (CPU / "row_ops",)
    csrc = ROOT / "csrc"
    program = build(csrc, sources, flags=FLAGS, link_flags=("-pthread",), folders=folders)
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    return result.returncode, result.stdout + result.stderr
