"""Prints the tables of a run for docs/performance.md, in Markdown.

python -m benchmarks.gpu.table RESULT.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases.published import PUBLISHED
from benchmarks.gpu.verdict import (
    COPIES,
    OVER_PEER,
    Results,
    Row,
    case_of,
    same_case,
    say,
    times_bf16,
    times_peer,
    verdicts,
)

NONE = "-"


def tables(result: dict[str, Any]) -> str:
    """Return machine, bandwidths, decode, prefill and append, copies, splits, and the targets."""
    results = Results(result)
    parts = (
        _machine(results),
        _bandwidths(results),
        _decode(results),
        _published(results),
        _append(results),
        _copies(results),
        _splits(results),
        _left_out(result),
        ["```", say(verdicts(result)), "```"],
    )
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _machine(results: Results) -> list[str]:
    about = results.machine
    return [
        f"{about['gpu']}, torch {about['torch']} with CUDA {about['cuda']}, "
        f"Python {about['python']}, {about['date']}: `benchmarks/gpu/run.sh`, and from its JSON "
        f"`python -m benchmarks.gpu.table`. Splits of {about['split_tokens']} tokens; "
        f"{about['method']}."
    ]


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    heads, body = list(heads), [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *body] if body else []


def _bandwidths(results: Results) -> list[str]:
    names = ("copy_bandwidth", "read_bandwidth", "link_out", "link_in")
    rows = [
        (name.replace("_", " "), f"{row['p50']:.0f}", row.get("by", NONE))
        for name in names
        for row in results.named(name)
    ]
    return _table(("bandwidth", "GB/s", "best by"), rows)


def _share(rate: float, whole: float | None) -> str:
    return NONE if whole is None else f"{rate / whole:.0%}"


def _times(times: float | None) -> str:
    return NONE if times is None else f"{times:.2f}"


def _peer(results: Results, row: Row) -> str:
    times, peer = times_peer(results, row), results.best_peer(row)
    return NONE if times is None or peer is None else f"{times:.2f} ({peer['name'].split('/')[1]})"


def _sorted(rows: Iterable[Row]) -> list[Row]:
    """Sort rows: the common geometry first, then the others, each by batch and context."""
    names = ("heads", "kv_heads", "head", "block")

    def order(row: Row) -> tuple[Any, ...]:
        geometry = tuple(row[name] for name in names)
        return (geometry != (32, 8, 128, 16), geometry, row["batch"], row["context"], row["new"])

    return sorted(rows, key=order)


def _decode(results: Results) -> list[str]:
    copy, read = results.bandwidth("copy_bandwidth"), results.bandwidth("read_bandwidth")
    fp8_rows = [row for row in results.ours("decode") if row["kv_dtype"] != "bfloat16"]

    def lines() -> Iterator[tuple[str, ...]]:
        for row in _sorted(results.ours("decode")):
            if row["kv_dtype"] != "bfloat16":
                continue
            case, rate = case_of(row), float(row["p50"])
            fp8 = next((r for r in fp8_rows if results.as_bf16(r) is row), None)
            yield (
                *(case, f"{row['us']:.0f}", f"{rate:.0f}", _share(rate, copy), _share(rate, read)),
                _peer(results, row),
                NONE if fp8 is None else f"{fp8['p50']:.0f}",
                NONE if fp8 is None else _times(times_bf16(results, fp8)),
            )

    heads = ("decode", "µs", "GB/s", "of copy", "of read", "× best peer", "fp8 GB/s", "fp8 × bf16")
    return _table(heads, lines())


def _published(results: Results) -> list[str]:
    """Return published times beside ours of the same batches, whatever GPU ran ours."""

    def lines() -> Iterator[tuple[str, ...]]:
        for there in PUBLISHED:
            case = {"name": "decode", **there.shape.named()}
            row = next((r for r in results.ours("decode") if same_case(r, case)), None)
            here = (NONE, NONE)
            if row is not None:
                here = f"{row['us']:.1f}", f"{there.us / float(row['us']):.2f}"
            said = f"{there.by}, {there.gpu}", case_of(case), there.differs
            yield (*said, f"{there.us:.1f}", *here)

    heads = ("published", "decode", "differs", "µs there", "µs here", "times as fast")
    return _table(heads, lines())


def _append(results: Results) -> list[str]:
    rows = (
        (
            *(f"{row['new']} after {row['context'] - row['new']}", case_of(row)),
            *(f"{row['p50'] / 1e3:.1f}", f"{row['tflops']:.0f}", _peer(results, row)),
        )
        for row in _sorted(results.ours("append"))
    )
    return _table(("new tokens", "batch", "thousand tokens/s", "TFLOP/s", "× best peer"), rows)


def _copies(results: Results) -> list[str]:
    copy = results.bandwidth("copy_bandwidth")
    rows: list[tuple[str, ...]] = []
    for row in results.named("reshape_and_cache"):
        what = f"{row['tokens']} tokens, {row['kv_dtype']}"
        rows.append((row["name"], what, f"{row['p50']:.0f}", _share(row["p50"], copy)))
    for name, whole in (
        *((name, copy) for name in COPIES),
        *((f"swap_{way}", results.bandwidth(f"link_{way}")) for way in ("out", "in")),
    ):
        for row in results.named(name):
            what = f"{row['num_blocks']} blocks of {row['block_bytes'] >> 10} KiB, {row['order']}"
            rows.append((name, what, f"{row['p50']:.1f}", _share(row["p50"], whole)))
    return _table(("operation", "of", "GB/s", "of copy, or of the link"), rows)


def _splits(results: Results) -> list[str]:
    """Return the decode rows for which another split is faster by OVER_PEER or more."""
    rows = []
    for row in _sorted(results.ours("decode")):
        best = results.best_split(row)
        gain = float(best["p50"]) / float(row["p50"])
        if gain >= OVER_PEER:
            rows.append((case_of(row), str(best["split"]), f"{gain:.2f}"))
    return _table(("decode, faster with another split", "tokens", "times"), rows)


def _left_out(result: dict[str, Any]) -> list[str]:
    """Return the wrong results, and the cases left out, with number and reason."""
    reasons: Counter[str] = Counter()
    for line in result["left_out"]:
        name, _, reason = line.partition(": ")
        reasons[f"{name.split(' ')[0]}: {reason}"] += 1
    said = [f"- wrong: {line}" for line in result["wrong"]]
    return [*said, *(f"- left out, {count} times: {why}" for why, count in reasons.items())]


def main() -> None:
    print(tables(json.loads(Path(sys.argv[1]).read_text())), end="")


if __name__ == "__main__":
    main()
