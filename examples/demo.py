"""Both planes and a real model, whose greedy answers are compared with those of transformers.

    python -m examples.demo [--quick] [--run-folder FOLDER]

The pool is small on purpose: blocks must be shared, copied, swapped both ways, evicted, and
sequences preempted, or it fails. Exit codes: 0 all is right, 1 it is not, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from engine.commands.program import run_program
from engine.llm import LLM
from engine.request import RequestOutput, SamplingParams
from engine.stats import EngineStats
from examples.planes import DATA_PLANE, ROOT, Planes
from kvplane.results import total_of
from kvplane.serving.observability import logs
from models.recall_task import VALUE_LETTERS, Facts

MODEL: Final = ROOT / "models" / "recall"
POOL_ID: Final = "demo"
POOL_BLOCKS: Final = {False: (96, 28), True: (60, 24)}  # device and host blocks, by ``quick``
ANSWER_LETTERS: Final = VALUE_LETTERS + 1  # the value and the semicolon that ends it
LOGITS_TOLERANCE: Final = 1e-4
MIN_RIGHT_SHARE: Final = 0.95
NUM_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt and its right answer. ``params.temperature`` 0 means that it is compared."""

    prompt: str
    answer: str
    params: SamplingParams

    @property
    def is_greedy(self) -> bool:
        """Whether transformers must give the very same tokens."""
        return self.params.temperature == 0

    def is_right(self, text: str) -> bool:
        """Return whether ``text`` begins with the value asked for, and ends it where it ends."""
        return text[:ANSWER_LETTERS] == self.answer[:ANSWER_LETTERS]


def questions(seed: int, *, quick: bool) -> list[Question]:
    """Make groups that share a context each, contexts asked once, and some with four continuations.

    Long contexts and short ones alternate, so that some fit into a small host tier and some do not.
    The order is random, so that a group's questions find its blocks cached, evicted or swapped.
    """
    rng = random.Random(seed)
    num_groups, num_single, num_sampled = (3, 6, 2) if quick else (6, 14, 4)
    asked: list[Question] = []
    for i in range(num_groups):
        facts = Facts.random(rng, rng.randint(36, 50) if i % 2 == 0 else rng.randint(14, 24))
        for _ in range(3 if quick else 5):
            asked.append(_recitation(rng, facts, rng.choice((24, 40, 64))))
    for _ in range(num_single):
        facts = Facts.random(rng, rng.randint(12, 50))
        asked.append(_recitation(rng, facts, rng.choice((24, 40, 64))))
    for i in range(num_sampled):
        facts = Facts.random(rng, rng.randint(12, 30))
        question = _recitation(rng, facts, 32)
        params = SamplingParams(max_tokens=32, temperature=0.8, top_k=20, top_p=0.95, n=4, seed=i)
        asked.append(Question(question.prompt, question.answer, params))
    rng.shuffle(asked)
    return asked


def _recitation(rng: random.Random, facts: Facts, max_tokens: int) -> Question:
    """Ask for one fact and let the text run on over the facts that follow it."""
    index = rng.randrange(len(facts.pairs))
    params = SamplingParams(max_tokens=max_tokens, stop=(".",), record_logits=True)
    return Question(facts.text + facts.question(index), facts.recitation(index), params)


class Verdict(Enum):
    """The comparison of one greedy answer."""

    IDENTICAL = "identical"  # all tokens, and all logits within the tolerance
    TIE = "tie"  # tokens differ where transformers' two best logits are within the tolerance
    DIFFERENT = "different"


@torch.inference_mode()
def compare(model: Any, output: RequestOutput) -> tuple[Verdict, float]:
    """Generate greedily as far as ``output`` did, with transformers' own attention and cache, and
    compare step by step. ``output`` is of a greedy request with recorded logits.
    """
    answer = output.outputs[0]
    if answer.logits is None or not answer.token_ids:
        return Verdict.DIFFERENT, float("inf")
    prompt = torch.tensor([output.prompt_token_ids])
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=len(answer.token_ids),
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    tokens: list[int] = generated.sequences[0, prompt.shape[1] :].tolist()
    return compare_steps(answer.token_ids, answer.logits, tokens, torch.cat(generated.logits))


def compare_steps(
    got: list[int], got_logits: torch.Tensor, want: list[int], want_logits: torch.Tensor
) -> tuple[Verdict, float]:
    """Compare tokens and float32 logits [steps, vocabulary] of two greedy runs of one prompt.

    The number is the largest difference of a logit up to where the comparison ended.
    """
    worst = 0.0
    for step in range(max(len(got), len(want))):
        if step >= min(len(got), len(want)):
            return Verdict.DIFFERENT, worst
        error = float((got_logits[step] - want_logits[step]).abs().max())
        worst = max(worst, error)
        if not error <= LOGITS_TOLERANCE:
            return Verdict.DIFFERENT, worst
        if got[step] != want[step]:
            best, second = want_logits[step].topk(2).values.tolist()
            return Verdict.TIE if best - second <= LOGITS_TOLERANCE else Verdict.DIFFERENT, worst
    return Verdict.IDENTICAL, worst


def report_work(
    stats: EngineStats,
    elapsed_s: float,
    num_blocks: int,
    counters: Mapping[str, int],
    metrics: Mapping[str, float],
) -> list[str]:
    """Print the counts, which are the control plane's except in the engine's own rows. Return the
    kinds of work that the control plane counted none of. ``num_blocks``: of the device tier.
    """
    work = {
        "prefix hit tokens": total_of(counters, "hit_tokens_total"),
        "copies on write": counters["copies_on_write_total"],
        "blocks swapped out": counters['swapped_blocks_total{direction="out"}'],
        "blocks swapped in": counters['swapped_blocks_total{direction="in"}'],
        "evictions": total_of(counters, "evictions_total"),
    }
    by_engine = {
        "requests": f"{stats.num_requests}",
        "prompt tokens": f"{stats.num_prompt_tokens:,}",
        "generated tokens": f"{stats.num_generated_tokens:,}",
        "preemptions": f"{stats.num_preemptions} ({stats.num_swap_preemptions} by swap, "
        f"{stats.num_recompute_preemptions} by recompute)",
        "generated tokens/s": f"{stats.num_generated_tokens / elapsed_s:,.0f}",
        "step latency p50/p99": f"{stats.step_latency_s(0.5) * 1e3:.1f}/"
        f"{stats.step_latency_s(0.99) * 1e3:.1f} ms",
    }
    by_control_plane = {what: f"{count:,}" for what, count in work.items()}
    by_control_plane["peak blocks"] = f"{counters['max_held_blocks']}/{num_blocks}"
    step_s, num_steps = (metrics[f"kvplane_step_duration_seconds_{of}"] for of in ("sum", "count"))
    by_control_plane["step in the control plane"] = f"{step_s / num_steps * 1e6:,.0f} us on average"

    table = Table("what", "counted", "by")
    table.columns[1].justify = "right"
    for who, rows in (("engine", by_engine), ("control plane", by_control_plane)):
        for what, counted in rows.items():
            table.add_row(what, counted, who)
    Console().print(table)
    work["preemptions"] = stats.num_preemptions
    return [what for what, count in work.items() if not count]


def report_answers(asked: list[Question], outputs: list[RequestOutput]) -> list[str]:
    """Check the answers and print the lines that say whether all is right. Return what is not."""
    failures = [
        f"request {output.request_id}: {output.error}" for output in outputs if output.error
    ]
    greedy = [(q, o) for q, o in zip(asked, outputs, strict=True) if q.is_greedy]
    print(f"checking {len(greedy)} answers by transformers ...")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, local_files_only=True)
    verdicts: Counter[Verdict] = Counter()
    worst = 0.0
    for _, output in greedy:
        verdict, error = compare(model, output)
        verdicts[verdict] += 1
        worst = max(worst, error)

    num_right = sum(question.is_right(output.outputs[0].text) for question, output in greedy)
    num_same = len(greedy) - verdicts[Verdict.DIFFERENT]
    ties = f", {verdicts[Verdict.TIE]} of them by a tie" if verdicts[Verdict.TIE] else ""
    print(f"largest difference of a logit: {worst:.1e} (allowed {LOGITS_TOLERANCE:.0e})")
    print(f"correct answers: {num_right}/{len(greedy)}")
    print(f"identical to transformers: {num_same}/{len(greedy)}{ties}")
    if num_right < MIN_RIGHT_SHARE * len(greedy):
        failures.append(f"fewer than {MIN_RIGHT_SHARE:.0%} of the answers are right")
    if num_same < len(greedy):
        failures.append("not all greedy requests are identical to transformers")
    return failures


def print_some(asked: list[Question], outputs: list[RequestOutput]) -> None:
    """Print some questions with their answers."""
    for question, output in list(zip(asked, outputs, strict=True))[:NUM_SHOWN]:
        context, _, key = question.prompt.rpartition("?")
        text = output.outputs[0].text
        mark = "right" if question.is_right(text) else "wrong"
        print(f"{len(context):>4} bytes of facts  ?{key}{text[:40]}  {mark}")


def main(argv: Sequence[str], data_plane: Sequence[str] = DATA_PLANE) -> int:
    """Run the demonstration; return the exit code. ``data_plane``: see ``Planes``."""
    parser = argparse.ArgumentParser("demo", description="Check a model on both planes.")
    parser.add_argument("--quick", action="store_true", help="fewer prompts in a smaller pool")
    parser.add_argument(
        "--run-folder", type=Path, default=ROOT / ".run", help="folder of the planes' logs"
    )
    args = parser.parse_args(argv)
    logs.setup("warning")
    asked = questions(0, quick=args.quick)
    num_device_blocks, num_host_blocks = POOL_BLOCKS[args.quick]
    flags = ["--model", str(MODEL), "--pool-id", POOL_ID, "--block-size-tokens", "16"]
    flags += ["--num-device-blocks", str(num_device_blocks)]
    flags += ["--num-host-blocks", str(num_host_blocks)]
    print(f"starting both planes (logs in {args.run_folder}) ...")
    with Planes(args.run_folder, flags, data_plane) as planes:
        settings = {"control_plane": planes.control.address, "pool_id": POOL_ID}
        with LLM(MODEL, **settings, max_batch_tokens=512, timeout_s=30.0) as llm:
            print(f"serving {len(asked)} prompts ...")
            started_s = time.monotonic()
            outputs = llm.generate([q.prompt for q in asked], [q.params for q in asked])
            elapsed_s = time.monotonic() - started_s
            counters, metrics = llm.get_counters(), planes.control.metrics()
    print_some(asked, outputs)
    missing = report_work(llm.stats, elapsed_s, num_device_blocks, counters, metrics)
    failures = report_answers(asked, outputs)
    failures += [f"the planes counted no {what}" for what in missing]
    for failure in failures:
        print(f"failed: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(run_program("demo", lambda: main(sys.argv[1:])))
