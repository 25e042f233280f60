"""Starts a control plane and pools as processes, for measurements of moved blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

from benchmarks.common.processes import start, start_control_plane
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
    layout = folder / "layout.json"
    layout.write_text(json.dumps(asdict(LAYOUT)))
    with ExitStack() as stack:
        _, address = start_control_plane(stack)
        for pool_id in pools:
            start(
                stack,
                *("data_plane", "--bind", "127.0.0.1:0", "--control-plane", address),
                *("--layout", str(layout), "--pool-id", pool_id, "--num-threads", "1"),
                *("--num-device-blocks", str(2 * num_blocks + 8), *flags),
            )
        yield address
