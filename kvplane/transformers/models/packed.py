"""The forward pass of a row that several sequences share, and of a row for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvplane.transformers import attention
from kvplane.transformers.models.positions import give_positions
from kvplane.transformers.states import StateCache


@torch.inference_mode()
def packed_logits(
    model: PreTrainedModel,
    tokens: Sequence[int],
    positions: Sequence[int],
    last: Sequence[int],
    step: attention.Step,
    *,
    forward: Callable[..., Any] | None = None,
    width: int = 0,
) -> torch.Tensor:
    """Run a forward pass of one row that several sequences share, with attention by ``step``.
    Returns float32 logits [len(last), vocabulary], after the tokens that ``last`` counts from 0.

    ``forward``: computes ``model``, if not as it is written. ``width``: tokens that the row is
    padded to; ``step`` computes none of the padding.
    """
    num_tokens = len(tokens)
    padding = [0] * (width - num_tokens)
    keeps_all = len(last) == num_tokens  # passed as 0, so that rows are not copied
    position_ids = torch.tensor([[*positions, *padding]], device=model.device)
    give_positions(model, position_ids)
    with attention.running(step, model, slice(num_tokens) if padding else None):
        output = (forward or model)(
            input_ids=torch.tensor([[*tokens, *padding]], device=model.device),
            position_ids=position_ids,
            use_cache=False,
            logits_to_keep=0
            if keeps_all
            else torch.tensor(last, dtype=torch.long, device=model.device),
        )
    logits: torch.Tensor = output.logits[0]
    if len(logits) != len(last):  # the model computes them for every token
        logits = logits[:num_tokens] if keeps_all else logits[list(last)]
    return logits.float()


@torch.inference_mode()
def row_logits(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    first_positions: Sequence[int],
    cache: StateCache,
    step: attention.Step,
) -> torch.Tensor:
    """Run a forward pass of rows of equally many tokens, which continue the running states in
    ``cache``, with attention by ``step``. Returns float32 logits [num_rows, vocabulary], after the
    last token of each.
    """
    first = torch.tensor(first_positions, device=model.device)[:, None]
    position_ids = first + torch.arange(len(rows[0]), device=model.device)
    give_positions(model, position_ids)
    with attention.running(step, model):
        output = model(
            input_ids=torch.tensor(rows, device=model.device),
            position_ids=position_ids,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    logits: torch.Tensor = output.logits[:, -1]
    return logits.float()
