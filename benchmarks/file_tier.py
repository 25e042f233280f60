"""Measures how fast blocks are loaded from files into a pool, beside writing them anew.

    python -m benchmarks.file_tier [--mebibytes 64] [--rounds 5] [--json OUT]

The same blocks, by turns:

    files alone        read from the folder, and their checksums compared, by this process
    loaded             the plan and LoadFileBlocks, from the call to the receipt
    written            keys and values sent by a client on this machine: what computing them again
                       costs without the model's own arithmetic

Files just written are in the page cache, so this does not measure a disk's speed.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from data_plane.files.disk import Disk
from data_plane.files.record import HEADER_BYTES, read_data, read_header
from integrations.push.benchmarks.planes import BLOCK_BYTES, LAYOUT, planes
from integrations.push.benchmarks.rates import Rates, report_rates
from kvplane import ControlClient, Execution, Session, Tensor, ops

POOL = "files"
SEQUENCE = 1
WAYS = ("files alone", "loaded", "written")


class Bench:
    """One prompt of ``num_blocks`` blocks."""

    def __init__(
        self, session: Session, execution: Execution, folder: Path, num_blocks: int
    ) -> None:
        self._session = session
        self._execution = execution
        self._folder = folder
        self._num_blocks = num_blocks
        self._tokens = [i % 1000 for i in range(num_blocks * LAYOUT.block_size_tokens)]
        shape = (len(self._tokens), 8, 64)
        self._key = Tensor("float32", shape, os.urandom(Tensor.size_bytes("float32", shape)))

    async def fill(self) -> None:
        """Compute the prompt, look it up, and have it written to files."""
        await self.written(skip_prefix_lookup=False)
        await self._session.submit_receipts()
        plan = (await self._session.run(ops.admit(SEQUENCE, [*self._tokens, 0]))).plan
        await self._write(plan, Tensor.zeros("float32", (1, 8, 64)))
        await self._free()
        while len(self._paths()) < self._num_blocks:
            await asyncio.sleep(0.05)

    async def files_alone(self) -> float:
        """Read the files once; return the seconds."""
        begin_s = time.perf_counter()
        for path in self._paths():
            content = Disk().read(path, HEADER_BYTES + BLOCK_BYTES)
            read_data(content, read_header(content[:HEADER_BYTES])[0])
        return time.perf_counter() - begin_s

    async def loaded(self) -> float:
        """Load the files once; return the seconds."""
        plan = await self._admit(skip_prefix_lookup=True)
        begin_s = time.perf_counter()
        await self._execution.start(plan)
        await self._execution.load_files(SEQUENCE, self._tokens)
        took_s = time.perf_counter() - begin_s
        await self._free()
        return took_s

    async def written(self, *, skip_prefix_lookup: bool = True) -> float:
        """Write the prompt once; return the seconds."""
        plan = await self._admit(skip_prefix_lookup=skip_prefix_lookup)
        begin_s = time.perf_counter()
        await self._write(plan, self._key)
        took_s = time.perf_counter() - begin_s
        await self._free()
        return took_s

    async def _write(self, plan: Any, key: Tensor) -> None:
        await self._execution.start(plan)
        for layer in self._execution.layers:
            await self._execution.layer(layer, None, key, key)

    def _paths(self) -> list[Path]:
        return [*self._folder.rglob("*.block")]

    async def _admit(self, **options: bool) -> Any:
        operation = ops.admit(SEQUENCE, self._tokens, **options)
        return (await self._session.run(operation)).plan

    async def _free(self) -> None:
        assert self._execution.has_run
        await self._execution.start((await self._session.run(ops.free(SEQUENCE))).plan)
        await self._session.submit_receipts()


async def measure(address: str, files: Path, num_blocks: int, num_rounds: int) -> Rates:
    """Time all ways by turns."""
    rates: Rates = {name: [] for name in WAYS}
    async with ControlClient(address, timeout_s=60) as control:
        await control.wait_ready(POOL, timeout_s=180)
        async with (
            control.open_session(POOL, LAYOUT) as session,
            session.open_execution() as execution,
        ):
            bench = Bench(session, execution, files, num_blocks)
            await bench.fill()
            for number in range(num_rounds + 1):
                for name, way in zip(
                    WAYS, (bench.files_alone, bench.loaded, bench.written), strict=True
                ):
                    took_s = await way()
                    if number:  # the first round is a warm-up
                        rates[name].append(num_blocks * BLOCK_BYTES / took_s / 1e9)
    return rates


def tokens_per_s(rates: Rates, median: float) -> str:
    """Return the median in tokens a second."""
    return f"{median * 1e9 / (BLOCK_BYTES // LAYOUT.block_size_tokens):.0f}"


def main() -> None:
    def run(folder: Path, num_blocks: int, num_rounds: int) -> Rates:
        files, num_bytes = folder / "files", 2 * num_blocks * (BLOCK_BYTES + HEADER_BYTES)
        flags = ("--file-tier-dir", str(files), "--file-tier-bytes", str(num_bytes))
        with planes(folder, num_blocks, [POOL], *flags) as address:
            return asyncio.run(measure(address, files, num_blocks, num_rounds))

    report_rates(__doc__, run, "tokens/s", tokens_per_s, num_rounds=5)


if __name__ == "__main__":
    main()
