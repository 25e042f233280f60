"""The sides: transformers' own ways to generate, and the engine's, over one random model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from engine import LLM, SamplingParams
from engine.models.loader import PackedLinear, pack_linears
from kvplane.sync.short_thread import call_in_short_thread
from scripts.planes import run_planes

VOCABULARY = 8192
NUM_BLOCKS = 2048  # of 16 tokens
NUM_PAGES = 128  # of 256 tokens, transformers' default
MAX_POSITIONS = 1024
# hidden, intermediate, layers, heads, KV heads
MODELS = {
    "tiny": (64, 128, 2, 4, 2),
    "31m": (512, 1280, 8, 8, 4),
    "197m": (1024, 2816, 16, 16, 4),
}

Prompts = list[list[int]]
Answer = Callable[[Prompts, int], Prompts]
Side = Callable[[], AbstractContextManager[Answer]]
"""A side's resources exist only inside its context, so that other sides answer without them."""


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
    model: PreTrainedModel = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
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


def answer_by(manager: Any, prompts: Prompts, num_new: int) -> Prompts:
    """Answer by continuous batching."""
    ids = manager.add_requests(inputs=prompts, max_new_tokens=num_new)
    tokens: dict[str, list[int]] = {}
    while len(tokens) < len(ids):
        result = manager.get_result(timeout=60)
        if result.is_finished():
            tokens[result.request_id] = result.generated_tokens
    return [tokens[request_id] for request_id in ids]


def answer(llm: LLM, prompts: Prompts, num_new: int) -> Prompts:
    """Answer by an engine."""
    outputs = llm.generate(prompts, SamplingParams(max_tokens=num_new, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@contextmanager
def sides(folder: Path, chosen: list[str], threads: int) -> Iterator[dict[str, Side]]:
    """Return the chosen sides over one model, all with the same linear layers. Models are loaded in
    threads that end: see ``call_in_short_thread``.
    """
    of: dict[str, Side] = {}
    first = call_in_short_thread(partial(load, folder))
    blocks = ["--num-device-blocks", str(NUM_BLOCKS), "--num-threads", str(threads)]
    with ExitStack() as closing:
        planes = closing.enter_context(
            run_planes(folder / "logs", ["--model", str(folder), *blocks])
        )
        for name in chosen:
            if name == "generate":
                of[name] = partial(nullcontext, partial(generate, first))
            elif name == "generate_batch":
                model = call_in_short_thread(partial(load, folder))
                of[name] = partial(continuous_batching, share_linears(model, first))
            else:
                own: dict[str, Any] = {}
                if name == "embedded":
                    own = {"pool_id": name, "num_device_blocks": NUM_BLOCKS, "num_host_blocks": 0}
                llm = call_in_short_thread(
                    partial(
                        LLM,
                        folder,
                        control_plane=planes.control.address,
                        data_plane=name,
                        num_threads=threads,
                        timeout_s=60.0,
                        linears="packed",
                        **own,
                    )
                )
                of[name] = partial(nullcontext, partial(answer, closing.enter_context(llm)))
                share_linears(llm._core._loaded.model, first)
        yield of


@contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[Answer]:
    """Run transformers' manager, warmed up. Its compute thread ends with the context."""
    manager = model.continuous_batching_context_manager(  # type: ignore[operator]
        generation_config=GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=NUM_PAGES, max_batch_tokens=512
        ),
        block=True,
        timeout=5,
    )
    with manager as started:
        answer_by(started, [[3, 4, 5]], 2)
        yield partial(answer_by, started)
