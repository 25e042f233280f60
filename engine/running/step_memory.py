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

from ..models.captured import sizes_of
from ..request import SamplingParams
from ..sampling.sampler import sample

_LOGGER: Final = logging.getLogger(__name__)
_PROCESS: Final = Path("/proc/self")
_RESETS_PEAK: Final = "5"
_GRAPH_BYTES: Final = 32 << 20
"""Memory that the driver takes for one graph of some thousand kernels."""


def utilization_beside_step(
    model: PreTrainedModel,
    layout: Layout,
    *,
    utilization: float,
    num_processes: int,
    max_batch_tokens: int,
    max_sequences: int,
    graphs: bool = False,
) -> float:
    """Return the fraction of the free memory to give a pool on the model's device, so that the pool
    and the largest step together use at most ``utilization`` of what was free on the CPU. On a GPU
    they use so much of all memory, together with what is used already, such as the weights, and
    with ``graphs`` also the captured steps. ``num_processes``: how many processes size a pool on
    the device this way, this one included. Raises NeverFitsError if nothing is left.
    """
    device = model.device
    largest = model, layout, max_batch_tokens, max_sequences
    run_largest_step(*largest)  # weights are read from files when they are first used
    step_bytes = _peak_bytes(*largest)
    free = limit = free_bytes(device)
    if device.type == "cuda":
        limit = int(torch.cuda.get_device_properties(device).total_memory)
        if graphs:
            step_bytes += _graph_bytes(model, layout, max_sequences)
    used = limit - free  # 0 on the CPU
    usable = (limit * utilization - used) / num_processes - step_bytes
    _LOGGER.info("measured free_bytes=%d used_bytes=%d step_bytes=%d", free, used, step_bytes)
    if usable <= 0:
        raise NeverFitsError(
            f"a step of {max_batch_tokens} tokens takes {step_bytes} bytes, and {free} are free on "
            f"{device}: compute fewer at one time",
            field="max_batch_tokens",
        )
    return usable / free


def _peak_bytes(
    model: PreTrainedModel, layout: Layout, max_batch_tokens: int, max_sequences: int
) -> int:
    """Return how much more memory of its device the model has at most during a step."""
    largest = model, layout, max_batch_tokens, max_sequences
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device)
        run_largest_step(*largest)
        peak = torch.cuda.max_memory_allocated(model.device) - before
        torch.cuda.empty_cache()  # or what torch keeps would not count as free
        return peak
    before = _kib("VmRSS")
    with suppress(OSError):  # without it, what was taken before may count too
        (_PROCESS / "clear_refs").write_text(_RESETS_PEAK)
    run_largest_step(*largest)
    return 1024 * max(0, _kib("VmHWM") - before)


def _graph_bytes(model: PreTrainedModel, layout: Layout, max_sequences: int) -> int:
    """Return an upper limit of the memory of captured steps: what each one's tensors take."""
    of_largest, sizes = (
        _peak_bytes(model, layout, max_sequences, max_sequences),
        sizes_of(max_sequences),
    )
    return of_largest * sum(sizes) // max_sequences + _GRAPH_BYTES * len(sizes)


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
