"""What transformers itself generates, and whether the engine gave the same."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from engine.request import RequestOutput

LOGITS_TOLERANCE: Final = 1e-4


class Verdict(Enum):
    """How one greedy answer compares."""

    IDENTICAL = "identical"  # all tokens, and all logits within the tolerance
    TIE = "tie"  # tokens differ where transformers' two best logits are within the tolerance
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Comparison:
    """``max_logits_error``: the largest difference up to where the comparison ended."""

    verdict: Verdict
    num_steps: int
    max_logits_error: float


class Reference:
    """A model in float32 with its own attention and its own cache."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )

    @torch.inference_mode()
    def compare(self, output: RequestOutput) -> Comparison:
        """Generate as far as ``output`` did, greedily, and compare step by step.

        ``output`` is of a greedy request with one continuation and recorded logits.
        """
        answer = output.outputs[0]
        if answer.logits is None or not answer.token_ids:
            return Comparison(Verdict.DIFFERENT, 0, float("inf"))
        prompt = torch.tensor([output.prompt_token_ids])
        generated = self._model.generate(
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
) -> Comparison:
    """Compare tokens and float32 logits [steps, vocabulary] of two greedy runs of one prompt."""
    worst = 0.0
    for step in range(max(len(got), len(want))):
        if step >= min(len(got), len(want)):
            return Comparison(Verdict.DIFFERENT, step, worst)
        error = float((got_logits[step] - want_logits[step]).abs().max())
        worst = max(worst, error)
        if not error <= LOGITS_TOLERANCE:
            return Comparison(Verdict.DIFFERENT, step, worst)
        if got[step] != want[step]:
            best, second = want_logits[step].topk(2).values.tolist()
            is_tie = best - second <= LOGITS_TOLERANCE
            return Comparison(Verdict.TIE if is_tie else Verdict.DIFFERENT, step, worst)
    return Comparison(Verdict.IDENTICAL, len(got), worst)
