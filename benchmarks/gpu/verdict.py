"""What was measured against what is to hold: met, missed, or not measured.

    python -m benchmarks.gpu.verdict RESULT.json

Decode counts at the split that the data plane takes, in batches of 16 and more over 4096 tokens
and more.
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
OF_LINK: Final = 0.90

BANDWIDTH_TARGET: Final = f"decode ≥ {OF_COPY:.0%} of copy bandwidth"
PEER_TARGET: Final = f"decode ≥ {OVER_PEER} × the best peer or ≥ {OF_READ:.0%} of read bandwidth"
FP8_TARGET: Final = f"fp8 decode ≥ {OVER_BF16} × bf16"
COPY_TARGET: Final = f"copies ≥ {OF_COPY:.0%} of copy bandwidth"
SWAP_TARGET: Final = f"swaps ≥ {OF_LINK:.0%} of the link"
TARGETS: Final = (BANDWIDTH_TARGET, PEER_TARGET, FP8_TARGET, COPY_TARGET, SWAP_TARGET)
COPIES: Final = ("copy_blocks", "gather_blocks", "scatter_blocks")
_SIZES: Final = ("batch", "context", "heads", "kv_heads", "head", "block", "new")

Row = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """Of one case under one target."""

    target: str
    case: str
    met: bool
    figures: str


class Results:
    """The rows of a run, by what is asked of them."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.machine: Row = result["machine"]
        self.rows: list[Row] = result["rows"]

    def bandwidth(self, name: str) -> float | None:
        return next((row["p50"] for row in self.rows if row["name"] == name), None)

    def named(self, name: str) -> list[Row]:
        return [row for row in self.rows if row["name"] == name]

    def ours(self, kind: str) -> list[Row]:
        """Of ``decode`` or ``append``: the rows of the split that the data plane takes."""
        return [row for row in self.named(kind) if row["split"] == self.machine["split_tokens"]]

    def best_split(self, row: Row) -> Row:
        """The fastest of the same batch."""
        same = [r for r in self.named(row["name"]) if _same(r, row)]
        return max(same, key=lambda r: float(r["p50"]))

    def best_peer(self, row: Row) -> Row | None:
        """The fastest peer of the same batch and type of KV."""
        start = f"{row['name']}/"
        peers = [r for r in self.rows if r["name"].startswith(start) and _same(r, row)]
        return max(peers, key=lambda r: float(r["p50"]), default=None)

    def as_bf16(self, row: Row) -> Row | None:
        """The row of the same batch over bf16."""
        wanted = {**row, "kv_dtype": "bfloat16"}
        return next((r for r in self.ours(row["name"]) if _same(r, wanted)), None)


def times_bf16(results: Results, row: Row) -> float | None:
    """How many times as fast as over bf16, in the time it takes."""
    other = results.as_bf16(row)
    return None if other is None else float(other["us"]) / float(row["us"])


def times_peer(results: Results, row: Row) -> float | None:
    peer = results.best_peer(row)
    return None if peer is None else float(row["p50"]) / float(peer["p50"])


def case_of(row: Row) -> str:
    """A batch of attention in a few words."""
    words = f"batch {row['batch']} × {row['context']}, heads {row['heads']}/{row['kv_heads']}"
    words += f" of {row['head']}, blocks of {row['block']}"
    return words if row["kv_dtype"] == "bfloat16" else f"{words}, {row['kv_dtype']}"


def verdicts(result: dict[str, Any]) -> list[Verdict]:
    """One for each case that was measured and has a target."""
    results = Results(result)
    return [*_of_decode(results), *_of_copies(results)]


def _same(a: Row, b: Row) -> bool:
    return all(a.get(name) == b.get(name) for name in (*_SIZES, "kv_dtype"))


def _of_decode(results: Results) -> Iterator[Verdict]:
    copy, read = results.bandwidth("copy_bandwidth"), results.bandwidth("read_bandwidth")
    for row in results.ours("decode"):
        if row["batch"] < MIN_BATCH or row["context"] < MIN_CONTEXT:
            continue
        case, rate = case_of(row), float(row["p50"])
        if row["kv_dtype"] != "bfloat16":
            ratio = times_bf16(results, row)
            if ratio is not None:
                yield Verdict(FP8_TARGET, case, ratio >= OVER_BF16, f"{ratio:.2f} ×")
            continue
        if copy is not None:
            yield Verdict(BANDWIDTH_TARGET, case, rate >= OF_COPY * copy, f"{rate / copy:.1%}")
        if read is not None:
            ratio, peer = times_peer(results, row), results.best_peer(row)
            said = f"{rate / read:.1%} of read"
            if ratio is not None and peer is not None:
                said = f"{ratio:.2f} × {peer['name'].split('/')[1]}, {said}"
            met = rate >= OF_READ * read or (ratio is not None and ratio >= OVER_PEER)
            yield Verdict(PEER_TARGET, case, met, said)


def _of_copies(results: Results) -> Iterator[Verdict]:
    for target, share, names, whole in (
        (
            COPY_TARGET,
            OF_COPY,
            ("copy_blocks", "gather_blocks", "scatter_blocks"),
            "copy_bandwidth",
        ),
        (SWAP_TARGET, OF_LINK, ("swap_out",), "link_out"),
        (SWAP_TARGET, OF_LINK, ("swap_in",), "link_in"),
    ):
        bandwidth = results.bandwidth(whole)
        if bandwidth is not None:
            for name in names:
                for row in results.named(name):
                    yield _of_blocks(target, row, bandwidth, share)


def _of_blocks(target: str, row: Row, bandwidth: float, share: float) -> Verdict:
    case = f"{row['name']}, {row['order']} blocks of {row['block_bytes'] >> 10} KiB"
    rate = float(row["p50"])
    return Verdict(target, case, rate >= share * bandwidth, f"{rate / bandwidth:.1%}")


def summary(found: list[Verdict]) -> list[str]:
    """A line for each target: in how many of its cases it is met."""
    lines = []
    for target in TARGETS:
        cases = [v for v in found if v.target == target]
        num_met = sum(v.met for v in cases)
        word = "not measured" if not cases else "met" if num_met == len(cases) else "missed"
        lines.append(f"{word}: {target} ({num_met} of {len(cases)} cases)")
    return lines


def say(found: list[Verdict]) -> str:
    """Every case, what was missed first, and the summary last."""
    lines = [
        f"{'met' if v.met else 'MISSED':6}  {v.target}: {v.case}: {v.figures}"
        for v in sorted(found, key=lambda v: (v.met, TARGETS.index(v.target)))
    ]
    return "\n".join([*lines, *summary(found)])


def main() -> None:
    print(say(verdicts(json.loads(Path(sys.argv[1]).read_text()))))


if __name__ == "__main__":
    main()
