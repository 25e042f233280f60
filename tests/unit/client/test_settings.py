"""Settings come from one dataclass: a flag beats a variable beats the default, and what is wrong is
told in one line.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from control_plane.server.config import PROGRAM, ControlPlaneSettings
from kvplane.errors import InvalidRequestError
from kvplane.release import release
from kvplane.serving.settings import Settings, log_settings, parse, setting


@dataclass(frozen=True)
class Config:
    """Do something."""

    lease_s: float = setting(30.0, help="How long a lease runs.", unit="s", minimum=0.5)
    num_plans: int = setting(4, help="Plans at one time.", minimum=1, maximum=8)
    is_quiet: bool = setting(False, help="Say less.")
    folder: Path | None = setting(None, help="Where to look.")
    level: str = setting("info", help="How much to say.", choices=("info", "debug"))


@dataclass(frozen=True)
class Demanding:
    """Do something with a model."""

    model: Path = setting(help="The model's folder.")
    num_rows: int = setting(2, help="Rows.")

    def __post_init__(self) -> None:
        if self.num_rows % 2:
            raise InvalidRequestError("must be even", field="num_rows")


@dataclass(frozen=True)
class Inner:
    """Part of a program's settings."""

    HEADING: ClassVar[str] = "Inside"

    num_columns: int = setting(3, help="Columns.", minimum=1)


@dataclass(frozen=True, kw_only=True)
class Base(Settings):
    """Settings that are shared."""

    HEADING: ClassVar[str] = "Shared"

    bind: str = setting(help="Where to serve.")
    port: int = setting(1, help="Which port.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.port < 0:
            raise InvalidRequestError("must not be negative", field="port")


@dataclass(frozen=True, kw_only=True)
class Whole(Base):
    """Do something with parts."""

    HEADING: ClassVar[str] = "Own"

    bind: str = "here"
    inner: Inner = field(default_factory=Inner)
    is_loud: bool = setting(False, help="Say more.")


def refusal(
    capsys: pytest.CaptureFixture[str],
    argv: Sequence[str],
    environ: Mapping[str, str],
    config_class: type = Config,
) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(config_class, "some_plane", argv, environ)
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("some_plane: error: ")
    assert said.err.count("\n") == 1
    return said.err


def test_nothing_given_means_the_defaults() -> None:
    assert parse(Config, "some_plane", [], {"PATH": "/bin"}) == Config()
    assert parse(ControlPlaneSettings, PROGRAM, [], {}) == ControlPlaneSettings()


def test_each_field_is_a_flag_and_a_variable() -> None:
    wanted = Config(1.5, 8, True, Path("/models"), "debug")
    flags = ["--lease-s=1.5", "--num-plans=8", "--is-quiet", "--folder=/models", "--level=debug"]
    variables = {
        "KVPLANE_SOME_PLANE_LEASE_S": "1.5",
        "KVPLANE_SOME_PLANE_NUM_PLANS": "8",
        "KVPLANE_SOME_PLANE_IS_QUIET": "true",
        "KVPLANE_SOME_PLANE_FOLDER": "/models",
        "KVPLANE_SOME_PLANE_LEVEL": "debug",
    }
    assert parse(Config, "some_plane", flags, {}) == wanted
    assert parse(Config, "some_plane", [], variables) == wanted


def test_a_flag_beats_its_variable_and_an_empty_variable_is_unset() -> None:
    variables = {"KVPLANE_SOME_PLANE_NUM_PLANS": "8", "KVPLANE_SOME_PLANE_LEASE_S": ""}
    assert parse(Config, "some_plane", ["--num-plans", "2"], variables) == Config(num_plans=2)


def test_a_true_variable_can_be_undone_by_a_flag() -> None:
    variables = {"KVPLANE_SOME_PLANE_IS_QUIET": "1"}
    assert not parse(Config, "some_plane", ["--no-is-quiet"], variables).is_quiet


@pytest.mark.parametrize("value", ["0", "9", "-1", "1.5", "many", "1e3", "99999999999999999999"])
def test_a_bad_number_is_told_by_its_flag_whether_flag_or_variable(
    capsys: pytest.CaptureFixture[str], value: str
) -> None:
    assert "--num-plans" in refusal(capsys, ["--num-plans", value], {})
    assert "--num-plans" in refusal(capsys, [], {"KVPLANE_SOME_PLANE_NUM_PLANS": value})


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0.4", "soon"])
def test_a_float_must_be_finite_and_in_range(
    capsys: pytest.CaptureFixture[str], value: str
) -> None:
    assert "--lease-s" in refusal(capsys, ["--lease-s", value], {})


def test_other_bad_values_are_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--level" in refusal(capsys, ["--level", "loud"], {})
    assert "--is-quiet" in refusal(capsys, [], {"KVPLANE_SOME_PLANE_IS_QUIET": "perhaps"})
    assert "--nothing" in refusal(capsys, ["--nothing"], {})
    assert "stray" in refusal(capsys, ["stray"], {})


def test_an_unknown_variable_of_this_program_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "KVPLANE_SOME_PLANE_LEASE" in refusal(capsys, [], {"KVPLANE_SOME_PLANE_LEASE": "1"})
    parse(Config, "some_plane", [], {"KVPLANE_OTHER_PLANE_LEASE": "1"})


@pytest.mark.parametrize("service", ["", "PAGE_", "NUM_PLANS_"])
def test_variables_of_kubernetes_service_links_are_no_settings(service: str) -> None:
    name, url = f"KVPLANE_SOME_PLANE_{service}", "tcp://10.96.0.7:50051"
    links = {f"{name}SERVICE_{end}": "50051" for end in ("HOST", "PORT", "PORT_GRPC")}
    links |= {f"{name}PORT": url, f"{name}PORT_50051_TCP": url}
    links |= {f"{name}PORT_50051_TCP_{end}": "x" for end in ("PROTO", "PORT", "ADDR")}
    assert parse(Config, "some_plane", [], links) == Config()


def test_a_service_link_does_not_set_a_port(capsys: pytest.CaptureFixture[str]) -> None:
    link = {"KVPLANE_SOME_PLANE_PORT": "tcp://10.96.0.7:50051"}
    assert parse(Base, "some_plane", ["--bind", "b"], link).port == 1
    wrong = {"KVPLANE_SOME_PLANE_PAGE_PORT": "9103"}
    assert "KVPLANE_SOME_PLANE_PAGE_PORT" in refusal(capsys, [], wrong)


def test_a_setting_without_a_default_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--model" in refusal(capsys, [], {}, Demanding)
    given = parse(Demanding, "some_plane", ["--model", "m"], {})
    assert given == Demanding(Path("m"))


def test_what_the_dataclass_itself_refuses_is_told_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "num_rows" in refusal(capsys, ["--model", "m", "--num-rows", "3"], {}, Demanding)


def test_help_lists_settings_under_the_heading_of_the_class_that_declares_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse(Whole, "program", ["--help"], {})
    text = capsys.readouterr().out
    wanted = ("Inside:", "--num-columns", "Own:", "--is-loud", "Shared:", "--bind", "--port")
    places = [text.index(part) for part in (*wanted, "Options:", "--help")]
    assert places == sorted(places)
    assert text.count("--bind") == 1
    assert "default: here" in text, "a subclass may give another default"


def test_settings_of_a_part_and_of_a_base_are_flags_of_the_whole(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert parse(Whole, "program", [], {}) == Whole()
    given = parse(Whole, "program", ["--num-columns", "5"], {"KVPLANE_PROGRAM_PORT": "7"})
    assert given == Whole(port=7, inner=Inner(5))
    with pytest.raises(SystemExit):
        parse(Whole, "program", ["--port", "-1"], {})
    assert "port: must not be negative" in capsys.readouterr().err
    caplog.set_level(logging.INFO)
    log_settings(given, logging.getLogger("some"))
    assert "bind='here' port=7 num_columns=5 is_loud=False" in caplog.text


def test_a_field_that_is_no_setting_is_refused() -> None:
    @dataclass(frozen=True)
    class Bare:
        """Do nothing."""

        num_rows: int = 3

    with pytest.raises(TypeError, match="num_rows of Bare"):
        parse(Bare, "program", [], {})


@pytest.mark.parametrize(
    "argv",
    [
        ["--bind", "50051"],
        ["--bind", ":50051"],
        ["--bind", "localhost:http"],
        ["--bind", "localhost:65536"],
        ["--tls-key", "key.pem"],
        ["--tls-cert", "certificate.pem"],
        ["--tls-client-ca", "ca.pem"],
    ],
)
def test_the_control_plane_refuses_settings_that_do_not_go_together(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(ControlPlaneSettings, PROGRAM, argv, {})
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_settings_are_logged_as_they_came_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_settings(Config(num_plans=3), logging.getLogger("some"))
    values = "lease_s=30.0 num_plans=3 is_quiet=False folder=None level='info'"
    assert f"release={release()} {values}" in caplog.text
