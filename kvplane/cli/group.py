"""The ``kvplane`` command: what it has, by group, and how its commands are made.

A module is imported once a command of it is wanted: a program reads its settings before gRPC may be
imported.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import fields
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click

from kvplane import __version__
from kvplane.cli.values import Context, read_tokens
from kvplane.models.config import encode
from kvplane.serving.settings import GroupedCommand, build, options_of

PROGRAM: Final = "kvplane"
POSITIVE: Final = click.FloatRange(min=0, min_open=True)


class _Program(click.Command):
    """Runs the program of a module's ``main`` with all that is left of the arguments, ``--help``
    included.
    """

    def __init__(self, name: str, help: str, module: str, *words: str) -> None:
        """``words``: the program's first arguments."""
        super().__init__(name, help=help, add_help_option=False)
        self._module, self._words = module, words

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = args
        return args

    def invoke(self, ctx: click.Context) -> Any:
        sys.argv[1:] = [*self._words, *ctx.args]
        sys.exit(import_module(self._module).main())


_ENGINE: Final = "kvplane.engine.__main__"
_PROGRAMS: Final = (
    _Program("up", "Both planes and the HTTP server of a model, until Ctrl-C.", "kvplane.cli.up"),
    _Program("control", "The control plane.", "control_plane.__main__"),
    _Program("data", "A data plane.", "data_plane.__main__"),
    _Program("serve", "A model over HTTP, for OpenAI's clients.", _ENGINE, "serve"),
    _Program("generate", "A model's answers to prompts.", _ENGINE, "generate"),
    _Program("layout", "A model's layout, as JSON.", _ENGINE, "layout"),
    _Program("router", "A router of requests.", "kvplane.integrations.router.__main__"),
)
_COMMANDS: Final[dict[str, dict[str, str | _Program]]] = {
    "Run": {str(each.name): each for each in _PROGRAMS},
    "Look at running planes": {
        **dict.fromkeys(("status", "pools", "sessions", "sequences"), "kvplane.cli.pools"),
        **dict.fromkeys(("lookup", "explain", "watch"), "kvplane.cli.prefixes"),
        **dict.fromkeys(("ping", "version"), "kvplane.cli.program"),
        "doctor": "kvplane.cli.doctor",
    },
    "Change what is cached": dict.fromkeys(("retain", "forget"), "kvplane.cli.prefixes"),
    "The command itself": {"completion": "kvplane.cli.program"},
}
"""Programs, and the modules of other commands, by heading and name."""


class _Group(click.Group):
    """Options that stand before a command's name are the command's too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = [*args]
        super().parse_args(ctx, args)
        ctx.args = words[: len(words) - len(ctx.args) - 1] + ctx.args
        return ctx.args

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in _COMMANDS.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = {name: each for names in _COMMANDS.values() for name, each in names.items()}
        if isinstance(program := found.get(cmd_name), _Program):
            return program
        if cmd_name in found:
            import_module(str(found[cmd_name]))
        return super().get_command(ctx, cmd_name)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, names in _COMMANDS.items():
            with formatter.section(heading):
                found = filter(None, (self.get_command(ctx, name) for name in names))
                rows = [(str(each.name), each.get_short_help_str(99)) for each in found]
                formatter.write_dl(rows)


cli = _Group(
    PROGRAM,
    params=[*options_of(Context, "KVPLANE_", os.environ)],
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": 100},
    help="Run the planes, and look at what they have cached.",
)
click.version_option(__version__, prog_name=PROGRAM)(cli)


def command(run: Callable[..., Coroutine[Any, Any, int]]) -> Callable[..., Any]:
    """Add a command that is a coroutine, given the context first; its result is the exit code."""

    @wraps(run)
    def call(**options: Any) -> None:
        context = build(Context, options)
        own = {name: options[name] for name in options.keys() - {f.name for f in fields(Context)}}
        sys.exit(asyncio.run(run(context, **own)))

    made = cli.command(name=run.__name__.replace("_", "-"), cls=GroupedCommand)(call)
    made.params += options_of(Context, "KVPLANE_", os.environ)
    return made


def with_tokens(run: Callable[..., Coroutine[Any, Any, int]]) -> Callable[..., Any]:
    """Give a command the argument ``tokens``: token ids, or None; or a text for a tokenizer."""

    @click.argument("tokens", type=read_tokens, required=False)
    @click.option("--text", help="A prompt in place of TOKENS; needs --tokenizer.")
    @click.option(
        "--tokenizer",
        type=click.Path(path_type=Path),
        help="Model folder whose tokenizer reads it.",
    )
    @wraps(run)
    async def call(
        context: Context,
        *,
        tokens: list[int] | None,
        text: str | None,
        tokenizer: Path | None,
        **options: Any,
    ) -> int:
        if (text is None) != (tokenizer is None) or (text is not None and tokens is not None):
            raise click.UsageError("give TOKENS, or both --text and --tokenizer")
        if text is not None and tokenizer is not None:
            tokens = encode(text, tokenizer)
        if tokens is None and "all_of" not in options:
            raise click.UsageError("give TOKENS, or both --text and --tokenizer")
        return await run(context, tokens=tokens, **options)

    call.__doc__ = f"{run.__doc__}\n\nTOKENS: ids such as 1,2,3, @FILE, or - for standard input."
    return call


with_pool = click.option("--pool", default="", help="The pool; needed where there are several.")
with_namespace = click.option("--namespace", default="", help="Of the cached prefixes.")
