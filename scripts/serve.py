"""Runs both planes, by default with the layout of the included model, until Ctrl-C.

    make serve
    .venv/bin/python -m scripts.serve [--model FOLDER]

Set everything else by the planes' environment variables, such as KVPLANE_CONTROL_PLANE_BIND; see
``python -m control_plane --help`` and ``python -m data_plane --help``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from kvplane.errors import PlaneUnavailableError
from scripts.planes import ROOT, start

DEFAULTS = {
    "KVPLANE_CONTROL_PLANE_BIND": "127.0.0.1:50051",
    "KVPLANE_CONTROL_PLANE_PAGE_PORT": "9103",
    "KVPLANE_DATA_PLANE_BIND": "127.0.0.1:50052",
    # A measured pool would take half of the machine's memory.
    "KVPLANE_DATA_PLANE_NUM_DEVICE_BLOCKS": "4096",
    "KVPLANE_DATA_PLANE_NUM_HOST_BLOCKS": "1024",
}


def serve(model: Path) -> int:
    """Run both planes until one ends by itself; return 1 then. SIGINT and SIGTERM exit with 0."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    settings = DEFAULTS | os.environ
    control_bind = settings["KVPLANE_CONTROL_PLANE_BIND"]
    data_bind = settings["KVPLANE_DATA_PLANE_BIND"]
    flags = ("--control-plane", control_bind, "--model", str(model))
    with ExitStack() as stack:
        try:
            control = start(stack, "control_plane", bind=control_bind, settings=settings)
            data = start(stack, "data_plane", *flags, bind=data_bind, settings=settings)
        except PlaneUnavailableError:
            return 1  # the plane has said why
        print(f"control plane  {control_bind}\ndata plane     {data_bind}", flush=True)
        page_port = settings["KVPLANE_CONTROL_PLANE_PAGE_PORT"]
        print(f"page           http://127.0.0.1:{page_port}\nCtrl-C stops both.", flush=True)
        while control.process.poll() is None and data.process.poll() is None:
            time.sleep(0.1)
    return 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run both planes until Ctrl-C.")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "recall")
    sys.exit(serve(parser.parse_args().model.resolve()))
