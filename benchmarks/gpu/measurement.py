"""The rows so far, the omitted cases with reasons, and the wrong results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.device.machine import Machine

Cases = Sequence[dict[str, Any]]
SAVE_EVERY_S: Final = 5.0


class Measurement:
    """One run on one machine. ``seconds``: nothing is started later than that after the start.

    ``folder``: where rows are saved now and then, in case the run is cut off. ``cases``: the
    descriptions of our rows that a piece of work is to add. Rows that could not be timed are kept,
    so that no target seems met because its rows are missing.
    """

    def __init__(self, machine: Machine, seconds: float, *, folder: Path | None = None) -> None:
        self.machine = machine
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.wrong: list[str] = []
        self.not_timed: list[dict[str, Any]] = []
        self._began = time.monotonic()
        self._seconds = seconds
        self._folder = folder
        self._saved_s = -SAVE_EVERY_S

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def copy_gb_s(self) -> float | None:
        """The copy bandwidth of the device; None where it was not measured."""
        return next((row["p50"] for row in self.rows if row["name"] == "copy_bandwidth"), None)

    def add(self, name: str, unit: str, value: float, **about: Any) -> None:
        """Print and keep a row."""
        row = {"name": name, "unit": unit, "p50": float(f"{value:.6g}"), **about}
        print(json.dumps(row), flush=True)
        self.rows.append(row)
        if self._folder is not None and self.elapsed_s - self._saved_s > SAVE_EVERY_S:
            self.save(self._folder)
            self._saved_s = self.elapsed_s

    def leave_out(self, name: str, why: str, cases: Cases = ()) -> None:
        lines = why.strip().splitlines() or ["no reason given"]
        self.left_out.append(f"{name}: {lines[0][:200]}")
        self.not_timed += [{**case, "wrong": False} for case in cases]
        print(f"left out: {self.left_out[-1]}", flush=True)

    def is_right(self, name: str, right: bool, said: str = "", cases: Cases = ()) -> bool:
        """Return ``right``. A wrong result is noted: it is not timed, and the run fails."""
        if not right:
            self.wrong.append(f"{name} {said}".strip())
            self.not_timed += [{**case, "wrong": True} for case in cases]
            print(f"WRONG: {self.wrong[-1]}", flush=True)
        return right

    def has_time_for(self, name: str, cases: Cases = ()) -> bool:
        if self.elapsed_s < self._seconds:
            return True
        self.leave_out(name, f"no time left after {self._seconds:.0f} s", cases)
        return False

    def attempt(
        self, name: str, work: Callable[[], None], *, is_ours: bool = False, cases: Cases = ()
    ) -> None:
        """Run ``work``. If it raises, note why it is left out, and continue.

        is_ours: it runs our kernels, whose errors are wrong results unless memory is short.
        """
        try:
            work()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            if is_ours and not isinstance(error, torch.OutOfMemoryError):
                self.is_right(name, False, said, cases)
            else:
                self.leave_out(name, said, cases)
        self.machine.tidy()

    def save(self, folder: Path) -> Path:
        """Write the rows so far to ``<GPU>-<date>.json``, whole or not at all."""
        result = self.result()
        folder.mkdir(parents=True, exist_ok=True)
        gpu = str(result["machine"]["gpu"]).lower().replace(" ", "-")
        path = folder / f"{gpu}-{result['machine']['date']}.json"
        scratch = path.with_suffix(".part")
        scratch.write_text(json.dumps(result, indent=1) + "\n")
        scratch.replace(path)
        return path

    def result(self) -> dict[str, Any]:
        """Return the contents of the JSON file."""
        return {
            "machine": self.machine.describe() | {"seconds": round(self.elapsed_s, 1)},
            "rows": self.rows,
            "left_out": self.left_out,
            "wrong": self.wrong,
            "not_timed": self.not_timed,
        }
