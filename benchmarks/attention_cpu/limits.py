"""Compares the kernels with bare loops, which show the limits of this machine.

    python -m benchmarks.attention_cpu.limits JSON

``read_pages`` reads the pages of decode, in its order, and does nothing else. ``fused_products``
multiplies and adds in registers, and loads nothing. The table is the last one that
``benchmarks.attention_cpu`` prints, here of a run whose JSON was saved.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import kvplane_kernels

from benchmarks.attention_cpu.rows import (
    DTYPES,
    HEAD_SIZE,
    NUM_KV_HEADS,
    PREFILL_GROUP,
    Sizes,
)
from benchmarks.common.calls import BILLIONS_OF_PRODUCTS, Calls, Pass, Spread

BARE_ROUNDS = 100_000
FUSED_TYPES = ("bf16", "e4m3")  # pages over which products and sums are fused


def products_of_prefill(num_tokens: float) -> float:
    """Count products of queries with keys and weights with values, where queries see keys."""
    num_seen = num_tokens * (num_tokens + 1) / 2
    return num_seen * NUM_KV_HEADS * PREFILL_GROUP * 2 * HEAD_SIZE


def bare_rows(num_threads: int) -> list[Calls]:
    """Return the bare loop of products; no row where the instruction set has no fused products."""

    def multiply() -> int:
        return kvplane_kernels.fused_products(num_rounds=BARE_ROUNDS, num_threads=num_threads)

    num_products = multiply()
    if num_products == 0:
        return []
    return [Calls("fused_products", BILLIONS_OF_PRODUCTS, num_products, multiply)]


def limits(rows: Sequence[Calls]) -> Iterator[str]:
    """Return a table in Markdown, by wall time; an empty one without the bare loop of products."""
    rates = {row.name: row.rate() for row in rows}
    if "fused_products" not in rates:
        return
    products = rates["fused_products"].middle
    yield f"By wall time; fused_products: {products:.1f} * {BILLIONS_OF_PRODUCTS}\n"
    yield "| | reached | read_pages | of it | fused_products | of it |"
    yield "|" + "---|" * 6
    for row in rows:
        reached = rates[row.name].middle
        kind, _, which = row.name.partition("/")
        name, _, group = which.partition("/g")
        if kind == "decode" and name in FUSED_TYPES:
            by_products = products * DTYPES[name].itemsize / int(group)
            yield _line(row.name, reached, rates.get(f"read_pages/{name}"), by_products)
        elif kind == "prefill":
            by_products = products * 1e9 * row.amount / products_of_prefill(row.amount)
            yield _line(f"prefill, {row.unit}", reached, None, by_products)


def _line(name: str, reached: float, pages: Spread | None, by_products: float) -> str:
    read = " | " if pages is None else f"{pages.middle:.1f} | {reached / pages.middle:.0%}"
    figures = f"{reached:,.1f} | {read} | {by_products:,.1f} | {reached / by_products:.0%}"
    return " ".join(f"| {name} | {figures} |".split())


def saved_rows(saved: Path) -> list[Calls]:
    """Return the rows of a saved run, with the medians of their passes' medians."""
    rows = []
    for row in json.loads(saved.read_text())["rows"]:
        name, unit, rate = row["name"], row["unit"], row["p50"]
        amount = Sizes().prefill_tokens if unit == "tokens/s" else rate * 1e9
        seconds = amount / rate / (1 if unit == "tokens/s" else 1e9)
        rows.append(Calls(name, unit, amount, lambda: None, passes=[Pass([seconds], [seconds])]))
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Print the table of a saved run, which must not be a quick one."""
    parser = argparse.ArgumentParser(description="Compare a run with its bare loops.")
    parser.add_argument("json", type=Path, help="as benchmarks.attention_cpu saved it")
    print(*limits(saved_rows(parser.parse_args(words).json)), sep="\n")


if __name__ == "__main__":
    main()
