"""The ``kvplane`` command's options, and what its commands have in common."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, Final

import click

from kvplane import __version__
from kvplane.cli.values import Context, read_tokens
from kvplane.transport.tls import Tls

PROGRAM: Final = "kvplane"
POSITIVE: Final = click.FloatRange(min=0, min_open=True)
_PATH: Final = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name=PROGRAM)
@click.option(
    "--control-plane",
    "address",
    default="127.0.0.1:50051",
    envvar="KVPLANE_ADDRESS",
    show_envvar=True,
    help="Address of the control plane, host:port.",
)
@click.option("--timeout-s", default=10.0, type=POSITIVE, help="Deadline of a call, in s.")
@click.option("--tls", "with_tls", is_flag=True, help="Use TLS; any option below does too.")
@click.option("--tls-ca", type=_PATH, help="Authority that signs the server's certificate.")
@click.option("--tls-cert", type=_PATH, help="This caller's certificate.")
@click.option("--tls-key", type=_PATH, help="The key of that certificate.")
@click.option("--tls-name", default="", help="Name in the server's certificate, if another.")
@click.option("--token-file", type=_PATH, help="Has the bearer token of this caller.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one value a line.")
@click.pass_context
def cli(
    context: click.Context,
    address: str,
    timeout_s: float,
    with_tls: bool,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_name: str,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """Look at the pools of a control plane, and at what they have cached."""
    options = Tls(tls_ca, tls_cert, tls_key, tls_name, token_file)
    tls = options if with_tls or options != Tls() else None
    context.obj = Context(address, timeout_s, tls, as_json)


def command(run: Callable[..., Coroutine[Any, Any, int]]) -> Callable[..., Any]:
    """Add a command that is a coroutine, given the context first; its result is the exit code."""

    @wraps(run)
    def call(*arguments: Any, **options: Any) -> None:
        sys.exit(asyncio.run(run(*arguments, **options)))

    return cli.command(name=run.__name__.replace("_", "-"))(click.pass_obj(call))


with_tokens = click.argument("tokens", type=read_tokens)
with_pool = click.option("--pool", default="", help="The pool; needed where there are several.")
with_namespace = click.option("--namespace", default="", help="Of the cached prefixes.")
