"""Runs ``python -m kvplane.ray``."""

import sys

from kvplane.cli.extras import run_or_explain


def _run() -> int:
    from kvplane.ray.program import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run_or_explain("kvplane.ray", "ray", _run))
