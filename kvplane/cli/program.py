"""The ``kvplane`` command's options, and the functions that its commands call.

Exit codes: 0 done, 1 a plane refused or did not answer, or is not ready, 2 wrong options, 130
interrupted.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import get_completion_class

from kvplane import __version__
from kvplane.cli import pools as of_pools
from kvplane.cli import prefixes
from kvplane.cli.values import Context, read_tokens
from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.prefixes import DEFAULT_PRIORITY, ForgetScope
from kvplane.release import release
from kvplane.transport.health import check
from kvplane.transport.tls import Tls

EXIT_FAILED: Final = 1
EXIT_BAD_OPTIONS: Final = 2
_PROGRAM: Final = "kvplane"
_PATH: Final = click.Path(path_type=Path)
_POSITIVE: Final = click.FloatRange(min=0, min_open=True)
_SCOPES: Final = {"namespace": ForgetScope.NAMESPACE, "tenant": ForgetScope.TENANT}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name=_PROGRAM)
@click.option(
    "--control-plane",
    "address",
    default="127.0.0.1:50051",
    envvar="KVPLANE_ADDRESS",
    show_envvar=True,
    help="Address of the control plane, host:port.",
)
@click.option("--timeout-s", default=10.0, type=_POSITIVE, help="Deadline of a call, in s.")
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


def _command(run: Callable[..., Coroutine[Any, Any, int]]) -> Callable[..., Any]:
    """Add a command that is a coroutine, given the context first; its result is the exit code."""

    @wraps(run)
    def call(*arguments: Any, **options: Any) -> None:
        sys.exit(asyncio.run(run(*arguments, **options)))

    return cli.command(name=run.__name__.replace("_", "-"))(click.pass_obj(call))


_with_pool = click.option("--pool", default="", help="The pool; needed where there are several.")
_with_namespace = click.option("--namespace", default="", help="Of the cached prefixes.")
_with_tokens = click.argument("tokens")


@_command
async def status(context: Context) -> int:
    """The control plane and its pools; exit code 0 if all of them are ready."""
    return await of_pools.status(context)


@_command
async def pools(context: Context) -> int:
    """Tiers and shards of each pool."""
    return await of_pools.pools(context)


@_command
@_with_pool
async def sessions(context: Context, pool: str) -> int:
    """The open sessions of this caller's tenant."""
    return await of_pools.sessions(context, pool)


@_command
@click.argument("session", type=int)
@_with_pool
async def sequences(context: Context, session: int, pool: str) -> int:
    """The sequences of SESSION; exit code 1 if it is not open."""
    return await of_pools.sequences(context, session, pool)


@_command
@_with_tokens
@_with_pool
@_with_namespace
async def lookup(context: Context, tokens: str, pool: str, namespace: str) -> int:
    """How much of a prompt each pool has cached.

    TOKENS: ids such as 1,2,3, or @FILE, or - for standard input.
    """
    return await prefixes.lookup(context, read_tokens(tokens), pool, namespace)


@_command
@_with_tokens
@_with_pool
@_with_namespace
async def explain(context: Context, tokens: str, pool: str, namespace: str) -> int:
    """The cached blocks of a prompt, their hits, age and references.

    TOKENS: ids such as 1,2,3, or @FILE, or - for standard input.
    """
    return await prefixes.explain(context, read_tokens(tokens), pool, namespace)


@_command
@_with_pool
@_with_namespace
@click.option("--count", default=0, type=click.IntRange(min=0), help="Lines; 0: no end.")
async def watch(context: Context, pool: str, namespace: str, count: int) -> int:
    """Each change of a pool's prefix index, until Ctrl-C."""
    return await prefixes.watch(context, pool, namespace, count)


@_command
@_with_tokens
@_with_pool
@_with_namespace
@click.option("--ttl-s", default=3600.0, type=_POSITIVE, help="For how long.")
@click.option(
    "--priority",
    default=DEFAULT_PRIORITY,
    type=click.IntRange(1, 100),
    help="Among retained prefixes; 1 is evicted first.",
)
async def retain(
    context: Context, tokens: str, pool: str, namespace: str, ttl_s: float, priority: int
) -> int:
    """Keep a cached prefix longer than others.

    TOKENS: ids such as 1,2,3, or @FILE, or - for standard input.
    """
    return await prefixes.retain(context, read_tokens(tokens), pool, namespace, ttl_s, priority)


@_command
@click.argument("tokens", required=False)
@click.option("--all-of", type=click.Choice(list(_SCOPES)), help="In place of TOKENS.")
@_with_pool
@_with_namespace
@click.option("--force", is_flag=True, help="Also what sequences refer to.")
async def forget(
    context: Context,
    tokens: str | None,
    all_of: str | None,
    pool: str,
    namespace: str,
    force: bool,
) -> int:
    """Take cached prefixes out of the index.

    TOKENS: ids such as 1,2,3, or @FILE, or - for standard input.
    """
    if (tokens is None) == (all_of is None):
        raise click.UsageError("give either TOKENS or --all-of")
    what = _SCOPES[all_of] if all_of is not None else read_tokens(tokens or "")
    return await prefixes.forget(context, what, pool, namespace, force)


@_command
@click.argument("address", required=False)
async def ping(context: Context, address: str | None) -> int:
    """Health of the control plane, or of the plane at ADDRESS; exit code 0 if it serves."""
    target = address or context.address
    begin_s = asyncio.get_running_loop().time()
    state = await check(target, tls=context.tls, timeout_s=context.timeout_s)
    took_ms = 1000 * (asyncio.get_running_loop().time() - begin_s)
    context.show([{"address": target, "state": state, "took_ms": round(took_ms, 1)}])
    return 0 if state == "SERVING" else EXIT_FAILED


@_command
async def version(context: Context) -> int:
    """Versions of this client and of the control plane."""
    async with context.client() as client:
        plane = await client.get_server_info()
    context.show([{"client": release(), "control_plane": plane.version}])
    return 0


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """A script that completes this command: eval "$(kvplane completion bash)"."""
    found = get_completion_class(shell)
    assert found is not None, "click has these"
    click.echo(found(cli, {}, _PROGRAM, f"_{_PROGRAM.upper()}_COMPLETE").source())


def run(argv: Sequence[str]) -> int:
    """Run the command. Returns its exit code."""
    try:
        cli.main(list(argv), _PROGRAM, standalone_mode=False)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_FAILED
    except click.ClickException as error:
        error.show()
        return EXIT_BAD_OPTIONS
    except InvalidRequestError as error:
        click.echo(f"{_PROGRAM}: error: {error}", err=True)
        return EXIT_BAD_OPTIONS
    except KvplaneError as error:
        click.echo(f"{_PROGRAM}: error: {error.reason}: {error}", err=True)
        return EXIT_FAILED
    except (KeyboardInterrupt, click.Abort, BrokenPipeError):
        return 128 + signal.SIGINT
    return 0
