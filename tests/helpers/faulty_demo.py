"""The demonstration beside a faulty data plane: python -m tests.helpers.faulty_demo FAULT ..."""

from __future__ import annotations

import sys

from examples.demo import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], ("-m", "tests.helpers.data.faulty_data_plane", sys.argv[1])))
