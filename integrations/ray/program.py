"""The program: ``python -m kvplane.integrations.ray up | status | down``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from kvplane.errors import InvalidRequestError

from .placement import STRATEGIES, FleetShape

_EXAMPLE = """\
    python -m kvplane.integrations.ray up --pools 2 --shards 2 --control=--insecure \\
        --data='--model models/recall --insecure'
"""


def main(argv: Sequence[str]) -> int:
    """Run a command; return the exit code: 0, or 1 when it could not be done."""
    options = _parser().parse_args(argv)
    try:
        shape = _shape(options) if options.command == "up" else None
    except InvalidRequestError as error:
        sys.stderr.write(f"kvplane.integrations.ray: error: {error}\n")
        return 2
    from . import fleet  # imports Ray, which arguments do not need

    try:
        fleet.connect(options.address)
        if shape is not None:
            addresses = fleet.up(shape, options.timeout_s)
            sys.stdout.write(f"--control-plane {','.join(addresses)}\n")
        elif options.command == "status":
            for each in fleet.status():
                sys.stdout.write(
                    f"{each.name:<20} {each.node:<16} {each.address or 'not up':<22} "
                    f"pid {each.pid}\n"
                )
        else:
            sys.stdout.write(f"{fleet.down()} servers ended\n")
    except (ConnectionError, TimeoutError) as error:
        sys.stderr.write(f"kvplane.integrations.ray: error: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvplane.integrations.ray",
        description="Both planes on a Ray cluster.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--address", default="auto", help="of the cluster, as ray.init takes it (%(default)s)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", help="where each server is")
    commands.add_parser("down", help="end all servers")
    up = commands.add_parser("up", help="start missing servers, and wait until they are up")
    default = FleetShape()
    up.add_argument("--pools", type=int, default=default.num_pools)
    up.add_argument("--shards", type=int, default=default.num_shards, help="data planes a pool")
    up.add_argument("--control-planes", type=int, default=default.num_control_planes)
    up.add_argument("--election", default="", help="as of python -m control_plane, for several")
    up.add_argument(
        "--control-port",
        type=int,
        default=default.control_port,
        help="of the first control plane; the next has the next (%(default)s)",
    )
    up.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default=default.strategy,
        help="how a pool's shards are placed (%(default)s: on one machine)",
    )
    up.add_argument("--cpus", type=float, default=default.num_cpus, help="a shard (%(default)s)")
    up.add_argument("--gpus", type=float, default=default.num_gpus, help="a shard (%(default)s)")
    up.add_argument(
        "--control",
        default="",
        help="more arguments of each control plane, as --control='--insecure'",
    )
    up.add_argument("--data", default="", help="more arguments of each data plane")
    up.add_argument("--timeout-s", type=float, default=120.0, help="to wait (%(default)s)")
    return parser


def _shape(options: argparse.Namespace) -> FleetShape:
    return FleetShape(
        num_pools=options.pools,
        num_shards=options.shards,
        num_control_planes=options.control_planes,
        strategy=options.strategy,
        num_cpus=options.cpus,
        num_gpus=options.gpus,
        control_port=options.control_port,
        election=options.election,
        control_arguments=tuple(shlex.split(options.control)),
        data_arguments=tuple(shlex.split(options.data)),
    )
