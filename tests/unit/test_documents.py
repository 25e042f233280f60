"""Each page begins with a command, and commands name programs, targets and flags that exist.

tests/e2e/test_documented_programs.py runs them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from kvplane.cli.program import cli
from scripts import reference
from tests.helpers.documents import INDENTED, ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))
READMES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *ROOT.glob("integrations/*/README.md"),
]
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FLAG = re.compile(r"^--[a-z][a-z-]*")
# The command of kvplane that has the flags, by the module that it runs.
MODULES = {
    "control_plane": "kvplane control",
    "data_plane": "kvplane data",
    "engine serve": "kvplane serve",
    "engine generate": "kvplane generate",
    "engine layout": "kvplane layout",
    "kvplane.integrations.router": "kvplane router",
    "kvplane.integrations.events": "python -m kvplane.integrations.events",
}


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command that a page shows, in blocks, indented or in the text."""
    blocks = [code for language, code in FENCED.findall(text) if language in {"sh", "bash"}]
    prose = FENCED.sub("", text)
    blocks += [*INDENTED.findall(prose), *re.findall(r"`([^`\n]+)`", prose)]
    for block in blocks:
        for line in re.split(r"\n|&&|\||&$", block.replace("\\\n", " "), flags=re.MULTILINE):
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # of several lines, or cut at a sign that is quoted
                words = line.split()
            if words:
                yield words


@cache
def flags_of(program: str) -> set[str]:
    listed = reference.flags().partition(f"\n## {program}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"--[a-z][a-z-]*", listed))


def faults_of(words: list[str]) -> Iterator[str]:
    """What of a command does not exist."""
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if not words:
        return
    if words[0] == "make":
        named = [word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)]
        yield from (f"make {name}" for name in named if name not in TARGETS)
    elif re.fullmatch(r"(\.venv/bin/)?python3?", words[0]) and words[1:2] == ["-m"]:
        yield from faults_of_module(words[2:])
    elif words[0] == "kvplane" and len(words) > 1:
        yield from faults_of_command(words[1:])


def faults_of_command(words: list[str]) -> Iterator[str]:
    context = click.Context(cli)
    names = cli.list_commands(context)
    name = next((word for word in words if word in names), "")
    if not name and not words[0].startswith("-"):
        yield f"kvplane {' '.join(words)}"
    if f"kvplane {name}" in reference.PROGRAMS:
        known = flags_of(f"kvplane {name}")
    else:
        command = cli.get_command(context, name) or cli
        known = {flag for each in (cli, command) for p in each.params for flag in p.opts}
    yield from (f"{name} {flag}" for flag in flags_in(words) if flag not in known | {"--help"})


def faults_of_module(words: list[str]) -> Iterator[str]:
    program = MODULES.get(" ".join(words[:2]), MODULES.get(words[0]))
    path = ROOT / words[0].replace(".", "/")
    if program is not None:
        known = flags_of(program)
        yield from (f"{program} {flag}" for flag in flags_in(words) if flag not in known)
    elif words[0].split(".")[0] in {"scripts", "benchmarks", "tests", "examples"} and not (
        path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    ):
        yield words[0]


def flags_in(words: list[str]) -> list[str]:
    return [found[0] for word in words if (found := FLAG.match(word))]


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_of_a_page_name_programs_and_flags_that_exist(page: Path) -> None:
    found = [fault for words in commands(page.read_text()) for fault in faults_of(words)]
    assert found == []


def test_a_command_that_does_not_exist_is_found() -> None:
    text = """
    make nothing
    python -m control_plane --no-such-flag 1 && kvplane lost
    python -m benchmarks.none

`kvplane data --bind 127.0.0.1:0 --layer x`
"""
    found = [fault for words in commands(text) for fault in faults_of(words)]
    wrong = ["make nothing", "kvplane control --no-such-flag", "kvplane lost", "benchmarks.none"]
    assert found == [*wrong, "data --layer"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_begins_with_what_it_is_for_and_a_command(page: Path) -> None:
    title, _, rest = page.read_text().partition("\n")
    assert title.startswith("# ")
    first = INDENTED.search(rest) or FENCED.search(rest)
    assert first, "no command"
    before = rest[: first.start()]
    assert before.strip() and "\n## " not in before, "no command before the first heading"
