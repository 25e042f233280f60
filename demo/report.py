"""What the demonstration prints, and what it takes to pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from demo.reference import LOGITS_TOLERANCE, Comparison, Verdict
from demo.workload import ANSWER_LETTERS, Question
from engine.llm import LLM
from engine.request import RequestOutput
from engine.stats import EngineStats
from examples.planes import Planes
from kvplane.v1 import control_pb2 as pb

MIN_RIGHT_SHARE: Final = 0.95
NUM_SHOWN: Final = 8
_SWAP_OUTS: Final = ("swap_out", "ok")
_ADMISSIONS: Final = ("admit", "ok")
_GRANTS: Final = "kvplane_admission_wait_seconds_count{"
_STEP_DURATION: Final = "kvplane_step_duration_seconds"


@dataclass(frozen=True, slots=True)
class Report:
    """Counts taken while the planes were up. All but ``stats`` and ``elapsed_s`` are the planes'
    own.

    A preemption, to the control plane, is a swap out, or an admission beyond the first of a
    request, at once or granted later. ``mean_step_us``: what a step took inside the control plane.
    """

    stats: EngineStats
    elapsed_s: float
    counters: pb.PoolCounters
    num_device_blocks: int
    num_swap_outs: int
    num_readmissions: int
    mean_step_us: float

    @property
    def num_preemptions(self) -> int:
        """Of both kinds."""
        return self.num_swap_outs + self.num_readmissions

    def complaints(
        self,
        asked: list[Question],
        outputs: list[RequestOutput],
        comparisons: list[Comparison],
    ) -> list[str]:
        """Why it did not pass; empty when it did."""
        found = [
            f"request {output.request_id}: {output.error}" for output in outputs if output.error
        ]
        num_right, num_greedy = count_right(asked, outputs)
        if num_right < MIN_RIGHT_SHARE * num_greedy:
            found.append(f"fewer than {MIN_RIGHT_SHARE:.0%} of the answers are right")
        if any(c.verdict is Verdict.DIFFERENT for c in comparisons):
            found.append("not all greedy requests are identical to transformers")
        required = {
            "prefix hit tokens": self.counters.num_hit_tokens,
            "copies on write": self.counters.num_copies_on_write,
            "blocks swapped out": self.counters.num_swapped_out_blocks,
            "blocks swapped in": self.counters.num_swapped_in_blocks,
            "evictions": self.counters.num_evictions,
            "preemptions": self.num_preemptions,
        }
        return found + [
            f"the planes counted no {what}" for what, num in required.items() if not num
        ]


def make_report(llm: LLM, planes: Planes, outputs: list[RequestOutput], elapsed_s: float) -> Report:
    """Ask the planes what they counted."""
    pool = llm.describe_pool()
    counted = planes.control.metrics()
    first_admissions = sum(output.error is None for output in outputs)
    admissions = _operations(counted, *_ADMISSIONS) + sum(
        int(value) for name, value in counted.items() if name.startswith(_GRANTS)
    )
    return Report(
        stats=llm.stats,
        elapsed_s=elapsed_s,
        counters=pool.counters,
        num_device_blocks=pool.usage.tiers[0].num_blocks,
        num_swap_outs=_operations(counted, *_SWAP_OUTS),
        num_readmissions=admissions - first_admissions,
        mean_step_us=counted[f"{_STEP_DURATION}_sum"] / counted[f"{_STEP_DURATION}_count"] * 1e6,
    )


def count_right(asked: list[Question], outputs: list[RequestOutput]) -> tuple[int, int]:
    """Right answers among the greedy ones, and how many those are."""
    greedy = [(q, o) for q, o in zip(asked, outputs, strict=True) if q.is_greedy]
    return sum(q.is_right(o.outputs[0].text) for q, o in greedy), len(greedy)


def print_report(
    console: Console,
    asked: list[Question],
    outputs: list[RequestOutput],
    comparisons: list[Comparison],
    report: Report,
) -> None:
    """Some questions with answers, one table, and the lines that say whether all is right."""
    _print_answers(console, asked, outputs)
    _print_table(console, report)
    num_right, num_greedy = count_right(asked, outputs)
    num_ties = sum(c.verdict is Verdict.TIE for c in comparisons)
    num_same = sum(c.verdict is not Verdict.DIFFERENT for c in comparisons)
    worst = max((c.max_logits_error for c in comparisons), default=0.0)
    ties = f", {num_ties} of them by a tie" if num_ties else ""
    console.print(
        f"largest difference of a logit: {worst:.1e} (allowed {LOGITS_TOLERANCE:.0e})",
        highlight=False,
    )
    console.print(f"correct answers: {num_right}/{num_greedy}", highlight=False)
    console.print(
        f"identical to transformers: {num_same}/{len(comparisons)}{ties}", highlight=False
    )


def _print_answers(console: Console, asked: list[Question], outputs: list[RequestOutput]) -> None:
    for question, output in list(zip(asked, outputs, strict=True))[:NUM_SHOWN]:
        context, _, key = question.prompt.rpartition("?")
        text = output.outputs[0].text
        mark = "[green]right[/green]" if question.is_right(text) else "[red]wrong[/red]"
        console.print(
            f"{len(context):>4} bytes of facts  ?{escape(key)}"
            f"[bold]{escape(text[:ANSWER_LETTERS])}[/bold]{escape(text[ANSWER_LETTERS:40])} {mark}",
            highlight=False,
        )


def _print_table(console: Console, report: Report) -> None:
    stats, counters = report.stats, report.counters
    table = Table("what", "counted", "by")
    table.columns[1].justify = "right"
    rows = [
        ("requests", f"{stats.num_requests}", "engine"),
        ("prompt tokens", f"{stats.num_prompt_tokens:,}", "engine"),
        ("generated tokens", f"{stats.num_generated_tokens:,}", "engine"),
        (
            "generated tokens/s",
            f"{stats.num_generated_tokens / max(report.elapsed_s, 1e-9):,.0f}",
            "engine",
        ),
        ("prefix hit tokens", f"{counters.num_hit_tokens:,}", "control plane"),
        ("copies on write", f"{counters.num_copies_on_write}", "control plane"),
        ("blocks swapped out", f"{counters.num_swapped_out_blocks}", "control plane"),
        ("blocks swapped in", f"{counters.num_swapped_in_blocks}", "control plane"),
        ("evictions", f"{counters.num_evictions}", "control plane"),
        (
            "preemptions",
            f"{report.num_preemptions} ({report.num_swap_outs} by swap, "
            f"{report.num_readmissions} by recompute)",
            "control plane",
        ),
        ("peak blocks", f"{counters.max_held_blocks}/{report.num_device_blocks}", "control plane"),
        (
            "step latency p50/p99",
            f"{stats.step_latency_s(0.5) * 1e3:.1f}/{stats.step_latency_s(0.99) * 1e3:.1f} ms",
            "engine",
        ),
        (
            "step in the control plane",
            f"{report.mean_step_us:,.0f} us on average",
            "control plane",
        ),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _operations(counted: Mapping[str, float], operation: str, status: str) -> int:
    name = f'kvplane_operations_total{{operation="{operation}",status="{status}"}}'
    return int(counted.get(name, 0))
