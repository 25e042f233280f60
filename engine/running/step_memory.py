"""How much memory the largest step takes beside the weights and the pool, found by running one.

As vLLM does, the engine computes it before the pool is sized. Attention is left out: its kernels
have a limit of their own (``Kernels.scratch_bytes``), which the pool's size takes into account.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel

from data_plane.memory.sizing import free_bytes
from kvplane.errors import NeverFitsError
from kvplane.layout import Layout
from kvplane.models.model_layers import layer_shapes
from kvplane.transformers.models.packed import packed_logits
from kvplane.transformers.models.probe import Recorder

from ..request import SamplingParams
from ..sampling.sampler import sample

_LOGGER: Final = logging.getLogger(__name__)
_PROCESS: Final = Path("/proc/self")
_RESETS_PEAK: Final = "5"


def utilization_beside_step(
    model: PreTrainedModel,
    layout: Layout,
    *,
    utilization: float,
    num_processes: int,
    max_batch_tokens: int,
    max_sequences: int,
) -> float:
    """Return the fraction of the free memory to give a pool on the CPU, so that the pool and the
    largest step together use at most ``utilization`` of it. ``num_processes``: how many processes
    of this machine size a pool this way, this one included. Raises NeverFitsError if the step alone
    exceeds the limit.
    """
    largest = model, layout, max_batch_tokens, max_sequences
    run_largest_step(*largest)  # weights are read from files when they are first used
    free = free_bytes(torch.device("cpu"))
    before = _kib("VmRSS")
    with suppress(OSError):  # without it, what was taken before may count too
        (_PROCESS / "clear_refs").write_text(_RESETS_PEAK)
    run_largest_step(*largest)
    step_bytes = 1024 * max(0, _kib("VmHWM") - before)
    usable = free * utilization / num_processes - step_bytes
    _LOGGER.info("measured free_bytes=%d step_bytes=%d", free, step_bytes)
    if usable <= 0:
        raise NeverFitsError(
            f"a step of {max_batch_tokens} tokens takes {step_bytes} bytes, and {free} are free: "
            "compute fewer at one time",
            field="max_batch_tokens",
        )
    return usable / free


class _Row:
    """A sequence whose next token is drawn in the way that takes most memory."""

    params = SamplingParams(temperature=1.0, top_p=0.9)
    stream = 0
    tokens = (0,)
    num_prompt_tokens = 1


def run_largest_step(
    model: PreTrainedModel, layout: Layout, max_batch_tokens: int, max_sequences: int
) -> None:
    """Compute as many tokens as a step may have, of as many sequences, and sample. Attention only
    returns zeros.
    """
    num_sequences = min(max_sequences, max_batch_tokens)
    tokens_each = max_batch_tokens // num_sequences
    num_tokens = tokens_each * num_sequences
    positions = [i % tokens_each for i in range(num_tokens)]
    last = range(tokens_each - 1, num_tokens, tokens_each)
    step = Recorder(layer_shapes(model.config, latent=bool(layout.latent_layers)))
    logits = packed_logits(model, [0] * num_tokens, positions, last, step)
    sample(logits, [_Row()] * num_sequences)


def _kib(name: str) -> int:
    """Return one of this process's sizes in KiB."""
    for line in (_PROCESS / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0
