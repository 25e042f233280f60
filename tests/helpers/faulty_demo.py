"""The demonstration beside a faulty data plane: python -m faulty_demo FAULT [FLAG ...]"""

from __future__ import annotations

import os
import sys

from demo.config import DemoConfig
from demo.run import run
from kvplane.serving.settings import parse

if __name__ == "__main__":
    config = parse(DemoConfig, "demo", sys.argv[2:], os.environ)
    sys.exit(run(config, ("-m", "faulty_data_plane", sys.argv[1])))
