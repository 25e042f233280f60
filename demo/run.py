"""``python -m demo``: both planes, a real model, and answers checked against transformers.

The pool is small on purpose: blocks must be shared, copied, swapped both ways, evicted, and
sequences preempted, or the demonstration fails.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from demo.config import DemoConfig
from demo.reference import Comparison, Reference
from demo.report import Report, make_report, print_report
from demo.workload import Question, questions
from engine.llm import LLM
from engine.request import RequestOutput
from examples.planes import DATA_PLANE, Planes
from kvplane.serving.observability import logs

BLOCK_SIZE_TOKENS = 16
POOL_BLOCKS = {False: (96, 28), True: (60, 24)}  # device and host blocks, by ``quick``
POOL_ID = "demo"
MAX_BATCH_TOKENS = 512
TIMEOUT_S = 30.0


def run(config: DemoConfig, data_plane: Sequence[str] = DATA_PLANE) -> int:
    """Run the demonstration; 0 when all is right. ``data_plane``: see ``Planes``."""
    logs.setup(config.log_level)
    console = Console()
    asked = questions(config.seed, quick=config.quick)
    console.print(f"starting both planes (logs in {config.run_folder}) ...")
    with Planes(config.run_folder, _data_arguments(config), data_plane) as planes:
        settings = {
            "control_plane": planes.control.address,
            "pool_id": POOL_ID,
            "max_batch_tokens": MAX_BATCH_TOKENS,
            "timeout_s": TIMEOUT_S,
        }
        with _progress(console) as progress, LLM(config.model, **settings) as llm:
            started_s = time.monotonic()
            outputs = _serve(llm, asked, progress)
            elapsed_s = time.monotonic() - started_s
            report = make_report(llm, planes, outputs, elapsed_s)
            comparisons = _compare(config.model, asked, outputs, progress)
    return _judge(console, asked, outputs, comparisons, report)


def _data_arguments(config: DemoConfig) -> list[str]:
    device, host = POOL_BLOCKS[config.quick]
    flags = {
        "--model": config.model,
        "--pool-id": POOL_ID,
        "--block-size-tokens": BLOCK_SIZE_TOKENS,
        "--num-device-blocks": config.num_device_blocks or device,
        "--num-host-blocks": config.num_host_blocks or host,
    }
    return [str(part) for flag in flags.items() for part in flag]


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _serve(llm: LLM, asked: list[Question], progress: Progress) -> list[RequestOutput]:
    """All answers, in the order of ``asked``; one tick of the bar for each request."""
    task = progress.add_task("serving prompts", total=len(asked))
    return llm.generate(
        [question.prompt for question in asked],
        [question.params for question in asked],
        on_output=lambda _: progress.advance(task),
    )


def _compare(
    model: Path, asked: list[Question], outputs: list[RequestOutput], progress: Progress
) -> list[Comparison]:
    """Every greedy answer, compared with that of transformers."""
    greedy = [output for question, output in zip(asked, outputs, strict=True) if question.is_greedy]
    task = progress.add_task("checking by transformers", total=len(greedy))
    reference = Reference(model)
    comparisons = []
    for output in greedy:
        comparisons.append(reference.compare(output))
        progress.advance(task)
    return comparisons


def _judge(
    console: Console,
    asked: list[Question],
    outputs: list[RequestOutput],
    comparisons: list[Comparison],
    report: Report,
) -> int:
    print_report(console, asked, outputs, comparisons, report)
    reasons = report.complaints(asked, outputs, comparisons)
    for reason in reasons:
        console.print(f"[red]failed:[/red] {reason}")
    return 1 if reasons else 0
