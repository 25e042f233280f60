"""Checks that ``generate`` on a PlaneCache returns the same as with eager attention and
transformers' own cache. Each check takes a model, and the settings of its caches.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, set_seed
from transformers.cache_utils import Cache

from kvplane.transformers import PlaneCache
from kvplane.transformers.models import adapters

NUM_NEW = 12
BLOCK_SIZE = 16
PADDING = (0, 5, 17)
NUM_COLUMNS = 40
ATOL = 5e-5
SCAN_ATOL = 2e-4
"""Scans over states add up in another order when a prompt is cut elsewhere."""

# The name of the cache's argument in the installed release of transformers.
ARGUMENT: Final = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)

Check = Callable[..., None]


def tiny_llama() -> PreTrainedModel:
    """Make a random Llama in which attention matters."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.train(False)


def prompts(seed: int = 1, num_columns: int = NUM_COLUMNS) -> dict[str, torch.Tensor]:
    """Return a batch with padding on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (len(PADDING), num_columns), generator=generator)
    mask = (torch.arange(num_columns) >= torch.tensor(PADDING)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def one_prompt() -> dict[str, torch.Tensor]:
    """Return a single row that repeats itself, so that look-ups in it are sometimes right."""
    ids = prompts()["input_ids"][:1, :9].repeat(1, 5)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of the text; images are encoded by eager attention."""
    if "vision_config" in model.config.sub_configs:
        model.set_attn_implementation({"text_config": name, "vision_config": "eager"})
    else:
        adapters.set_attention(model, name)


def answer(model: PreTrainedModel, cache: Cache | None, **how: Any) -> Any:
    """Return the result of ``generate``; with eager attention when there is no cache of ours."""
    set_attention(model, "eager" if cache is None else "kvplane")
    how = {"max_new_tokens": NUM_NEW, "do_sample": False, "use_cache": True, **how}
    how.setdefault("min_new_tokens", min(NUM_NEW, how["max_new_tokens"]))
    if cache is not None:
        how[ARGUMENT] = cache
    for name, value in how.items():
        if isinstance(value, torch.Tensor):
            how[name] = value.to(model.device)
    return model.generate(**how, output_logits=True, return_dict_in_generate=True)


def forward(model: PreTrainedModel, cache: Cache | None, *ids: torch.Tensor, **how: Any) -> Any:
    """Return the result of one forward pass, with the attention of ``answer``."""
    set_attention(model, "eager" if cache is None else "kvplane")
    if cache is not None:
        how[ARGUMENT] = cache
    with torch.no_grad():
        return model(*ids, **how)


def assert_same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got.sequences, want.sequences)
    if want.logits is not None:
        is_hybrid = hasattr(want[ARGUMENT].layers[0], "recurrent_states")
        atol = SCAN_ATOL if is_hybrid else ATOL
        torch.testing.assert_close(
            torch.stack(got.logits), torch.stack(want.logits), atol=atol, rtol=0
        )


def greedy_with_padding(model: PreTrainedModel, **settings: Any) -> None:
    """Compare tokens and logits of rows of several lengths."""
    want = answer(model, None, **prompts())
    with PlaneCache(model, **settings) as cache:
        assert_same(answer(model, cache, **prompts()), want)


def second_call(model: PreTrainedModel, **settings: Any) -> None:
    """Check that a second call, with more padding before it, finds the contents of the first call's
    cache, does not compute them again, and is right.
    """
    first = prompts(seed=2)
    again = {name: pad(tensor, (3, 0)) for name, tensor in first.items()}
    whole_blocks = [(NUM_COLUMNS - 1 - n) // BLOCK_SIZE * BLOCK_SIZE for n in PADDING]
    num_computed: list[int] = []
    embeddings = model.get_input_embeddings()
    handle = embeddings.register_forward_pre_hook(
        lambda _, arguments: num_computed.append(arguments[0].shape[1])
    )
    for batch, cached in ((first, [0, 0, 0]), (again, whole_blocks)):
        want = answer(model, None, **batch)
        with PlaneCache(model, **settings) as cache:
            num_computed.clear()
            assert_same(answer(model, cache, **batch), want)
            assert cache.num_cached_tokens == cached
        left_out = min(n + skip for n, skip in zip(cached, PADDING, strict=True))
        assert num_computed[0] == NUM_COLUMNS - left_out
    handle.remove()


def beams(model: PreTrainedModel, **settings: Any) -> None:
    """Compare beam search, whose beams begin with equal prompts, fork, and end."""
    how = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True, **prompts(seed=3)}
    want = answer(model, None, **how)
    with PlaneCache(model, **settings) as cache:
        got = answer(model, cache, **how)
    assert_same(got, want)
    torch.testing.assert_close(got.sequences_scores, want.sequences_scores, atol=ATOL, rtol=0)


def sampling(model: PreTrainedModel, **settings: Any) -> None:
    """Compare sampling with a seed, several continuations of each prompt."""
    how = {"do_sample": True, "num_return_sequences": 2, "top_k": 20, **prompts(seed=4)}
    set_seed(0)
    want = answer(model, None, **how)
    with PlaneCache(model, **settings) as cache:
        set_seed(0)
        assert_same(answer(model, cache, **how), want)


def assisted(model: PreTrainedModel, **settings: Any) -> None:
    """Compare tokens proposed by a look-up in the prompt; rejected ones are rolled back. Twice:
    cached tokens must leave the logits of all proposed tokens.
    """
    how = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 24, **one_prompt()}
    want = answer(model, None, **how)
    for _ in range(2):
        with PlaneCache(model, **settings) as cache:
            got = answer(model, cache, **how)
            torch.testing.assert_close(got.sequences, want.sequences)
            assert cache.get_seq_length() <= got.sequences.shape[1]


def conversation(model: PreTrainedModel, **settings: Any) -> None:
    """Compare a second turn on the same cache, in chunks, and another one on a copy of it."""
    first = one_prompt()
    with PlaneCache(model, **settings) as cache:
        turn = answer(model, cache, **first).sequences
        for seed, prefill_chunk_size in ((5, None), (6, 7)):
            branch = copy.deepcopy(cache)
            new = prompts(seed)["input_ids"][:1].to(turn.device)
            ids = torch.cat([turn, new], dim=1)
            both = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            want = answer(model, None, **both)
            got = answer(model, branch, **both, prefill_chunk_size=prefill_chunk_size)
            assert_same(got, want)
            branch.close()


def block_edges(model: PreTrainedModel, **settings: Any) -> None:
    """Compare prompts that end before, at and after each block's edge, twice each: first cut to
    there, then with other tokens behind, which continue from the last edge before the prompt's end.
    """
    row = prompts(seed=7, num_columns=60)["input_ids"][:1]
    other = prompts(seed=8)["input_ids"][:1, :9]
    checkpoints = {0}
    for length in (15, 16, 17, 31, 32, 33, 48, 49, 60):
        for ids in (row[:, :length], torch.cat([row[:, :length], other], dim=1)):
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            want = answer(model, None, **given, max_new_tokens=3)
            with PlaneCache(model, **settings) as cache:
                assert_same(answer(model, cache, **given, max_new_tokens=3), want)
                num_found = max(n for n in checkpoints if n <= length and n < ids.shape[1])
                assert cache.num_cached_tokens == [num_found]
            checkpoints.add((ids.shape[1] - 1) // BLOCK_SIZE * BLOCK_SIZE)
            checkpoints = {n for n in checkpoints if n <= length}  # others have other tokens


def rows_with_hits(model: PreTrainedModel, **settings: Any) -> None:
    """Compare batches whose rows were computed before up to the same column, to columns from which
    an earlier one is common, to none, and with padding in which blocks end nowhere together.
    """
    rows = prompts(seed=9, num_columns=56)["input_ids"][:2]

    def check(first: int, second: int, padding: int, cached: list[int]) -> None:
        ids = torch.stack([rows[0, :first], pad(rows[1, :second], (first - second, 0))])
        mask = (torch.arange(first) >= torch.tensor([0, padding])[:, None]).long()
        ids, given = ids * mask, {"attention_mask": mask}
        want = answer(model, None, input_ids=ids, **given, max_new_tokens=4)
        with PlaneCache(model, **settings) as cache:
            got = answer(model, cache, input_ids=ids, **given, max_new_tokens=4)
            assert_same(got, want)
            assert cache.num_cached_tokens == cached

    check(20, 20, 0, [0, 0])  # checkpoints of both after 16 tokens
    check(40, 24, 16, [0, 0])  # the rows' hits begin at columns 16 and 32
    check(40, 24, 16, [32, 16])  # now both have one at column 32
    check(40, 40, 0, [16, 16])  # one had 32 tokens, the other 16
    check(40, 35, 5, [0, 0])
    check(40, 40, 0, [32, 32])
    check(40, 8, 32, [0, 0])  # the other row, without a hit, begins at the column of the first's


def rows_alone(model: PreTrainedModel, **settings: Any) -> None:
    """Compare logits of padded rows with a forward pass of each row alone, twice: the second time
    with hits. For models whose ``generate`` counts padding, or gives other positions than forward.
    """
    for num_hits in (0, 2):
        with PlaneCache(model, **settings) as cache:
            got = answer(model, cache, **prompts())
            assert cache.num_cached_tokens[0] == num_hits * BLOCK_SIZE
        for row, skip in enumerate(PADDING):
            alone = forward(model, None, got.sequences[row : row + 1, skip:], use_cache=False)
            want = alone.logits[0, NUM_COLUMNS - skip - 1 : -1]
            logits = torch.stack(got.logits)[:, row]
            torch.testing.assert_close(logits, want, atol=ATOL, rtol=0)


CHECKS: tuple[Check, ...] = (
    greedy_with_padding,
    second_call,
    beams,
    sampling,
    assisted,
    conversation,
)
