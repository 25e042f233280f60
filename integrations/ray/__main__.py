"""Runs ``python -m kvplane.integrations.ray``."""

import sys

from kvplane.cli.extras import run_or_explain


def _run() -> int:
    from .program import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run_or_explain("kvplane.integrations.ray", "ray", _run))
