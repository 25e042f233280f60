"""The forward pass of a row that several sequences share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from kvplane.transformers import attention


@torch.inference_mode()
def packed_logits(
    model: PreTrainedModel,
    tokens: Sequence[int],
    positions: Sequence[int],
    last: Sequence[int],
    step: attention.Step,
) -> torch.Tensor:
    """Run a forward pass of one row that several sequences share, with attention by ``step``.
    Returns float32 logits [len(last), vocabulary], after the tokens that ``last`` counts from 0.
    """
    keeps_all = len(last) == len(tokens)  # passed as 0, so that rows are not copied
    with attention.running(step, model):
        output = model(
            input_ids=torch.tensor([tokens], device=model.device),
            position_ids=torch.tensor([positions], device=model.device),
            use_cache=False,
            logits_to_keep=0
            if keeps_all
            else torch.tensor(last, dtype=torch.long, device=model.device),
        )
    logits: torch.Tensor = output.logits[0]
    if len(logits) != len(last):  # the model computes them for every token
        logits = logits[list(last)]
    return logits.float()
