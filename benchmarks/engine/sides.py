"""The sides: transformers, the engine and vLLM, over one random model."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine import LLM, SamplingParams
from engine.models.loader import PackedLinear, pack_linears
from kvplane.sync.short_thread import call_in_short_thread
from scripts.planes import ROOT, run_planes

VOCABULARY = 8192
NUM_BLOCKS = 2048  # of 16 tokens
MAX_POSITIONS = 1024
MAX_SEQUENCES = 32  # of the engine and of vLLM
VLLM = ROOT / "build/engines/vllm"
# hidden, intermediate, layers, heads, KV heads
MODELS = {
    "tiny": (64, 128, 2, 4, 2),
    "31m": (512, 1280, 8, 8, 4),
    "197m": (1024, 2816, 16, 16, 4),
}

Prompts = list[list[int]]
Answer = Callable[[Prompts, int], Prompts]


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
    """Load a model for transformers' own sides."""
    model: PreTrainedModel = LlamaForCausalLM.from_pretrained(folder, dtype="auto")
    model.train(False)
    pack_linears(model)
    return model


def share_linears(model: PreTrainedModel, first: PreTrainedModel) -> PreTrainedModel:
    """Make ``model`` compute with the linear layers of ``first``, in the same memory: the same
    layers take up to a tenth longer in another place of it. Return ``model``.
    """
    of_first = dict(first.named_modules())
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            module._packed = of_first[name]._packed
        elif isinstance(module, torch.nn.Linear):
            module.weight = of_first[name].weight
    return model


def generate(model: PreTrainedModel, prompts: Prompts, num_new: int) -> Prompts:
    """Generate with a batch padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    how: dict[str, Any] = {"max_new_tokens": num_new, "min_new_tokens": num_new}
    output: torch.Tensor = model.generate(ids, attention_mask=mask, do_sample=False, **how)
    return output[:, width:].tolist()


def answer(llm: LLM, prompts: Prompts, num_new: int) -> Prompts:
    """Answer by an engine."""
    outputs = llm.generate(prompts, SamplingParams(max_tokens=num_new, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@contextmanager
def vllm(folder: Path, threads: int) -> Iterator[Answer]:
    """Run vLLM as a process, with as many threads. It is installed first if it is not."""
    if not VLLM.exists():
        print("installing vLLM, for minutes", flush=True)
        subprocess.run(["make", str(VLLM.relative_to(ROOT))], cwd=ROOT, check=True)
    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    program = [VLLM / "bin/python", Path(__file__).with_name("vllm_process.py")]
    with (
        (folder / "vllm.log").open("wb") as log,
        subprocess.Popen(
            [*program, folder, str(MAX_SEQUENCES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | environment,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        questions, lines = process.stdin, process.stdout
        if "ready\n" not in lines:
            raise RuntimeError((folder / "vllm.log").read_text()[-2000:])

        def ask(prompts: Prompts, num_new: int) -> Prompts:
            print(json.dumps({"prompts": prompts, "num_new": num_new}), file=questions, flush=True)
            tokens: Prompts = json.loads(next(lines))
            return tokens

        yield ask


@contextmanager
def sides(folder: Path, chosen: list[str], threads: int) -> Iterator[dict[str, Answer]]:
    """Return the chosen sides over one model. Transformers and the engine that is not compiled have
    the same linear layers. Models are loaded in threads that end: see ``call_in_short_thread``.
    """
    of: dict[str, Answer] = {}
    first = call_in_short_thread(partial(load, folder))
    blocks = ["--num-device-blocks", str(NUM_BLOCKS), "--num-threads", str(threads)]
    with ExitStack() as closing:
        planes = closing.enter_context(
            run_planes(folder / "logs", ["--model", str(folder), *blocks])
        )
        for name in chosen:
            if name == "generate":
                of[name] = partial(generate, first)
                continue
            if name == "vllm":
                of[name] = closing.enter_context(vllm(folder, threads))
                continue
            own: dict[str, Any] = {"data_plane": "remote"}
            if name != "remote":
                own = {"pool_id": name, "num_device_blocks": NUM_BLOCKS, "num_host_blocks": 0}
                own["data_plane"] = "embedded"
            llm = call_in_short_thread(
                partial(
                    LLM,
                    folder,
                    control_plane=planes.control.address,
                    num_threads=threads,
                    max_sequences=MAX_SEQUENCES,
                    timeout_s=60.0,
                    compile=name == "compiled",
                    linears="packed",
                    **own,
                )
            )
            of[name] = partial(answer, closing.enter_context(llm))
            if name != "compiled":
                share_linears(llm._core._loaded.model, first)
        yield of
