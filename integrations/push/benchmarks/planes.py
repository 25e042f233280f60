"""Starts a control plane and pools as processes, for measurements of moved blocks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

from kvplane import LayerGroup, Layout

LAYOUT: Final = Layout(
    "block-transfer", 16, "float32", "float32", (LayerGroup("full", (0, 1, 2, 3), 8, 64),)
)
BLOCK_BYTES: Final = 4 * 2 * 8 * 16 * 64 * 4


@contextmanager
def planes(folder: Path, num_blocks: int, pools: Sequence[str], *flags: str) -> Iterator[str]:
    """Run a control plane and pools with room for ``num_blocks`` twice; yield the control plane's
    address. ``flags``: of the data planes.
    """
    layout, port = folder / "layout.json", folder / "port"
    layout.write_text(json.dumps(asdict(LAYOUT)))
    with ExitStack() as stack:
        run(stack, "control_plane", "--bind", "127.0.0.1:0", "--port-file", str(port))
        while not port.exists():
            time.sleep(0.05)
        address = f"127.0.0.1:{port.read_text().strip()}"
        for pool_id in pools:
            run(
                stack,
                *("data_plane", "--bind", "127.0.0.1:0", "--control-plane", address),
                *("--layout", str(layout), "--pool-id", pool_id, "--num-threads", "1"),
                *("--num-device-blocks", str(2 * num_blocks + 8), *flags),
            )
        yield address


def run(stack: ExitStack, program: str, *arguments: str) -> None:
    """Start a program that ends with ``stack``."""
    command = [sys.executable, "-m", program, "--metrics-port", "-1", *arguments]
    process = subprocess.Popen([*command, "--log-level", "error"])
    stack.callback(process.wait)
    stack.callback(process.terminate)
