"""The tables of ``benchmarks.attention_cpu`` in Markdown, with each goal beside the figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.common.calls import Calls, Spread

SHARES_OF_READ = {
    "avx512bf16": {"decode/bf16/g1": 0.85, "decode/bf16/g4": 0.65, "decode/bf16/g8": 0.50},
    "avx2": {"decode/bf16/g1": 0.70, "decode/bf16/g4": 0.60, "decode/bf16/g8": 0.35},
}
SHARES_OF_COPY = {"copy_blocks": 0.80, "swap_out": 0.80, "swap_in": 0.80}
TIMES_TORCH = {"decode/bf16": 2.0, "decode/fp32": 1.3, "prefill": 1.5}
HEADS = ("lowest to highest", "of memory", "goal", "torch", "× torch", "goal")


def tables(rows: Sequence[Calls], isa: str) -> str:
    """Return two tables: by wall time, and by CPU time. ``isa``: the instruction set, which has
    goals of its own.
    """
    clock = _table("GB/s", isa, rows, Calls.rate)
    core = _table("GB/s a core", isa, rows, Calls.best_rate_of_core)
    return "\n".join(
        (
            "By wall time, the median of the passes' medians:\n",
            *clock,
            "\nPer second of CPU time, the median of the passes' best calls:\n",
            *core,
        )
    )


def goal_of_torch(name: str) -> float | None:
    """Return how many times as fast as torch a row has to be."""
    return TIMES_TORCH.get(name.rpartition("/")[0] or name)


def _table(
    unit: str, isa: str, rows: Sequence[Calls], rate_of: Callable[[Calls], Spread]
) -> Iterator[str]:
    rates = {row.name: rate_of(row) for row in rows}
    yield f"| | {unit} | {' | '.join(HEADS)} |"
    yield "|" + "---|" * (2 + len(HEADS))
    for row in rows:
        if not row.name.startswith("torch"):
            yield " ".join(f"| {' | '.join(_cells(row, isa, rates))} |".split())


def _cells(row: Calls, isa: str, rates: dict[str, Spread]) -> list[str]:
    name = row.name if row.unit == "GB/s" else f"{row.name}, {row.unit}"
    rate = rates[row.name]
    cells = [name, _figure(rate.middle), f"{_figure(rate.lowest)} to {_figure(rate.highest)}"]
    return [*cells, *_of_memory(row, isa, rates), *_of_torch(row, rates)]


def _of_memory(row: Calls, isa: str, rates: dict[str, Spread]) -> list[str]:
    """Return the share of the memory's rate in the same passes, and the goal."""
    if row.unit != "GB/s" or row.name in ("read_bandwidth", "memcpy"):
        return ["", ""]
    whole = "read" if row.name.startswith(("decode", "read")) else "memcpy"
    limit = rates["read_bandwidth" if whole == "read" else whole]
    share = rates[row.name].middle / limit.middle
    goal = (SHARES_OF_READ.get(isa, {}) | SHARES_OF_COPY).get(row.name)
    said = "" if goal is None else f"{100 * goal:.0f} %: {_word(share >= goal)}"
    return [f"{100 * share:.1f} % of {whole}", said]


def _of_torch(row: Calls, rates: dict[str, Spread]) -> list[str]:
    """Return torch's figure, our figure divided by it, and the goal."""
    torch = rates.get("torch_prefill" if row.name == "prefill" else _torchs(row.name))
    if torch is None:
        return ["", "", ""]
    times, goal = rates[row.name].middle / torch.middle, goal_of_torch(row.name)
    said = "" if goal is None else f"{goal:g}: {_word(times >= goal)}"
    return [_figure(torch.middle), f"{times:.2f}", said]


def _torchs(name: str) -> str:
    kind, _, which = name.partition("/")
    return f"torch/{which}" if kind == "decode" else ""


def _word(met: bool) -> str:
    return "met" if met else "missed"


def _figure(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.1f}"
