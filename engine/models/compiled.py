"""A model whose decode steps are compiled, one program for each batch size that is a power of two.
Other batch sizes are padded up to the next one.

All programs are compiled before the engine opens its session, because compiling takes seconds to
minutes. Steps that include prefill tokens can have any number of tokens, and run eagerly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._inductor import config as inductor
from transformers import PreTrainedModel

from kvplane.models.model_layers import layer_shapes
from kvplane.transformers import attention
from kvplane.transformers.models.packed import packed_logits
from kvplane.transformers.models.probe import Recorder

BACKEND: Final = "inductor"
_log = logging.getLogger("engine")


class CompiledDecoder:
    """Computes one token of each sequence of a batch."""

    def __init__(
        self, model: PreTrainedModel, max_sequences: int, *, latent: bool, packed: bool
    ) -> None:
        """Compile ``model`` for up to ``max_sequences``. ``latent``: whether the pool keeps latents
        of layers that have them. ``packed``: whether linear layers have packed weights, which
        Inductor takes only frozen, as constants. All programs have the same ones.
        """
        self._model = model
        widths = [1 << i for i in range(_width(max_sequences).bit_length())]
        self._forward: Callable[..., Any] = torch.compile(  # type: ignore[call-overload]
            model.forward,
            backend=BACKEND,
            dynamic=False,
            recompile_limit=len(widths),
            isolate_recompiles=True,
        )
        with inductor.patch(freezing=packed):
            for width in widths:
                began_s = time.monotonic()
                some = [0] * width
                self.logits(some, some, Recorder(layer_shapes(model.config, latent=latent)))
                _log.info("compiled sequences=%d seconds=%.1f", width, time.monotonic() - began_s)

    def logits(
        self, tokens: Sequence[int], positions: Sequence[int], step: attention.Step
    ) -> torch.Tensor:
        """Compute float32 logits [sequences, vocabulary] after a token of each."""
        return packed_logits(
            self._model,
            tokens,
            positions,
            range(len(tokens)),
            step,
            forward=self._forward,
            width=_width(len(tokens)),
        )


def _width(num_sequences: int) -> int:
    """Return the least power of two that is not less."""
    return 1 << (num_sequences - 1).bit_length()
