"""Both planes and a real model, whose greedy answers are compared with those of transformers.

    python -m examples.demo [--quick] [--run-folder FOLDER]

The pool is small on purpose: blocks must be shared, copied, swapped both ways, evicted, and
sequences preempted, or it fails. Exit codes: 0 all is right, 1 it is not, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from engine.commands.program import run_program
from engine.llm import LLM
from engine.request import CompletionOutput, RequestOutput
from engine.stats import EngineStats
from kvplane.results import total_of
from kvplane.serving.observability import logs
from models.recall_task import Question, questions
from scripts.planes import ROOT, run_planes

MODEL: Final = ROOT / "models" / "recall"
DTYPE: Final = "float32"  # wider than the checkpoint's, to see small differences
POOL_FLAGS: Final = ("--num-device-blocks", "96", "--num-host-blocks", "28")
POOL_FLAGS_QUICK: Final = ("--num-device-blocks", "60", "--num-host-blocks", "24")
LOGITS_TOLERANCE: Final = 1e-4
MIN_RIGHT_SHARE: Final = 0.95


@torch.inference_mode()
def compare(model: Any, prompt: list[int], answer: CompletionOutput) -> tuple[bool, float]:
    """Return whether transformers would have answered so, and the largest difference of a logit.
    Where its two best logits differ by less than the tolerance, either token will do.
    """
    assert answer.logits is not None
    ids = torch.tensor([[*prompt, *answer.token_ids]], device=model.device)
    want = model(ids).logits[0, len(prompt) - 1 : -1].cpu()
    error = float((answer.logits - want).abs().max())
    chosen = want.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    below_best = float((want.max(dim=1).values - chosen).max())
    return error <= LOGITS_TOLERANCE and below_best <= LOGITS_TOLERANCE, error


def report_work(stats: EngineStats, elapsed_s: float, counters: Mapping[str, int]) -> list[str]:
    """Print the counts of both. Return the kinds of work of which there was none."""
    work = {
        "prefix hit tokens": total_of(counters, "hit_tokens_total"),
        "copies on write": counters["copies_on_write_total"],
        "blocks swapped out": counters['swapped_blocks_total{direction="out"}'],
        "blocks swapped in": counters['swapped_blocks_total{direction="in"}'],
        "evictions": total_of(counters, "evictions_total"),
        "preemptions": stats.num_preemptions,
    }
    p50_ms, p99_ms = (1e3 * stats.step_latency_s(share) for share in (0.5, 0.99))
    rows = {
        **{what: f"{count:,}" for what, count in work.items()},
        "peak blocks": f"{counters['max_held_blocks']:,}",
        "requests": f"{stats.num_requests:,}",
        "generated tokens/s": f"{stats.num_generated_tokens / elapsed_s:,.0f}",
        "step latency p50/p99": f"{p50_ms:.1f}/{p99_ms:.1f} ms",
    }
    for what, counted in rows.items():
        print(f"{what:<20} {counted:>14}")
    return [f"there were no {what}" for what, count in work.items() if not count]


def report_answers(
    asked: list[Question], outputs: list[RequestOutput], device: torch.device
) -> list[str]:
    """Check the answers and print the lines that say whether all is right. Return what is not.
    ``device``: the engine's, on which transformers computes too.
    """
    failures = [f"request {each.request_id}: {each.error}" for each in outputs if each.error]
    greedy = [(q, o) for q, o in zip(asked, outputs, strict=True) if q.is_greedy and not o.error]
    for question, output in greedy[:8]:
        context, _, key = question.prompt.rpartition("?")
        print(f"{len(context):>4} bytes of facts  ?{key}{output.outputs[0].text[:40]}")
    print(f"checking {len(greedy)} answers by transformers ...")
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=DTYPE, local_files_only=True)
    model.to(device)
    verdicts, errors = zip(
        *(compare(model, o.prompt_token_ids, o.outputs[0]) for _, o in greedy), strict=True
    )
    num_right = sum(question.is_right(output.outputs[0].text) for question, output in greedy)
    print(f"largest difference of a logit: {max(errors):.1e} (allowed {LOGITS_TOLERANCE:.0e})")
    print(f"correct answers: {num_right}/{len(greedy)}")
    print(f"identical to transformers: {sum(verdicts)}/{len(greedy)}")
    if num_right < MIN_RIGHT_SHARE * len(greedy):
        failures.append(f"fewer than {MIN_RIGHT_SHARE:.0%} of the answers are right")
    if not all(verdicts):
        failures.append("not all greedy requests are identical to transformers")
    return failures


def main(argv: Sequence[str]) -> int:
    """Run the demonstration; return the exit code."""
    parser = argparse.ArgumentParser("demo", description="Check a model on both planes.")
    parser.add_argument("--quick", action="store_true", help="fewer prompts in a smaller pool")
    parser.add_argument("--run-folder", type=Path, default=ROOT / ".run", help="of their logs")
    args = parser.parse_args(argv)
    logs.setup("warning")
    asked = questions(0, quick=args.quick)
    flags = ["--model", str(MODEL), "--dtype", DTYPE]
    flags += POOL_FLAGS_QUICK if args.quick else POOL_FLAGS
    print(f"{len(asked)} prompts for both planes (logs in {args.run_folder}) ...")
    with run_planes(args.run_folder, flags) as planes:
        address = planes.control.address
        with LLM(MODEL, control_plane=address, max_batch_tokens=512, timeout_s=30.0) as llm:
            device = llm.device
            if device.type == "cuda":
                print(f"the model computes on {device}, {torch.cuda.get_device_name(device)}")
            began_s = time.monotonic()
            outputs = llm.generate([q.prompt for q in asked], [q.params for q in asked])
            elapsed_s = time.monotonic() - began_s
            failures = report_work(llm.stats, elapsed_s, llm.get_counters())
    failures += report_answers(asked, outputs, device)
    for failure in failures:
        print(f"failed: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(run_program("demo", lambda: main(sys.argv[1:])))
