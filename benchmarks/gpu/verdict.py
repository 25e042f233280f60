"""Compares a run with the targets: met, met so far, missed, or not measured.

    python -m benchmarks.gpu.verdict RESULT.json

The targets for decode apply to the data plane's split, to batches of 16 or more sequences of 4096
or more tokens. A case with a wrong result is missed. If cases of a target were left out, it is "met
so far" at best.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MIN_BATCH: Final = 16
MIN_CONTEXT: Final = 4096
OF_COPY: Final = 0.90
OF_READ: Final = 0.93
OVER_PEER: Final = 1.05
OVER_BF16: Final = 1.7
OVER_ALONE: Final = 3.0
OF_LINK: Final = 0.90

BANDWIDTH_TARGET: Final = f"decode ≥ {OF_COPY:.0%} of copy bandwidth"
PEER_TARGET: Final = f"decode ≥ {OVER_PEER} × the best peer or ≥ {OF_READ:.0%} of read bandwidth"
FP8_TARGET: Final = f"fp8 decode ≥ {OVER_BF16} × bf16"
SHARED_TARGET: Final = f"decode over a shared prefix ≥ {OVER_ALONE} × without sharing"
COPY_TARGET: Final = f"copies ≥ {OF_COPY:.0%} of copy bandwidth"
SWAP_TARGET: Final = f"swaps ≥ {OF_LINK:.0%} of the link"
TARGETS: Final = (
    *(BANDWIDTH_TARGET, PEER_TARGET, FP8_TARGET, SHARED_TARGET, COPY_TARGET, SWAP_TARGET),
)
COPIES: Final = ("copy_blocks", "gather_blocks", "scatter_blocks")
SWAPS: Final = ("swap_out", "swap_in")
_SIZES: Final = ("batch", "context", "heads", "kv_heads", "head", "block", "new", "shared")
_ORDER: Final = (False, None, True)
_OF_CASE: Final = (*_SIZES, "kv_dtype", "block_bytes", "order")

Row = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """The verdict on a case of a target. ``met``: None if the case was left out."""

    target: str
    case: str
    met: bool | None
    figures: str

    @property
    def word(self) -> str:
        return {True: "met", False: "MISSED", None: "left out"}[self.met]


class Results:
    """The rows of a run, and queries on them."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.machine: Row = result["machine"]
        self.rows: list[Row] = result["rows"]
        self.not_timed: list[Row] = result["not_timed"]

    def bandwidth(self, name: str) -> float | None:
        return next((row["p50"] for row in self.rows if row["name"] == name), None)

    def named(self, name: str) -> list[Row]:
        return [row for row in self.rows if row["name"] == name]

    def ours(self, kind: str) -> list[Row]:
        """Return the rows of ``decode`` or ``append`` with the data plane's split."""
        return [row for row in self.named(kind) if row["split"] == self.machine["split_tokens"]]

    def judged(self, name: str) -> tuple[list[Row], list[Row], list[Row]]:
        """Return an operation's rows to judge, wrong cases, and cases left out, each once.

        A case that was wrong once, even at another split, counts as wrong.
        """
        rows = self.ours(name) if name == "decode" else self.named(name)
        lost = [row for row in self.not_timed if row["name"] == name]
        wrong = _each_once([row for row in lost if row["wrong"]], [])
        rows = [row for row in rows if not _is_in(row, wrong)]
        return rows, wrong, _each_once([row for row in lost if not row["wrong"]], [*rows, *wrong])

    def best_split(self, row: Row) -> Row:
        """Return the row with the fastest split for the same batch."""
        same = [r for r in self.named(row["name"]) if same_case(r, row)]
        return max(same, key=lambda r: float(r["p50"]))

    def best_peer(self, row: Row) -> Row | None:
        """Return the fastest peer's row for the same batch and type of KV."""
        start = f"{row['name']}/"
        peers = [r for r in self.rows if r["name"].startswith(start) and same_case(r, row)]
        return max(peers, key=lambda r: float(r["p50"]), default=None)

    def as_bf16(self, row: Row) -> Row | None:
        """Return the row of the same batch in bf16."""
        wanted = {**row, "kv_dtype": "bfloat16"}
        return next((r for r in self.ours(row["name"]) if same_case(r, wanted)), None)


def times_bf16(results: Results, row: Row) -> float | None:
    """Return the time of the same batch in bf16, divided by this row's."""
    other = results.as_bf16(row)
    return None if other is None else float(other["us"]) / float(row["us"])


def times_peer(results: Results, row: Row) -> float | None:
    peer = results.best_peer(row)
    return None if peer is None else float(row["p50"]) / float(peer["p50"])


def case_of(row: Row) -> str:
    """Describe a batch of attention in a few words."""
    words = f"batch {row['batch']} × {row['context']}, heads {row['heads']}/{row['kv_heads']}"
    words += f" of {row['head']}, blocks of {row['block']}"
    if row.get("shared"):
        words += f", {row['shared']} tokens shared"
    return words if row["kv_dtype"] == "bfloat16" else f"{words}, {row['kv_dtype']}"


def verdicts(result: dict[str, Any]) -> list[Verdict]:
    """Return a verdict for each case that has a target, measured or not."""
    results = Results(result)
    return [*_of_decode(results), *_of_shared(results), *_of_copies(results)]


def is_held(row: Row) -> bool:
    """Return whether decode of this batch has a target."""
    return bool(row["batch"] >= MIN_BATCH and row["context"] >= MIN_CONTEXT)


def same_case(a: Row, b: Row) -> bool:
    """Return whether two rows are of the same batch and type, or of the same blocks."""
    return all(a.get(name) == b.get(name) for name in _OF_CASE)


def _is_in(row: Row, rows: list[Row]) -> bool:
    return any(same_case(row, other) for other in rows)


def _each_once(rows: list[Row], known: list[Row]) -> list[Row]:
    found: list[Row] = []
    for row in rows:
        if not _is_in(row, [*known, *found]):
            found.append(row)
    return found


def _lost(target: str, case: str, *, wrong: bool) -> Verdict:
    return Verdict(target, case, False, "wrong") if wrong else Verdict(target, case, None, "")


def _of_decode(results: Results) -> Iterator[Verdict]:
    rows, *lost = results.judged("decode")
    for row in filter(is_held, rows):
        if row["kv_dtype"] == "bfloat16":
            yield _against_copy(results, row)
            yield _against_peers(results, row)
        else:
            yield _against_bf16(results, row)
    for row in filter(is_held, (row for some in lost for row in some)):
        targets: tuple[str, ...] = (FP8_TARGET,)
        if row["kv_dtype"] == "bfloat16":
            targets = (BANDWIDTH_TARGET, PEER_TARGET)
        for target in targets:
            yield _lost(target, case_of(row), wrong=row["wrong"])


def _against_copy(results: Results, row: Row) -> Verdict:
    copy, case, rate = results.bandwidth("copy_bandwidth"), case_of(row), float(row["p50"])
    if copy is None:
        return Verdict(BANDWIDTH_TARGET, case, None, "no copy bandwidth")
    share = rate / copy
    return Verdict(BANDWIDTH_TARGET, case, share >= OF_COPY, f"{share:.1%}{_estimated(row, share)}")


def _estimated(row: Row, share: float) -> str:
    """Return the share that the model of benchmarks/gpu/estimate.py gave before the run."""
    if "estimated_us" not in row:
        return ""
    most, least = (share * row["us"] / time for time in row["estimated_us"])
    return f" (estimated {least:.0%} to {most:.0%})"


def _against_peers(results: Results, row: Row) -> Verdict:
    read, case, rate = results.bandwidth("read_bandwidth"), case_of(row), float(row["p50"])
    if read is None:
        return Verdict(PEER_TARGET, case, None, "no read bandwidth")
    ratio, peer = times_peer(results, row), results.best_peer(row)
    said = f"{rate / read:.1%} of read"
    if ratio is not None and peer is not None:
        said = f"{ratio:.2f} × {peer['name'].split('/')[1]}, {said}"
    met = rate >= OF_READ * read or (ratio is not None and ratio >= OVER_PEER)
    return Verdict(PEER_TARGET, case, met, said)


def _against_bf16(results: Results, row: Row) -> Verdict:
    ratio = times_bf16(results, row)
    if ratio is None:
        return Verdict(FP8_TARGET, case_of(row), None, "no bf16 of the same batch")
    return Verdict(FP8_TARGET, case_of(row), ratio >= OVER_BF16, f"{ratio:.2f} ×")


def _of_shared(results: Results) -> Iterator[Verdict]:
    rows, *lost = results.judged("shared")
    for row in rows:
        alone = next((r for r in results.named("shared/alone") if same_case(r, row)), None)
        if alone is None:
            yield Verdict(SHARED_TARGET, case_of(row), None, "not measured without sharing")
            continue
        ratio = float(alone["us"]) / float(row["us"])
        said = f"{ratio:.1f} ×{_estimated_ratio(row, alone)}"
        yield Verdict(SHARED_TARGET, case_of(row), ratio >= OVER_ALONE, said)
    for row in (row for some in lost for row in some):
        yield _lost(SHARED_TARGET, case_of(row), wrong=row["wrong"])


def _estimated_ratio(row: Row, alone: Row) -> str:
    """Return the ratio of two rows' estimates, as ``_estimated`` does for one."""
    if "estimated_us" not in row or "estimated_us" not in alone:
        return ""
    pairs = zip(alone["estimated_us"], row["estimated_us"], strict=True)
    least, most = sorted(a / b for a, b in pairs)
    return f" (estimated {least:.1f} to {most:.1f})"


def _of_copies(results: Results) -> Iterator[Verdict]:
    for target, share, names, whole in (
        (COPY_TARGET, OF_COPY, COPIES, "copy_bandwidth"),
        (SWAP_TARGET, OF_LINK, SWAPS[:1], "link_out"),
        (SWAP_TARGET, OF_LINK, SWAPS[1:], "link_in"),
    ):
        bandwidth = results.bandwidth(whole)
        for name in names:
            rows, *lost = results.judged(name)
            yield from (_of_blocks(target, row, bandwidth, share) for row in rows)
            for row in (row for some in lost for row in some):
                yield _lost(target, _blocks_of(row), wrong=row["wrong"])


def _blocks_of(row: Row) -> str:
    return f"{row['name']}, {row['order']} blocks of {row['block_bytes'] >> 10} KiB"


def _of_blocks(target: str, row: Row, bandwidth: float | None, share: float) -> Verdict:
    case, rate = _blocks_of(row), float(row["p50"])
    if bandwidth is None:
        return Verdict(target, case, None, "no bandwidth to compare with")
    return Verdict(target, case, rate >= share * bandwidth, f"{rate / bandwidth:.1%}")


def summary(found: list[Verdict]) -> list[str]:
    """Return a line for each target: how many of its cases meet it."""
    lines = []
    for target in TARGETS:
        mets = [v.met for v in found if v.target == target]
        num_met, num_missed, num_left_out = (mets.count(met) for met in (True, False, None))
        word = "missed" if num_missed else "met" if num_met else "not measured"
        if num_left_out:
            word += f"{' so far' if word == 'met' else ''}, {num_left_out} left out"
        lines.append(f"{word}: {target} ({num_met} of {num_met + num_missed} cases)")
    return lines


def say(found: list[Verdict]) -> str:
    """Return a line for every case, missed ones first, and the summary last."""
    lines = [
        f"{v.word:8}  {v.target}: {v.case}{': ' if v.figures else ''}{v.figures}"
        for v in sorted(found, key=lambda v: (_ORDER.index(v.met), TARGETS.index(v.target)))
    ]
    return "\n".join([*lines, *summary(found)])


def main() -> None:
    print(say(verdicts(json.loads(Path(sys.argv[1]).read_text()))))


if __name__ == "__main__":
    main()
