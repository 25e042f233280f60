"""``python -m kvplane``: the ``kvplane`` command."""

from __future__ import annotations

import sys

from kvplane.cli.extras import run_or_explain


def main() -> int:
    """Run the ``kvplane`` command. Returns its exit code."""

    def run() -> int:
        from kvplane.cli.program import run

        return run(sys.argv[1:])

    return run_or_explain("kvplane", "", run)


if __name__ == "__main__":
    sys.exit(main())
