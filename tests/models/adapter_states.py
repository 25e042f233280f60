"""A tiny Llama with adapters of PEFT, which has to be installed, in states that compute otherwise.

``python -m tests.models.adapter_states one`` has one model go through ``STEPS`` in one pool,
``... two CONTROL_PLANE`` answers in each of ``STATES`` in a pool of other processes, and
``... refused`` asks in ways that are refused. Each prints JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import LlamaForCausalLM, PreTrainedModel

from kvplane.errors import InvalidRequestError
from kvplane.transformers import PlaneCache, close_planes
from kvplane.transformers.model_state import namespace_of
from tests.helpers.plane_cache_checks import ARGUMENT, one_prompt, tiny_llama
from tests.models.model_states import MODEL_ID, ask, pool_of

TARGETS: Final = ["q_proj", "k_proj", "v_proj"]
NEW: Final = 0
FOUND: Final = 32


def lora(**settings: Any) -> LoraConfig:
    settings = {"r": 4, "lora_alpha": 16, "target_modules": TARGETS, **settings}
    return LoraConfig(init_lora_weights=False, **settings)


def tuned(base: PreTrainedModel, first: Any = None, second: Any = None) -> PeftModel:
    """The adapters "one", which is active, and "two", always of the same weights."""
    torch.manual_seed(10)
    model = get_peft_model(base, first or lora(), adapter_name="one")
    model.add_adapter("two", second or first or lora())
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if ".one" in name or ".two" in name:
                weights.add_(torch.randn(weights.shape, generator=noise) * 0.1)
    return model.eval()


def rescale(model: PeftModel, factor: float) -> None:
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(factor)


def use(*names: str) -> Callable[[PeftModel], None]:
    return lambda model: model.base_model.set_adapter(list(names))


def merge(model: PeftModel) -> None:
    model.merge_adapter(["one"])


def train(model: PeftModel) -> None:
    """Between two rollouts with merged weights, as a trainer does."""
    model.unmerge_adapter()
    optimizer = torch.optim.SGD([w for name, w in model.named_parameters() if ".one" in name], 9.0)
    with torch.enable_grad():
        model.base_model.model.set_attn_implementation("eager")
        model(**one_prompt(), use_cache=False).logits.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    merge(model)


def scale_merged(model: PeftModel) -> None:
    model.unmerge_adapter()
    rescale(model, 2.0)
    merge(model)


STEPS: Final[list[tuple[str, Callable[[PeftModel], Any], int]]] = [
    ("the first of two", use("one"), NEW),
    ("the second", use("two"), NEW),
    ("the first again", use("one"), FOUND),
    ("none", lambda model: model.base_model.disable_adapter_layers(), FOUND),
    ("one again", lambda model: model.base_model.enable_adapter_layers(), FOUND),
    ("both", use("one", "two"), NEW),
    ("both, in the other order", use("two", "one"), NEW),
    ("one of twice the scale", lambda model: [use("one")(model), rescale(model, 2.0)], NEW),
    ("one of the scale that was", lambda model: rescale(model, 0.5), FOUND),
    ("a third", lambda model: [model.add_adapter("three", lora()), use("three")(model)], NEW),
    ("one beside the third", use("one"), FOUND),
    ("one without the third", lambda model: model.delete_adapter("three"), FOUND),
    ("merged", merge, NEW),
    ("trained and merged", train, NEW),
    ("scaled and merged", scale_merged, NEW),
    ("no more merged", lambda model: model.unmerge_adapter(), NEW),
    ("another rank", lambda model: [model.add_adapter("r", lora(r=2)), use("r")(model)], NEW),
]
"""What is done to the model, and what is found of a prompt that it was asked in all states before.
Merging is not undone exactly: weights are then other ones."""


def state(
    first: Any = None, second: Any = None, change: Callable[[PeftModel], Any] | None = None
) -> Callable[[PreTrainedModel], PreTrainedModel | None]:
    """Adapts a model; returns another one, or None where it is the same."""

    def adapt(base: PreTrainedModel) -> PreTrainedModel | None:
        model = tuned(base, first, second)
        done = (change or use("one"))(model)
        return done if isinstance(done, PreTrainedModel) else None

    return adapt


def unload(model: PeftModel) -> PreTrainedModel:
    use("one")(model)
    merged: PreTrainedModel = model.merge_and_unload()
    return merged


IA3: Final = IA3Config(
    target_modules=["k_proj", "v_proj"], feedforward_modules=[], init_ia3_weights=False
)
EMBEDDED: Final = {"target_modules": [*TARGETS, "embed_tokens"]}
SAVED: Final = {"modules_to_save": ["input_layernorm"]}
STATES: Final[dict[str, Callable[[PreTrainedModel], PreTrainedModel | None]]] = {
    "base": lambda model: None,
    "one": state(),
    "two": state(change=use("two")),
    "both": state(change=use("one", "two")),
    "both, in the other order": state(change=use("two", "one")),
    "twice the scale": state(change=lambda model: rescale(model, 2.0)),
    "another alpha": state(lora(lora_alpha=8)),
    "rank-stabilised": state(lora(use_rslora=True)),
    "merged": state(change=merge),
    "no more merged": state(change=lambda model: [merge(model), model.unmerge_adapter()]),
    "DoRA": state(lora(use_dora=True)),
    "embeddings": state(lora(**EMBEDDED)),
    "a saved module": state(lora(**SAVED)),
    "the other saved module": state(lora(**SAVED), change=use("two")),
    "IA3": state(IA3),
    "the other IA3": state(IA3, change=use("two")),
}
SAME: Final[dict[str, Callable[[PreTrainedModel], PreTrainedModel | None]]] = {
    "as the base": state(change=lambda model: model.base_model.disable_adapter_layers()),
    "as one alone": state(change=lambda model: model.delete_adapter("two")),
    "as merged": state(change=unload),
}
"""What computes with the same numbers as another state does, and so finds what that left."""


def answered(adapt: Callable[[PreTrainedModel], Any], **settings: Any) -> tuple[int, float]:
    base = tiny_llama()
    model = adapt(base) or base
    try:
        return ask(model, **settings)
    finally:
        close_planes(model)


def one() -> list[tuple[str, int, int, float]]:
    """In one pool: each step, what was to be found, what was, and how far the answer is off."""
    base = tiny_llama()
    assert ask(base, num_device_blocks=256)[0] == NEW
    model, results = tuned(base), []
    for name, change, wanted in STEPS:
        change(model)
        results.append((name, wanted, *ask(base, num_device_blocks=256)))
        results.append((f"{name}, again", FOUND, *ask(base, num_device_blocks=256)))
    close_planes(base)
    return results


def two(control_plane: str) -> list[tuple[str, int, float]]:
    settings = {"control_plane": control_plane, "pool_id": pool_of("llama"), "model_id": MODEL_ID}
    return [(name, *answered(adapt, **settings)) for name, adapt in (STATES | SAME).items()]


def folders() -> dict[str, bool]:
    """Whether a model of a folder is in the namespace of the engines that serve the folder."""
    is_engines = {}
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama().save_pretrained(folder)
        for name, adapt in (STATES | SAME).items():
            base = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            model = adapt(base) or base
            is_engines[name] = namespace_of(model, is_shared=True, folder=Path(folder)) == ""
    return is_engines


def refused() -> dict[str, str]:
    """What is said to adapters of each row, merged ones that are disabled, and prompt tuning."""

    def by_row() -> None:
        with PlaneCache(base, num_device_blocks=64) as cache:
            base.set_attn_implementation("kvplane")
            ids = {**one_prompt(), "adapter_names": ["two"], ARGUMENT: cache}
            model.generate(**ids, max_new_tokens=2)

    def merged() -> None:
        with PlaneCache(base, num_device_blocks=64) as cache:
            base.set_attn_implementation("kvplane")
            merge(model)
            with model.disable_adapter():
                base.generate(**one_prompt(), **{ARGUMENT: cache}, max_new_tokens=2)

    def virtual_tokens() -> None:
        plain = tiny_llama()
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        prompted = get_peft_model(plain, config).eval()
        with PlaneCache(plain, num_device_blocks=64) as cache:
            plain.set_attn_implementation("kvplane")
            prompted.generate(**one_prompt(), **{ARGUMENT: cache}, max_new_tokens=2)

    said = {}
    for call in (by_row, merged, virtual_tokens):
        base = tiny_llama()
        model = tuned(base)
        try:
            call()
        except InvalidRequestError as error:
            said[call.__name__] = str(error)
    return said


if __name__ == "__main__":
    calls: dict[str, Callable[..., Any]] = {
        "one": one, "two": two, "folders": folders, "refused": refused,
    }  # fmt: skip
    sys.stdout.write(json.dumps(calls[sys.argv[1]](*sys.argv[2:])))
