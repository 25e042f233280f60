"""Compares a run with the targets, and prints its figures as a table for docs/performance.md.

    python -m benchmarks.gpu.verdict RESULT.jsonl

The targets for decode apply to the data plane's split, to batches of 16 or more sequences of 4096
or more tokens. A case that was wrong once, even at another split, is missed. A target is met, met
so far if cases were left out, missed, or not measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.common.report import markdown

SPLIT: Final = 512
OF_COPY: Final = 0.90
OF_READ: Final = 0.93
OVER_PEER: Final = 1.05
OVER_BF16: Final = 1.7
OVER_ALONE: Final = 3.0
OF_LINK: Final = 0.90
TARGETS: Final = {
    "copy": f"decode ≥ {OF_COPY:.0%} of copy bandwidth",
    "peer": f"decode ≥ {OVER_PEER} × the best peer or ≥ {OF_READ:.0%} of read bandwidth",
    "fp8": f"fp8 decode ≥ {OVER_BF16} × bf16",
    "shared": f"decode over a shared prefix ≥ {OVER_ALONE} × without sharing",
    "copies": f"copies ≥ {OF_COPY:.0%} of copy bandwidth",
    "swaps": f"swaps ≥ {OF_LINK:.0%} of the link",
}
COPIES: Final = ("copy_blocks", "gather_blocks", "scatter_blocks")
SWAPS: Final = {"swap_out": "link_out", "swap_in": "link_in"}
_SIZES: Final = ("batch", "context", "heads", "kv_heads", "head", "block", "new", "shared")
_OF_CASE: Final = (*_SIZES, "kv_dtype", "block_bytes", "order")

Row = dict[str, Any]
Judged = tuple[bool | None, str]


@dataclass(frozen=True)
class Verdict:
    """The verdict on a case of a target. ``met``: None if the case was left out."""

    target: str
    case: str
    met: bool | None
    figures: str


def is_held(row: Row) -> bool:
    """Return whether decode of this batch has a target."""
    return bool(row["batch"] >= 16 and row["context"] >= 4096)


class Results:
    """The rows of a run, and queries on them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def bandwidth(self, name: str) -> float | None:
        found = self.named(f"{name} bandwidth")
        return float(found[0]["gb_s"]) if found else None

    def named(self, name: str) -> list[Row]:
        return [row for row in self.rows if row["case"] == name]

    def like(self, name: str, row: Row, **other: str) -> list[Row]:
        """Return the timed rows of an operation on the same batch or blocks, fastest first.
        ``other``: columns that differ.
        """
        wanted = [(row | other).get(column) for column in _OF_CASE]
        found = [
            each
            for each in self.named(name)
            if "us" in each and [each.get(column) for column in _OF_CASE] == wanted
        ]
        return sorted(found, key=lambda each: float(each["us"]))

    def ours(self, name: str, row: Row, **other: str) -> Row | None:
        """Return our row of the same batch with the data plane's split."""
        found = self.like(name, row, **other)
        return next((each for each in found if each.get("split", SPLIT) == SPLIT), None)

    def best_peer(self, row: Row) -> Row | None:
        """Return the fastest peer's row of the same batch."""
        start = f"{row['case']}/"
        names = {each["case"] for each in self.rows if each["case"].startswith(start)} - {
            "shared/alone"
        }
        found = [each for name in names for each in self.like(name, row)]
        return min(found, key=lambda each: float(each["us"]), default=None)

    def times(self, row: Row, other: Row | None) -> float | None:
        """Return the time of another row, divided by this one's."""
        return None if other is None else float(other["us"]) / float(row["us"])

    # Each judges a timed row with the data plane's split.

    def of_copy(self, row: Row) -> Judged:
        return self._share(row, "copy", OF_COPY)

    def of_peers(self, row: Row) -> Judged:
        met, said = self._share(row, "read", OF_READ)
        peer = self.best_peer(row)
        ratio = self.times(row, peer)
        if peer is None or ratio is None:
            return met, f"{said} of read"
        said = f"{ratio:.2f} × {peer['case'].split('/')[1]}, {said} of read"
        return bool(met) or ratio >= OVER_PEER, said

    def of_bf16(self, row: Row) -> Judged:
        return _least(self.times(row, self.ours("decode", row, kv_dtype="bfloat16")), OVER_BF16)

    def of_alone(self, row: Row) -> Judged:
        return _least(self.times(row, self.ours("shared/alone", row)), OVER_ALONE)

    def of_link(self, row: Row) -> Judged:
        return self._share(row, SWAPS[row["case"]], OF_LINK)

    def _share(self, row: Row, name: str, least: float) -> Judged:
        whole = self.bandwidth(name)
        if whole is None:
            return None, f"no {name} bandwidth"
        share = float(row["gb_s"]) / whole
        return share >= least, f"{share:.1%}"


def _least(ratio: float | None, least: float) -> Judged:
    if ratio is None:
        return None, "nothing to compare with"
    return ratio >= least, f"{ratio:.2f} ×"


def verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Yield a verdict for each case that has a target, measured or not."""
    results = Results(rows)
    judges: list[tuple[str, str, Callable[[Row], Judged]]] = [
        ("copy", "decode", results.of_copy),
        ("peer", "decode", results.of_peers),
        ("fp8", "decode", results.of_bf16),
        ("shared", "shared", results.of_alone),
        *(("copies", name, results.of_copy) for name in COPIES),
        *(("swaps", name, results.of_link) for name in SWAPS),
    ]
    for target, name, judge in judges:
        of_cases: dict[tuple[Any, ...], list[Row]] = {}
        for row in results.named(name):
            of_cases.setdefault(tuple(row.get(column) for column in _OF_CASE), []).append(row)
        for found in of_cases.values():
            is_bf16 = found[0].get("kv_dtype") == "bfloat16"
            if name == "decode" and not (is_held(found[0]) and is_bf16 == (target != "fp8")):
                continue
            timed = results.ours(name, found[0])
            if any(row.get("ok") is False for row in found):
                met, said = False, "wrong"
            else:
                met, said = (None, "") if timed is None else judge(timed)
            yield Verdict(target, case_of(found[0]), met, said)


def case_of(row: Row) -> str:
    """Describe a case in a few words."""
    if "batch" not in row:
        return f"{row['case']}, {row.get('order', '')} blocks of {row['block_bytes'] >> 10} KiB"
    words = f"{row['case']} {row['batch']} × {row['context']}, heads {row['heads']}/"
    words += f"{row['kv_heads']} of {row['head']}, blocks of {row['block']}"
    words += f", {row['new']} new" if row["new"] > 1 else ""
    words += f", {row['shared']} tokens shared" if row["shared"] else ""
    return words if row["kv_dtype"] == "bfloat16" else f"{words}, {row['kv_dtype']}"


def said(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for every case, missed ones first, and the summary last."""
    found = list(verdicts(rows))
    for met, word in ((False, "MISSED"), (None, "left out"), (True, "met")):
        for each in (each for each in found if each.met is met):
            yield f"{word:8}  {TARGETS[each.target]}: {each.case}: {each.figures}".rstrip(": ")
    for target, text in TARGETS.items():
        mets = [each.met for each in found if each.target == target]
        num_met, num_missed, num_left_out = (mets.count(met) for met in (True, False, None))
        word = "missed" if num_missed else "met" if num_met else "not measured"
        if num_left_out:
            word += f"{' so far' if word == 'met' else ''}, {num_left_out} left out"
        yield f"{word}: {text} ({num_met} of {num_met + num_missed} cases)"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table of our rows with the data plane's split, beside peers and other splits."""
    results = Results(rows)
    heads = ("", "µs", "GB/s", "of copy, read or link", "TFLOP/s", "× best peer", "fastest split")

    def cells() -> Iterator[list[str]]:
        for row in results.rows:
            is_ours = "/" not in row["case"] and row.get("split", SPLIT) == SPLIT
            if "us" not in row or not is_ours:
                continue
            share = results.of_link(row) if row["case"] in SWAPS else results.of_copy(row)
            peer = results.best_peer(row)
            best = results.like(row["case"], row)[0]
            yield [
                case_of(row),
                *(f"{row['us']:.1f}", f"{row['gb_s']:.0f}", share[1]),
                f"{row['tflops']:.0f}" if "tflops" in row else "",
                "" if peer is None else f"{peer['us'] / row['us']:.2f} ({peer['case']})",
                f"{best['split']}: {row['us'] / best['us']:.2f} ×" if "split" in best else "",
            ]

    yield from markdown(heads, cells())


def main() -> None:
    lines = Path(sys.argv[1]).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    print(*table(rows), "", *said(rows), sep="\n")


if __name__ == "__main__":
    main()
