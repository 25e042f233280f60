"""Settings of a program: frozen dataclasses, from which flags, environment variables and help are
derived.

A field ``lease_s`` of program ``control_plane`` is the flag ``--lease-s`` and the variable
``KVPLANE_CONTROL_PLANE_LEASE_S``; it is declared once, with its default. A flag beats its variable,
and an empty variable counts as unset, as do those of Kubernetes' service links. Whatever is wrong,
an unknown variable with the program's prefix included, ends the program with one line on stderr and
exit code 2.

The settings that are the same for all programs, such as the control plane's address, have one
variable without a program's name: ``KVPLANE_CONTROL_PLANE``.

Classes are put together by inheritance, and a field may be a settings dataclass itself, whose
fields are settings of the program. A subclass that assigns ``bind: str = "127.0.0.1:50051"`` only
changes the default.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import click

from kvplane.errors import InvalidRequestError
from kvplane.release import release

EXIT_BAD_SETTINGS: Final = 2
_PREFIX: Final = "KVPLANE_"
_SERVICE_LINK: Final = re.compile(
    r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$"
)

ConfigT = TypeVar("ConfigT")


class Settings:
    """Base class of settings, which programs combine by inheritance."""

    HEADING: ClassVar[str] = "Options"
    """Heading in ``--help`` above the settings that a class declares itself."""

    def __post_init__(self) -> None:
        """Check combinations of fields, after the base class's. Raises InvalidRequestError."""


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] | None = None,
    shared: bool = False,
) -> Any:
    """Make a field of a settings dataclass, of type ``int``, ``float``, ``bool``, ``str`` or
    ``Path``, or one of these ``| None``.

    Without a default it must be given. ``minimum`` and ``maximum`` are inclusive; a float must be
    finite. ``shared``: whether all programs read it from the same variable.
    """
    metadata = {
        "help": help,
        "unit": unit,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "shared": shared,
    }
    return dataclasses.field(default=default, metadata=metadata)


def parse(
    config_class: type[ConfigT],
    program: str,
    argv: Sequence[str],
    environ: Mapping[str, str],
    command: str = "",
) -> ConfigT:
    """Parse settings from ``argv`` (without the program's name) and ``environ``. ``command``: what
    runs the program, as ``--help`` shows it; empty for ``kvplane`` with the program's name.

    ``--help`` lists them by the ``HEADING`` of the class that declares them, a class before its
    bases.

    Exits with code 0 after ``--help`` and with code 2 for a setting that is wrong. A dataclass may
    check combinations of fields in ``__post_init__``, and raise InvalidRequestError or ValueError.
    """
    environ = {name: text for name, text in environ.items() if not _is_service_link(name, text)}
    parser = _command(config_class, program, environ)
    try:
        _reject_unknown_variables(parser, program, environ)
        shown = command or f"kvplane {program}"
        outcome = parser.main(list(argv), shown, standalone_mode=False)
    except click.ClickException as error:
        _fail(program, error.format_message())
    except (InvalidRequestError, ValueError) as error:
        _fail(program, str(error))
    except click.Abort:
        _fail(program, "aborted")
    if not isinstance(outcome, config_class):  # --help was given, and printed
        sys.exit(0)
    return outcome


def log_settings(config: Any, logger: logging.Logger) -> None:
    """Log the release and every setting's final value, on one line."""
    values = (f"{name}={value!r}" for name, value in _values(config))
    logger.info("settings release=%s %s", release(), " ".join(values))


def variable_prefix(program: str) -> str:
    """Return the prefix of a program's variables: "control_plane" -> "KVPLANE_CONTROL_PLANE_"."""
    return f"{_PREFIX}{program.upper().replace('-', '_').replace(' ', '_')}_"


class _FiniteFloat(click.FloatRange):
    """A float within a range; neither infinite nor NaN, which passes every range check."""

    name = "float"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not finite.", param, ctx)
        return number


class _Option(click.Option):
    """An option under a heading, whose variable is read from a given environment."""

    environ: Mapping[str, str] = {}
    heading = Settings.HEADING

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        return self.environ.get(str(self.envvar)) or None


class GroupedCommand(click.Command):
    """A command that lists its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if row := param.get_help_record(ctx):
                heading = getattr(param, "heading", Settings.HEADING)
                sections.setdefault(heading, []).append(row)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def options_of(
    config_class: type[Any], prefix: str, environ: Mapping[str, str]
) -> Iterator[click.Option]:
    """Yield an option for each setting of a dataclass, in the order of ``--help``. ``prefix``: of
    their variables in ``environ``.
    """
    hints = typing.get_type_hints(config_class)
    fields = {f.name: f for f in dataclasses.fields(config_class)}
    for base in config_class.__mro__:
        own = getattr(base, "__dataclass_fields__", {})
        for name in inspect.get_annotations(base):
            if name not in fields:  # no field, or declared by a class before this one
                continue
            if dataclasses.is_dataclass(hints[name]):
                del fields[name]
                yield from options_of(hints[name], prefix, environ)
            elif metadata := own[name].metadata:
                option = _option(fields.pop(name), hints[name], metadata, prefix)
                option.heading = getattr(base, "HEADING", Settings.HEADING)
                option.environ = environ
                yield option
    if fields:
        raise TypeError(f"{', '.join(fields)} of {config_class.__name__} must be made by setting()")


def build(config_class: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Build a settings dataclass, and the dataclasses that are its fields, from values by name."""
    hints = typing.get_type_hints(config_class)
    parts = {
        f.name: build(hints[f.name], values)
        if dataclasses.is_dataclass(hints[f.name])
        else values[f.name]
        for f in dataclasses.fields(config_class)  # type: ignore[arg-type]
    }
    return config_class(**parts)


def _values(config: Any) -> Iterator[tuple[str, Any]]:
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from _values(value)
        else:
            yield f.name, value


def _command(
    config_class: type[ConfigT], program: str, environ: Mapping[str, str]
) -> click.Command:
    options = options_of(config_class, variable_prefix(program), environ)
    command = GroupedCommand(
        program,
        params=list(options),
        callback=lambda **values: build(config_class, values),
        help=(config_class.__doc__ or "").strip(),
        context_settings={"terminal_width": 100},  # wide enough for each variable
    )
    return click.version_option(release(), prog_name=program, message="%(prog)s %(version)s")(
        command
    )


def _option(
    f: dataclasses.Field[Any], hint: Any, metadata: Mapping[str, Any], prefix: str
) -> _Option:
    """Make the command's option for a field, with its default, as ``metadata`` declares it."""
    is_bool = _bare_type(hint) is bool
    unit = metadata["unit"]
    flag = "--" + f.name.replace("_", "-")
    option = _Option(
        [f"{flag}/--no-{flag[2:]}" if is_bool else flag, f.name],
        type=None if is_bool else _param_type(hint, metadata),
        required=f.default is dataclasses.MISSING,
        envvar=(_PREFIX if metadata["shared"] else prefix) + f.name.upper(),
        show_envvar=True,
        help=metadata["help"] + (f" [unit: {unit}]" if unit else ""),
    )
    if f.default is not dataclasses.MISSING:
        option.default = f.default
        option.show_default = "none" if f.default is None else True
    return option


def _param_type(hint: Any, metadata: Mapping[str, Any]) -> click.ParamType[Any]:
    bare, low, high = _bare_type(hint), metadata["minimum"], metadata["maximum"]
    if metadata["choices"] is not None:
        return click.Choice(list(metadata["choices"]))
    if bare is int:
        return click.IntRange(low, high)
    if bare is float:
        return _FiniteFloat(low, high)
    if bare is Path:
        return click.Path(path_type=Path)
    if bare is str:
        return click.STRING
    raise TypeError(f"a setting cannot be of type {hint}")


def _bare_type(hint: Any) -> Any:
    """Return the type without None: ``Path | None`` -> ``Path``."""
    if isinstance(hint, types.UnionType):
        return next(arg for arg in hint.__args__ if arg is not type(None))
    return hint


def _reject_unknown_variables(
    command: click.Command, program: str, environ: Mapping[str, str]
) -> None:
    known = {option.envvar for option in command.params}
    for name in environ:
        if name.startswith(variable_prefix(program)) and name not in known:
            raise click.UsageError(f"{name} is not a setting; --help lists them all.")


def _is_service_link(name: str, text: str) -> bool:
    """Return whether Kubernetes sets this variable in every pod, for a service whose name begins
    with that of a program.
    """
    return bool(_SERVICE_LINK.search(name)) or (name.endswith("_PORT") and "://" in text)


def _fail(program: str, message: str) -> typing.NoReturn:
    click.echo(f"{program}: error: {' '.join(message.split())}", err=True)
    sys.exit(EXIT_BAD_SETTINGS)
