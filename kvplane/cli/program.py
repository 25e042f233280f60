"""The ``kvplane`` command.

Exit codes: 0 done, 1 a plane refused or did not answer, or is not ready, 2 wrong options, 130
interrupted.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import Final

import click
from click.shell_completion import get_completion_class

from kvplane.cli.group import PROGRAM, cli, command
from kvplane.cli.values import Context
from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.release import release

EXIT_FAILED: Final = 1
EXIT_BAD_OPTIONS: Final = 2


@command
@click.argument("address", required=False)
async def ping(context: Context, address: str | None) -> int:
    """Health of the control plane, or of the plane at ADDRESS; exit code 0 if it serves."""
    target = address or context.control_plane
    await context.require_listener(target)
    from kvplane.transport.health import check

    begin_s = asyncio.get_running_loop().time()
    state = await check(target, tls=context.client_tls, timeout_s=context.timeout_s)
    took_ms = 1000 * (asyncio.get_running_loop().time() - begin_s)
    context.show([{"address": target, "state": state, "took_ms": round(took_ms, 1)}])
    return 0 if state == "SERVING" else EXIT_FAILED


@command
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
    click.echo(found(cli, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())


def run(argv: Sequence[str]) -> int:
    """Run the command. Returns its exit code."""
    try:
        cli.main(list(argv), PROGRAM, standalone_mode=False)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_FAILED
    except click.ClickException as error:
        error.show()
        return EXIT_BAD_OPTIONS
    except InvalidRequestError as error:
        click.echo(f"{PROGRAM}: error: {error}", err=True)
        return EXIT_BAD_OPTIONS
    except KvplaneError as error:
        click.echo(f"{PROGRAM}: error: {error.reason}: {error}", err=True)
        return EXIT_FAILED
    except (KeyboardInterrupt, click.Abort, BrokenPipeError):
        return 128 + signal.SIGINT
    return 0
