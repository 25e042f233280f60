"""Measures the engine against transformers' own ways to generate, in one run, and compares tokens.

    python -m benchmarks.engine [--models 31m,197m] [--batches 1,8,32] [--threads 2] [--runs 5]
                                [--quick] [--json OUT]

Sides: ``generate``, transformers' padded batch; ``generate_batch``, its continuous batching;
``plane_cache``, generate on a PlaneCache; ``embedded``, the engine with a data plane in this
process; ``remote``, the engine with one beside it. All compute in this process with the same linear
layers, and take turns: every run has new prompts, which each side answers before the next run.
Models are random and made for this, in float32.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from demo.processes import Planes
from engine import LLM, SamplingParams
from kvplane.transformers import PlaneCache, close_planes

VOCABULARY = 8192
BLOCK_SIZE_TOKENS = 16
NUM_BLOCKS = 2048
MAX_POSITIONS = 1024
# hidden, intermediate, layers, heads, KV heads
MODELS = {
    "tiny": (64, 128, 2, 4, 2),
    "31m": (512, 1280, 8, 8, 4),
    "197m": (1024, 2816, 16, 16, 4),
}
# What a ratio of tokens a second is to be, at which batches; None: at all.
GOALS: tuple[tuple[str, str, float, tuple[int, ...] | None], ...] = (
    ("embedded", "generate", 1.0, None),
    ("embedded", "generate_batch", 1.0, None),
    ("remote", "embedded", 0.8, (8,)),
)
PREFIX_GOAL = ("embedded", "generate", 2.0)

Prompts = list[list[int]]
Side = Callable[[Prompts, int], Prompts]


@dataclass(frozen=True, slots=True)
class Workload:
    """``batch`` prompts, each of ``prefix`` tokens that all share and a few of its own, continued
    by ``num_new`` tokens.
    """

    name: str
    batch: int
    prefix: int
    num_new: int

    def prompts(self, seed: int) -> Prompts:
        """Of lengths that differ, so that a padded batch has padding."""
        generator = torch.Generator().manual_seed(seed)

        def tokens(num: int) -> list[int]:
            return torch.randint(3, VOCABULARY, (num,), generator=generator).tolist()

        prefix = tokens(self.prefix)
        return [prefix + tokens(17 + (13 * i) % 32) for i in range(self.batch)]


@dataclass(slots=True)
class Row:
    """Seconds of each side's runs of one workload, and the runs whose tokens are ``generate``'s."""

    model: str
    workload: Workload
    seconds: dict[str, list[float]] = field(default_factory=dict)
    num_equal: dict[str, int] = field(default_factory=dict)

    def tokens_per_s(self, side: str) -> float:
        """The median run's."""
        num_tokens = self.workload.batch * self.workload.num_new
        return num_tokens / statistics.median(self.seconds[side])

    def goals(self) -> list[tuple[str, float, float]]:
        """What is compared, how it stands, and how it should."""
        if self.workload.prefix:
            goals = [PREFIX_GOAL]
        else:
            goals = [g[:3] for g in GOALS if g[3] is None or self.workload.batch in g[3]]
        return [
            (f"{side} / {other}", self.tokens_per_s(side) / self.tokens_per_s(other), goal)
            for side, other, goal in goals
        ]


def make_model(name: str, folder: Path) -> Path:
    """Save a random model."""
    hidden, intermediate, layers, heads, kv_heads = MODELS[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: PreTrainedModel = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> PreTrainedModel:
    """For transformers' own sides."""
    model: PreTrainedModel = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.train(False)


def generate(
    model: PreTrainedModel, prompts: Prompts, num_new: int, *, on_planes: bool = False
) -> Prompts:
    """A batch padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    how: dict[str, Any] = {"max_new_tokens": num_new, "min_new_tokens": num_new}
    with ExitStack() as closing:
        if on_planes:
            cache = PlaneCache(model, num_device_blocks=NUM_BLOCKS)
            how["past_key_values"] = closing.enter_context(cache)
        output: torch.Tensor = model.generate(ids, attention_mask=mask, do_sample=False, **how)
    return output[:, width:].tolist()


def generate_batch(manager: Any, prompts: Prompts, num_new: int) -> Prompts:
    """Continuous batching, whose manager goes on running."""
    ids = manager.add_requests(inputs=prompts, max_new_tokens=num_new)
    tokens: dict[str, list[int]] = {}
    while len(tokens) < len(ids):
        result = manager.get_result(timeout=60)
        if result.is_finished():
            tokens[result.request_id] = result.generated_tokens
    return [tokens[request_id] for request_id in ids]


def answer(llm: LLM, prompts: Prompts, num_new: int) -> Prompts:
    """An engine."""
    outputs = llm.generate(prompts, SamplingParams(max_tokens=num_new, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@contextmanager
def sides(folder: Path, threads: int) -> Iterator[dict[str, Side]]:
    """All sides over one model."""
    blocks = ["--num-device-blocks", str(NUM_BLOCKS), "--num-threads", str(threads)]
    with ExitStack() as closing:
        planes = closing.enter_context(Planes(folder / "logs", ["--model", str(folder), *blocks]))
        engine: dict[str, Any] = {
            "control_plane": planes.control.address,
            "num_threads": threads,
            "timeout_s": 60.0,
        }
        remote = closing.enter_context(LLM(folder, **engine))
        embedded = closing.enter_context(
            LLM(
                folder,
                data_plane="embedded",
                pool_id="embedded",
                num_device_blocks=NUM_BLOCKS,
                num_host_blocks=0,
                **engine,
            )
        )
        manager = closing.enter_context(
            load(folder).continuous_batching_context_manager(
                generation_config=GenerationConfig(
                    do_sample=False, pad_token_id=0, eos_token_id=-1
                ),
                continuous_batching_config=ContinuousBatchingConfig(
                    num_blocks=NUM_BLOCKS, max_batch_tokens=512
                ),
                block=True,
                timeout=5,
            )
        )
        padded, cached = load(folder), load(folder)
        closing.callback(close_planes, cached)
        with torch.no_grad():
            PlaneCache(cached, num_device_blocks=NUM_BLOCKS).close()
        cached.set_attn_implementation("kvplane")
        yield {
            "generate": partial(generate, padded),
            "generate_batch": partial(generate_batch, manager),
            "plane_cache": partial(generate, cached, on_planes=True),
            "embedded": partial(answer, embedded),
            "remote": partial(answer, remote),
        }


def measure(
    model: str, workload: Workload, of: dict[str, Side], num_runs: int, first_seed: int
) -> Row:
    """The first run warms up and is not counted."""
    row = Row(model, workload, {name: [] for name in of}, dict.fromkeys(of, 0))
    for run in range(num_runs + 1):
        prompts = workload.prompts(first_seed + run)
        wanted: Prompts | None = None
        for name, side in of.items():
            began_s = time.perf_counter()
            tokens = side(prompts, workload.num_new)
            seconds = time.perf_counter() - began_s
            wanted = tokens if wanted is None else wanted
            if run > 0:
                row.seconds[name].append(seconds)
                row.num_equal[name] += tokens == wanted
    return row


def print_row(row: Row) -> None:
    """A workload's lines: tokens a second by side, then the goals."""
    name = f"{row.model} {row.workload.name}"
    print(f"{name:28}" + "".join(f"{row.tokens_per_s(side):>15,.1f}" for side in row.seconds))
    num_runs = len(next(iter(row.seconds.values())))
    equal = (f"{row.num_equal[side]}/{num_runs}" for side in row.seconds)
    print(f"{'  runs with equal tokens':28}" + "".join(f"{each:>15}" for each in equal))
    for what, ratio, goal in row.goals():
        print(f"  {what}: {ratio:.2f} (goal: {goal:.1f})", flush=True)


def as_json(rows: Sequence[Row], threads: int) -> dict[str, Any]:
    """The figures, for programs."""
    return {
        "machine": {
            "cpu_count": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": threads,
        },
        "rows": [
            {
                "model": row.model,
                "workload": asdict(row.workload),
                "tokens_per_s": {side: round(row.tokens_per_s(side), 2) for side in row.seconds},
                "seconds": row.seconds,
                "num_equal": row.num_equal,
                "goals": [
                    {"what": what, "ratio": round(ratio, 3), "goal": goal}
                    for what, ratio, goal in row.goals()
                ],
            }
            for row in rows
        ],
    }


def main(argv: Sequence[str]) -> None:
    """Measure, print as it goes, write the JSON."""
    parser = argparse.ArgumentParser(description="Measure the engine against transformers.")
    parser.add_argument("--models", default="31m,197m", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--batches", default="1,8,32", help="sizes of batches")
    parser.add_argument("--threads", type=int, default=2, help="threads that compute")
    parser.add_argument("--runs", type=int, default=5, help="runs of each workload")
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parser.parse_args(argv)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    torch.set_num_threads(arguments.threads)
    part = 8 if arguments.quick else 1
    batches = [int(batch) for batch in arguments.batches.split(",")]
    workloads = [Workload(f"decode, batch {n}", n, 0, 64 // part) for n in batches]
    workloads.append(Workload("shared prefix, batch 8", 8, 512 // part, 16 // min(part, 4)))
    rows: list[Row] = []
    for model in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            folder = make_model(model, Path(scratch))
            with sides(folder, arguments.threads) as of:
                print(f"{'tokens/s':28}" + "".join(f"{name:>15}" for name in of))
                for number, workload in enumerate(workloads):
                    row = measure(model, workload, of, arguments.runs, 1000 * number)
                    print_row(row)
                    rows.append(row)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(rows, arguments.threads), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
