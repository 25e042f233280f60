"""Two states of a tiny model whose keys and values differ, for everything that they depend on.

``python -m tests.models.model_states CONTROL_PLANE ROW.STATE...`` answers a prompt in each state,
in the row's pool.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from kvplane import Layout
from kvplane.errors import LayoutMismatchError
from kvplane.models.model_layers import layer_groups
from kvplane.transformers import PlaneCache, close_planes
from tests.e2e import engine_planes as planes
from tests.helpers.plane_cache_checks import ATOL, answer, one_prompt, tiny_llama
from tests.helpers.programs import run
from tests.models.tiny_models import draw_weights, tiny_model

MODEL_ID: Final = "states"
REFUSED: Final = -1

Change = Callable[[PreTrainedModel], None]


def load_weights(model: PreTrainedModel) -> None:
    other = tiny_llama()
    draw_weights(other, seed=9)
    model.load_state_dict(other.state_dict())


def assign_weights(model: PreTrainedModel) -> None:
    other = tiny_llama()
    draw_weights(other, seed=9)
    model.load_state_dict(other.state_dict(), assign=True)


def train(model: PreTrainedModel) -> None:
    optimizer = torch.optim.SGD([model.model.layers[0].mlp.down_proj.weight], lr=3.0)
    with torch.enable_grad():
        model.set_attn_implementation("eager")
        model(**one_prompt(), use_cache=False).logits.sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def turn(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)
    model.model.rotary_emb.original_inv_freq = model.model.rotary_emb.inv_freq


def rescale(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 0.5


def cap(model: PreTrainedModel) -> None:
    model.config.attn_logit_softcapping = 0.7
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 0.7


def narrow(model: PreTrainedModel) -> None:
    model.config.sliding_window = 5


def replace(model: PreTrainedModel) -> None:
    """Another module takes the place of a layer."""
    other = torch.nn.Linear(64, 64, bias=False)
    draw_weights(other, seed=7)
    model.model.layers[0].self_attn.o_proj = other


LLAMA: Final[dict[str, Change]] = {
    "weights": load_weights,
    "weights that are assigned": assign_weights,
    "an optimizer's step": train,
    "rope": turn,
    "attention scale": rescale,
    "a layer": replace,
}
"""Of states whose layouts are equal: they can share a pool."""
OTHERS: Final[dict[str, tuple[str, Change]]] = {
    "soft cap": ("gemma2", cap),
    "dtype": ("llama", lambda model: model.to(torch.bfloat16)),
    "window": ("mistral", narrow),
}
ELSEWHERE: Final[dict[str, Change]] = {"device": lambda model: model.to("cuda")}
"""Of tests/gpu_sim. The layouts are equal here too."""


def made(row: str) -> tuple[PreTrainedModel, Change]:
    """The model in state A, and what brings it into state B."""
    if row not in OTHERS:
        return tiny_llama(), (LLAMA | ELSEWHERE)[row]
    model_type, change = OTHERS[row]
    model = tiny_model(model_type)
    model.generation_config.eos_token_id = None
    return model, change


def pool_of(row: str) -> str:
    return OTHERS[row][0] if row in OTHERS else "llama"


def data_plane(control: str, row: str, folder: Path) -> planes.Process:
    """A data plane on the CPU with the row's pool. It is not started."""
    groups = layer_groups(made(row)[0].config)
    layout = Layout(MODEL_ID, 16, "float32", "float32", groups)
    pool_id, flags = pool_of(row), ("--num-device-blocks", "256", "--device", "cpu")
    return planes.data_plane(control, layout, folder / f"{pool_id}.log", *flags, pool_id=pool_id)


def found_twice(folder: Path, rows: Sequence[str], asked: Sequence[str]) -> list[list[int]]:
    """How many tokens two processes find, one after the other, in each state that is asked for, in
    pools of the rows' models.
    """
    found = []
    with ExitStack() as stack:
        process = planes.Process("control_plane", folder / "control.log")
        control = stack.enter_context(process).address
        for row in rows:
            stack.enter_context(data_plane(control, row, folder))
        for _ in range(2):
            done = run("tests.models.model_states", control, *asked)
            assert done.returncode == 0, done.stderr
            results = json.loads(done.stdout.splitlines()[-1])
            found.append([num for num, _ in results])
            assert max(off for _, off in results) < ATOL
    return found


def off_by(got: Any, want: Any) -> float:
    """The largest difference of a logit; infinite where tokens differ."""
    if not torch.equal(got.sequences, want.sequences):
        return float("inf")
    return float((torch.stack(got.logits) - torch.stack(want.logits)).abs().max())


def ask(model: PreTrainedModel, **settings: Any) -> tuple[int, float]:
    """How many tokens of the prompt were found, and how far the answer is from eager's."""
    want = answer(model, None, **one_prompt())
    with PlaneCache(model, **settings) as cache:
        got = answer(model, cache, **one_prompt())
        return cache.num_cached_tokens[0], off_by(got, want)


if __name__ == "__main__":
    results = []
    for asked in sys.argv[2:]:
        row, state = asked.split(".")
        model, change = made(row)
        if state == "B":
            change(model)
        settings = {"control_plane": sys.argv[1], "pool_id": pool_of(row), "model_id": MODEL_ID}
        try:
            results.append(ask(model, **settings))
        except LayoutMismatchError:
            results.append((REFUSED, 0.0))
        close_planes(model)
    sys.stdout.write(json.dumps(results))
