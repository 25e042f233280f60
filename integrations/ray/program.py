"""The program: ``python -m kvplane.integrations.ray up | status | down``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvplane.serving.settings import EXIT_BAD_SETTINGS, parse

from .placement import Cluster, FleetShape

_USAGE = """\
python -m kvplane.integrations.ray up | status | down [--help]

    python -m kvplane.integrations.ray up --pools 2 --shards 2 --control=--insecure \\
        --data='--model models/recall --insecure'
"""


def main(argv: Sequence[str]) -> int:
    """Run a command; return the exit code: 0, 1 when it could not be done, or 2."""
    command = argv[0] if argv else ""
    if command not in ("up", "status", "down"):
        sys.stderr.write(_USAGE)
        return EXIT_BAD_SETTINGS
    wanted = FleetShape if command == "up" else Cluster
    shown = f"python -m kvplane.integrations.ray {command}"
    options = parse(wanted, f"ray {command}", argv[1:], os.environ, shown)
    from . import fleet  # imports Ray, which arguments do not need

    try:
        fleet.connect(options.address)
        if isinstance(options, FleetShape):
            sys.stdout.write(f"--control-plane {','.join(fleet.up(options))}\n")
        elif command == "status":
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
