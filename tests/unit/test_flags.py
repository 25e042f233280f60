"""How many flags each program has, that each is declared once, and what ``--help`` says of it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator

import pytest

from control_plane.server.config import ControlPlaneSettings
from data_plane.server.config import DataPlaneSettings
from engine.config import GenerateSettings, PrintLayoutSettings
from engine.serving.config import ServeSettings
from kvplane.integrations.events.config import EventsSettings
from kvplane.integrations.router.config import RouterSettings
from kvplane.serving.settings import parse

ENGINE = (GenerateSettings, ServeSettings, PrintLayoutSettings)
PROGRAMS = (ControlPlaneSettings, DataPlaneSettings, RouterSettings, EventsSettings, *ENGINE)
FLAG = re.compile(r"^  (--[a-z-]+)", re.MULTILINE)
HEADING = re.compile(r"^(\S.*):$", re.MULTILINE)


def help_of(config_class: type, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(config_class, "program", ["--help"], {})
    assert stop.value.code == 0
    return capsys.readouterr().out


def sections(config_class: type, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """What ``--help`` lists, by heading."""
    _, *parts = HEADING.split(help_of(config_class, capsys))
    return {heading: FLAG.findall(part) for heading, part in zip(*[iter(parts)] * 2, strict=True)}


@pytest.mark.parametrize(
    ("programs", "most"),
    [
        # 36 beside --page-hosts.
        ((ControlPlaneSettings,), 37),
        # 45 beside --opaque-page-bytes, --model-id and --file-tier-after.
        ((DataPlaneSettings,), 48),
        # 50 beside --grace-s, --max-connections, --memory, --compile, --device, --graphs,
        # --checkpoint-every-blocks, and four of /metrics.
        (ENGINE, 61),
    ],
)
def test_programs_have_at_most_so_many_flags(
    programs: tuple[type, ...], most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {flag for each in programs for of in sections(each, capsys).values() for flag in of}
    flags = found - {"--help", "--version"}
    assert len(flags) <= most, f"{len(flags)} flags: {sorted(flags)}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_has_groups_that_can_be_read_at_once(
    program: type, capsys: pytest.CaptureFixture[str]
) -> None:
    found = sections(program, capsys)
    assert found.pop("Options") == ["--version", "--help"]
    assert max(map(len, found.values())) <= 16


def declarations(config_class: type) -> Iterator[tuple[str, type]]:
    """Yield name and class of each declaration of a setting; a new default alone is none."""
    for base in filter(dataclasses.is_dataclass, config_class.__mro__):
        fields = {each.name: each for each in dataclasses.fields(base)}
        for name in inspect.get_annotations(base):
            if name in fields and fields[name].metadata:
                yield name, base
            elif name in fields and fields[name].default_factory is not dataclasses.MISSING:
                yield from declarations(fields[name].default_factory)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_one_declaration_of_each_setting(program: type) -> None:
    names = [name for name, _ in declarations(program)]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_names_every_setting_with_its_unit_and_variable(
    program: type, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(help_of(program, capsys).split())
    for name, base in declarations(program):
        assert "--" + name.replace("_", "-") in text
        is_shared = base.__dataclass_fields__[name].metadata["shared"]
        assert f"KVPLANE_{'' if is_shared else 'PROGRAM_'}{name.upper()};" in text
        if unit := base.__dataclass_fields__[name].metadata.get("unit"):
            assert f"[unit:{unit}" in text


def test_no_declaration_is_copied_from_another_class() -> None:
    """Two settings of one name differ in what they mean."""
    found = {each for program in PROGRAMS for each in declarations(program)}
    texts = [base.__dataclass_fields__[name].metadata["help"] for name, base in found]
    assert sorted(texts) == sorted(set(texts))
