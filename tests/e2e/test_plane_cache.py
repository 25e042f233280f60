"""A PlaneCache's life: what it refuses, what it frees, and what it survives; and remote planes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_planes import Pair
from transformers import LlamaForCausalLM, PreTrainedModel

from kvplane import ControlClient, LayerGroup, Layout, sync
from kvplane.errors import (
    InternalError,
    InvalidRequestError,
    LayoutMismatchError,
    NeverFitsError,
    PoolFullError,
    SessionNotFoundError,
)
from kvplane.transformers import PlaneCache, close_planes, planes
from tests.helpers.plane_cache_checks import (
    ARGUMENT,
    ATOL,
    NUM_NEW,
    answer,
    assert_same,
    forward,
    greedy_with_padding,
    one_prompt,
    prompts,
    tiny_llama,
)
from tests.helpers.refusals import refused
from tests.helpers.waiting import wait_until
from tests.models.tiny_models import tiny_model

POOL = {"num_device_blocks": 64}


@pytest.fixture(scope="module")
def model() -> Iterator[PreTrainedModel]:
    model = tiny_llama()
    yield model
    close_planes(model)


def num_held(cache: PlaneCache) -> int:
    return sum(tier.num_held_blocks for tier in cache.get_pool().usage)


# What is freed.


def test_close_and_reset_free_every_block(model: PreTrainedModel) -> None:
    with PlaneCache(model, **POOL) as cache:
        answer(model, cache, num_beams=3, **prompts())
        assert num_held(cache) > 3
        cache.reset()
        assert num_held(cache) == 0
        answer(model, cache, **prompts())
    assert num_held(cache) == 0
    cache.close()


def test_garbage_collection_frees_every_block(model: PreTrainedModel) -> None:
    other = PlaneCache(model, **POOL)
    answer(model, PlaneCache(model, **POOL), num_beams=3, **prompts())
    gc.collect()
    wait_until(lambda: num_held(other) == 0)


def test_planes_end_with_their_model() -> None:
    before = set(threading.enumerate())
    model = tiny_llama()
    planes = weakref.ref(PlaneCache(model, **POOL)._planes)
    answer(model, PlaneCache(model, **POOL), **prompts())
    assert set(threading.enumerate()) - before
    del model
    gc.collect()
    wait_until(lambda: planes() is None)
    wait_until(lambda: not any(t.is_alive() for t in set(threading.enumerate()) - before))


def test_nothing_can_be_used_that_was_closed(model: PreTrainedModel) -> None:
    other = tiny_llama()
    cache, closed = PlaneCache(other, **POOL), PlaneCache(other, **POOL)
    closed.close()
    with pytest.raises(InvalidRequestError, match="cache: was closed"):
        answer(other, closed, **prompts())
    close_planes(other)
    with pytest.raises(InvalidRequestError, match="its planes were closed"):
        answer(other, cache, **prompts())
    assert_same(
        answer(other, PlaneCache(other, **POOL), **prompts()), answer(other, None, **prompts())
    )
    close_planes(other)


def test_two_threads_that_close_the_same_planes_do_it_once() -> None:
    """A finalizer's thread and the end of the process."""
    closed: list[str] = []
    may_end = threading.Event()
    stack = ExitStack()
    stack.callback(lambda: closed.append("first"))
    stack.callback(lambda: (may_end.wait(10), closed.append("last"))[1])
    close = planes._closing_once(stack)
    threads = [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[1].join(0.2)
    assert threads[1].is_alive(), "it does not wait for the one that closes"
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert closed == ["last", "first"]


def test_a_forked_process_is_refused_at_once_and_ends(model: PreTrainedModel) -> None:
    with PlaneCache(model, **POOL) as cache:
        answer(model, cache, **one_prompt())
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            found = []
            for use in (
                lambda: (cache.reset(), answer(model, cache, **one_prompt())),
                lambda: PlaneCache(model, **POOL, namespace="other"),
                lambda: sync.ControlClient("127.0.0.1:1"),
                lambda: asyncio.run(connect()),
            ):
                try:
                    use()
                    found.append("nothing")
                except InvalidRequestError as error:
                    found.append(error.field)
            cache.close()
            close_planes(model)
            os.write(writing, " ".join(found).encode())
            os._exit(0)
        os.close(writing)
        try:
            wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child, patience_s=20)
        except BaseException:
            os.kill(child, signal.SIGKILL)
            raise
        assert os.read(reading, 100).decode() == "cache process process process"
        os.close(reading)
        cache.reset()
        answer(model, cache, **one_prompt())


async def connect() -> None:
    ControlClient("127.0.0.1:1")


def test_a_module_that_took_one_of_our_names_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.ModuleType("control_plane")
    other.__file__ = "/home/user/control_plane.py"
    for name in [name for name in sys.modules if name.startswith("control_plane.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "kvplane.runtime.embedded")
    monkeypatch.setitem(sys.modules, "control_plane", other)
    wanted = r"control_plane\.\w+ is missing: /home/user/control_plane.py has taken its name"
    with refused(InvalidRequestError, "control_plane", match=wanted):
        PlaneCache(tiny_llama(), **POOL)


@pytest.mark.parametrize("family", ["bloom", "falcon", "mpt"])
def test_an_adapted_model_attends_as_before_once_its_planes_are_closed(family: str) -> None:
    model = tiny_model(family)
    want = greedy(model)
    PlaneCache(model, **POOL).close()
    with pytest.raises(InvalidRequestError, match="guidance_scale or an assistant"):
        greedy(model)
    close_planes(model)
    assert torch.equal(greedy(model), want)


def greedy(model: PreTrainedModel) -> torch.Tensor:
    found: torch.Tensor = model.generate(  # type: ignore[operator]
        torch.arange(3, 23)[None], max_new_tokens=6, min_new_tokens=6, do_sample=False
    )
    return found


# What is refused.


def test_a_model_that_computes_attention_otherwise_is_refused(model: PreTrainedModel) -> None:
    model.set_attn_implementation("sdpa")
    with (
        PlaneCache(model, **POOL) as cache,
        refused(InvalidRequestError, "model", match=r"'sdpa': call model\.set_attn"),
    ):
        model.generate(**prompts(), **{ARGUMENT: cache}, max_new_tokens=4)


def test_a_cache_of_another_model_is_refused(model: PreTrainedModel) -> None:
    other = tiny_llama()
    with PlaneCache(model, **POOL) as cache:
        for attention in ("eager", "kvplane"):
            other.set_attn_implementation(attention)
            with pytest.raises(InvalidRequestError, match="was made for another model"):
                other.generate(**prompts(), **{ARGUMENT: cache}, max_new_tokens=4)
            PlaneCache(other, **POOL)  # now that model has hooks too
    close_planes(other)


def test_logits_that_are_not_finite_are_refused_and_never_cached() -> None:
    model = tiny_llama()
    with PlaneCache(model, **POOL):  # which is probed while all weights are numbers
        weight = model.get_input_embeddings().weight
        with torch.no_grad():
            weight[1] = torch.nan  # in no prompt
    ids = prompts()["input_ids"]
    for bad in (ids.index_fill(1, torch.tensor(36), 1), ids.index_fill(1, torch.tensor(20), 1)):
        for _ in range(2):
            with PlaneCache(model, **POOL) as cache:
                with pytest.raises(InternalError, match="NaN or infinity"):
                    answer(model, cache, input_ids=bad[:1], attention_mask=torch.ones_like(bad[:1]))
                assert cache.num_cached_tokens == [0] and num_held(cache) == 0
    with PlaneCache(model, **POOL) as cache:
        answer(model, cache, suppress_tokens=[1], **one_prompt())
    close_planes(model)


def test_attention_without_a_cache_of_ours_is_refused(model: PreTrainedModel) -> None:
    model.set_attn_implementation("kvplane")
    with pytest.raises(InvalidRequestError, match=r"give cache=PlaneCache\(model\)"):
        model.generate(**prompts(), max_new_tokens=4)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("attention_mask", lambda b: b | {"attention_mask": b["attention_mask"].flip(1)}),
        ("attention_mask", lambda b: b | {"attention_mask": torch.zeros_like(b["input_ids"])}),
        ("attention_mask", lambda b: b | {"attention_mask": b["attention_mask"][:, 1:]}),
        ("position_ids", lambda b: b | {"position_ids": torch.arange(40).expand(3, 40)}),
        ("input_ids", lambda b: {"inputs_embeds": torch.zeros(3, 40, 64)}),
        ("use_cache", lambda b: b | {"use_cache": False}),
        ("output_attentions", lambda b: b | {"output_attentions": True}),
    ],
)
def test_a_batch_that_cannot_be_cached_is_refused(
    model: PreTrainedModel, field: str, change: Callable[[Any], Any]
) -> None:
    with PlaneCache(model, **POOL) as cache:
        with refused(InvalidRequestError, field):
            forward(model, cache, **change(prompts()))
        assert num_held(cache) == 0


def test_weights_of_attention_are_refused_also_in_a_later_turn(model: PreTrainedModel) -> None:
    with PlaneCache(model, **POOL) as cache:
        ids = answer(model, cache, **one_prompt()).sequences
        held = num_held(cache)
        with refused(InvalidRequestError, "output_attentions", match="makes no weights"):
            answer(model, cache, input_ids=ids, output_attentions=True)
        assert num_held(cache) == held


def test_another_number_of_rows_is_refused_and_the_cache_goes_on(model: PreTrainedModel) -> None:
    with PlaneCache(model, **POOL) as cache:
        forward(model, cache, **prompts())
        two, three = torch.tensor([[7], [8]]), torch.tensor([[7]] * 3)
        with pytest.raises(InvalidRequestError, match="has 2 rows, but the cache has 3"):
            forward(model, cache, two)
        other_mask = torch.ones(3, 41, dtype=torch.long)
        with pytest.raises(InvalidRequestError, match="other padding than before"):
            forward(model, cache, three, attention_mask=other_mask)
        forward(model, cache, three)
        assert cache.get_seq_length() == 41


def test_a_pool_that_is_too_small_says_so_and_goes_on(model: PreTrainedModel) -> None:
    small = {"num_device_blocks": 8}
    holder, cache = PlaneCache(model, **small), PlaneCache(model, **small)
    with pytest.raises(NeverFitsError, match="blocks of the device tier are needed"):
        answer(model, cache, input_ids=torch.full((1, 150), 5))
    answer(model, holder, **{name: t[:2] for name, t in prompts().items()})
    with pytest.raises(PoolFullError):
        answer(model, cache, **prompts(seed=8))
    assert cache.get_seq_length() == 0
    with pytest.raises(PoolFullError):  # in the middle of a generation
        answer(model, holder, max_new_tokens=60, min_new_tokens=60, **one_prompt_of(holder))
    assert_same(answer(model, cache, **one_prompt()), answer(model, None, **one_prompt()))
    cache.close()
    holder.close()


def one_prompt_of(cache: PlaneCache) -> dict[str, torch.Tensor]:
    cache.reset()
    return prompts(seed=9, num_columns=20)


@pytest.mark.parametrize(
    ("is_twice", "layer", "message"),
    [
        (True, 1, "layer 1 calls attention twice"),
        (False, 1, "layer 1 of the plan comes before layer 2"),
        (False, 2, '"kvplane" in 2 of its 3 layers'),
    ],
)
def test_a_model_that_attends_in_other_ways_is_refused(
    is_twice: bool, layer: int, message: str
) -> None:
    model = tiny_llama()
    attend = model.model.layers[layer].self_attn
    original = attend.forward

    def twice(*arguments: Any, **named: Any) -> Any:
        original(*arguments, **named)
        return original(*arguments, **named)

    def never(hidden_states: torch.Tensor, **_: Any) -> Any:
        return hidden_states, None

    attend.forward = twice if is_twice else never
    with PlaneCache(model, **POOL, probe=False) as cache:
        with pytest.raises(InvalidRequestError, match=message):
            answer(model, cache, **prompts())
        assert num_held(cache) == 0
    close_planes(model)


def test_gradients_are_refused(model: PreTrainedModel) -> None:
    model.set_attn_implementation("kvplane")
    with PlaneCache(model, **POOL) as cache:
        with pytest.raises(InvalidRequestError, match=r"torch.no_grad\(\)"):
            model(**prompts(), **{ARGUMENT: cache})
        assert num_held(cache) == 0


# What is survived.


def test_all_logits_are_given_where_all_are_wanted(model: PreTrainedModel) -> None:
    want = forward(model, None, **one_prompt()).logits
    for how in ({}, {"logits_to_keep": 1}, {"logits_to_keep": 20}, {}):
        with PlaneCache(model, **POOL) as cache:
            got = forward(model, cache, **one_prompt(), **how).logits
        kept = how.get("logits_to_keep", want.shape[1])
        torch.testing.assert_close(got, want[:, -kept:], atol=ATOL, rtol=0)


@pytest.mark.parametrize("is_in_config", [False, True])
def test_hidden_states_are_those_of_all_columns_also_of_a_prompt_that_is_cached(
    model: PreTrainedModel, is_in_config: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {**one_prompt(), **({} if is_in_config else {"output_hidden_states": True})}
    want = forward(model, None, **one_prompt(), output_hidden_states=True).hidden_states
    monkeypatch.setattr(model.config, "output_hidden_states", is_in_config)
    for _ in range(2):
        with PlaneCache(model, **POOL) as cache:
            got = forward(model, cache, **how, logits_to_keep=1).hidden_states
            assert cache.num_cached_tokens == [0]
        torch.testing.assert_close(got, want, atol=ATOL, rtol=0)


def test_scores_of_a_prompt_that_is_cached_are_those_of_eager_attention(
    model: PreTrainedModel,
) -> None:
    how = {"output_scores": True, "output_hidden_states": True, **one_prompt()}
    want = answer(model, None, **how)
    for _ in range(2):
        with PlaneCache(model, **POOL) as cache:
            got = answer(model, cache, **how)
        assert_same(got, want)
        shapes = [[layer.shape for layer in token] for token in got.hidden_states]
        assert shapes == [[layer.shape for layer in token] for token in want.hidden_states]
        scores = [
            model.compute_transition_scores(each.sequences, each.scores) for each in (got, want)
        ]
        torch.testing.assert_close(*scores, atol=5e-5, rtol=0)


def test_router_logits_are_those_of_all_columns() -> None:
    model = tiny_model("mixtral")
    how = {**one_prompt(), "output_router_logits": True, "logits_to_keep": 1}
    want = forward(model, None, **how).router_logits
    for _ in range(2):
        with PlaneCache(model, **POOL) as cache:
            got = forward(model, cache, **how).router_logits
        torch.testing.assert_close(got, want, atol=ATOL, rtol=0)
    close_planes(model)


def test_arguments_may_be_positional(model: PreTrainedModel) -> None:
    batch = prompts()
    model.set_attn_implementation("kvplane")
    with PlaneCache(model, **POOL) as cache, torch.no_grad():
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        got = model(batch["input_ids"], batch["attention_mask"], positions, cache).logits[:, -1]
        model.set_attn_implementation("eager")
        want = model(batch["input_ids"], batch["attention_mask"], positions).logits[:, -1]
    torch.testing.assert_close(got, want, atol=5e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_the_argument_has_the_name_that_transformers_or_the_model_gives_it(
    model: PreTrainedModel,
) -> None:
    """Transformers renames it (5.24 did, and takes the former name too)."""

    class Renaming(LlamaForCausalLM):
        def forward(self, *args: Any, memory: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, **{ARGUMENT: memory}, **kwargs)

    batch = one_prompt()
    want = answer(model, None, **batch)
    model.set_attn_implementation("kvplane")
    for name in {ARGUMENT, "past_key_values"}:
        with PlaneCache(model, **POOL) as cache:
            ids = model.generate(**batch, **{name: cache}, max_new_tokens=NUM_NEW)
        assert torch.equal(ids, want.sequences)
    renaming = Renaming(model.config).eval()
    renaming.load_state_dict(model.state_dict())
    with PlaneCache(renaming, **POOL, probe=False) as cache, torch.no_grad():
        got = renaming(**batch, memory=cache).logits[:, -1]
    torch.testing.assert_close(got, want.logits[0], atol=5e-5, rtol=0)
    close_planes(renaming)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_pass_that_fails_leaves_nothing_behind(
    model: PreTrainedModel, error: type[BaseException]
) -> None:
    def fail(*_: Any) -> None:
        raise error("planted")

    cache, other = PlaneCache(model, **POOL), PlaneCache(model, **POOL)
    batch = prompts(seed=10)
    for layer in (0, 2):
        handle = model.model.layers[layer].mlp.register_forward_hook(fail)
        with pytest.raises(error):
            answer(model, cache, **batch)
        handle.remove()
        if error is KeyboardInterrupt:  # hooks of torch are not called for it
            with pytest.raises(InvalidRequestError, match="was interrupted: call reset"):
                answer(model, cache, **batch)
            cache.reset()
        assert num_held(cache) == 0
        assert_same(answer(model, other, **batch), answer(model, None, **batch))
        other.reset()
    cache.close()
    other.close()


def test_a_session_that_ended_is_replaced(model: PreTrainedModel) -> None:
    cache, other = PlaneCache(model, **POOL), PlaneCache(model, **POOL)
    answer(model, cache, **prompts())
    answer(model, other, **prompts())
    link = cache._planes._link
    link._loop.run(link.session.close())
    for each in (cache, other):
        with pytest.raises(SessionNotFoundError):
            forward(model, each, torch.tensor([[7]] * 3))
        assert_same(answer(model, each, **prompts()), answer(model, None, **prompts()))
        each.close()


def test_threads_take_turns(model: PreTrainedModel) -> None:
    wants = [answer(model, None, **prompts(seed)) for seed in range(3)]
    model.set_attn_implementation("kvplane")
    answers: dict[int, Any] = {}

    def run(seed: int) -> None:
        with PlaneCache(model, **POOL) as cache:
            answers[seed] = answer(model, cache, **prompts(seed))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, want in enumerate(wants):
        assert_same(answers[seed], want)


def test_models_of_16_bits() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = tiny_llama().to(dtype)
        want = answer(model, None, **prompts())
        got = answer(model, PlaneCache(model, **POOL), **prompts())
        torch.testing.assert_close(got.logits[0], want.logits[0], atol=0.15, rtol=0.05)
        close_planes(model)


# Planes elsewhere. What they give is in tests/models/test_plane_cache_remote.py.


def test_another_layout_than_the_pools_is_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    layout = Layout("tiny", 16, "float32", "float32", (LayerGroup("full", (0, 1, 2), 2, 16),))
    with Pair(layout, tmp_path, pool_id="default") as pair:
        remote: dict[str, Any] = {"control_plane": pair.control.address, "model_id": "tiny"}
        with pytest.raises(LayoutMismatchError):
            PlaneCache(model, **remote | {"model_id": "another"})
        with pytest.raises(InvalidRequestError, match="model_id: must be given"):
            PlaneCache(model, **remote | {"model_id": ""})
        with pytest.raises(LayoutMismatchError):
            PlaneCache(tiny_llama().to(torch.bfloat16), **remote)
        greedy_with_padding(model, **remote)
        close_planes(model)
