"""``kvplane generate``: prints answers to prompts as they come."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvplane import tracing
from kvplane.serving.observability import logs
from kvplane.serving.settings import log_settings

from ..config import GenerateSettings
from ..llm import LLM
from ..request import Delta, SamplingParams


def run(config: GenerateSettings) -> int:
    """Answer the prompts and print the texts; returns 1 when a prompt failed."""
    logs.setup(config.log_level, config.log_format)
    num_characters = len(config.prompt)  # prompts are never logged
    shown = replace(config, prompt=f"<{num_characters} characters>") if num_characters else config
    log_settings(shown, logging.getLogger("engine"))
    tracing.setup("kvplane-engine")
    prompts = config.prompts()
    params = SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
        n=config.n,
        stop=(config.stop,) if config.stop else (),
        ignore_eos=config.ignore_eos,
        num_beams=config.num_beams,
    )
    with LLM.from_config(config) as llm:
        deltas = llm.stream(prompts, params)
        is_single = len(prompts) * config.n == 1
        if is_single:
            return _print_pieces(deltas)
        return _print_whole(deltas, len(prompts), config.n)


def _print_pieces(deltas: Iterator[Delta]) -> int:
    """Print one text, piece by piece as it comes; returns the exit code."""
    failed = False
    for delta in deltas:
        print(delta.text, end="", flush=True)
        failed |= _report(delta)
    print(flush=True)
    return int(failed)


def _print_whole(deltas: Iterator[Delta], num_prompts: int, n: int) -> int:
    """Print several texts, each once it is done, after its prompt's number and continuation. On a
    terminal, a bar shows the progress of all.
    """
    texts: dict[tuple[str, int], str] = {}
    numbers: dict[str, int] = {}
    failed = False
    console = Console(stderr=True)
    columns = TextColumn("{task.completed} of {task.total}"), BarColumn(), TimeRemainingColumn()
    with Progress(
        *columns,
        TextColumn("{task.fields[num_tokens]} tokens"),
        console=console,
        disable=not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),  # else texts would overwrite the bar
        transient=True,
    ) as progress:
        task = progress.add_task("", total=num_prompts * n, num_tokens=0)
        num_tokens = 0
        for delta in deltas:
            name = (delta.request_id, delta.index)
            number = numbers.setdefault(delta.request_id, int(delta.request_id.rpartition("-")[2]))
            texts[name] = texts.get(name, "") + delta.text
            failed |= _report(delta)
            num_tokens += len(delta.token_ids)
            progress.update(task, advance=bool(delta.finish_reason), num_tokens=num_tokens)
            if delta.finish_reason:
                label = f"{number}.{delta.index + 1}" if n > 1 else f"{number}"
                print(f"[{label}] {texts.pop(name)}", flush=True)
    return int(failed)


def _report(delta: Delta) -> bool:
    if delta.error is None:
        return False
    print(f"engine: error: {delta.error.reason}: {delta.error}", file=sys.stderr)
    return True
